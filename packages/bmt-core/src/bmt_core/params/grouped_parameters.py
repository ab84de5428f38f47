"""``grouped_parameters``: the parameters of a model by the group of ranks over which they are sharded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bmt_core.comm.protocols import Group
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current


def grouped_parameters(model: nn.Module) -> Iterator[tuple[Group, list[nn.Parameter]]]:
    """Yield ``(group, parameters)`` for every group over which parameters of ``model`` are sharded, each parameter once.

    Parameters that are not distributed come with the group of all ranks.
    """
    grouped: dict[tuple[int, ...], tuple[Group, list[nn.Parameter]]] = {}
    for parameter in model.parameters():
        group = parameter.group if isinstance(parameter, DistributedParameter) else current().world
        grouped.setdefault(group.ranks, (group, []))[1].append(parameter)
    yield from grouped.values()
