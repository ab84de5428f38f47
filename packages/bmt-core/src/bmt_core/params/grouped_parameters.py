"""``grouped_parameters``: the parameters of a model by their labels, as in BMTrain."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bmt_core.params.parameter import DistributedParameter


def grouped_parameters(model: nn.Module) -> Iterator[tuple[str | None, list[nn.Parameter]]]:
    """Yield ``(label, parameters)`` for each ``group`` that parameters of ``model`` were made with,
    each parameter once.

    The label is None for parameters without one, and for those that are not distributed.
    Communicates nothing.
    """
    grouped: dict[str | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        label = parameter.group if isinstance(parameter, DistributedParameter) else None
        grouped.setdefault(label, []).append(parameter)
    yield from grouped.items()
