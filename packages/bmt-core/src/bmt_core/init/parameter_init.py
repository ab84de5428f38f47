"""``init_parameters``: initial values that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bmt_core.comm.protocols import Group
from bmt_core.init.module_init import ModuleInit, initialize_modules, initializing, run_init_method
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current


class ParameterInitializer:
    """``func(tensor, *args, **kwargs)`` to be run later, with the tensor.

    >>> init = ParameterInitializer(torch.nn.init.constant_, 2.0)
    >>> init(torch.empty(2))
    tensor([2., 2.])
    """

    def __init__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Run the function on ``tensor``, in place."""
        return self.func(tensor, *self.args, **self.kwargs)


def init_parameters(model: nn.Module, *, init: ModuleInit | None = None) -> None:
    """Give every distributed parameter with an ``init_method`` its initial value, and whatever has none a value.

    The values equal those of the same calls, in the order of ``model.parameters()``, on whole tensors in one process
    with the same seed. Every rank draws all numbers and keeps its part: nothing is communicated, and one whole tensor
    exists at a time. Tied parameters are initialised once. Parameters of a Block made with ``initialized=True`` keep
    their values.

    What was made on the meta device and has no ``init_method`` is then initialised by its modules, children first,
    with one block whole at a time: by ``init(module)``, by the ``_init_weights(module)`` of a module around, or by
    ``reset_parameters()``; see :func:`bmt_core.init.module_init.initialize_modules`.
    """
    with initializing():
        for parameter in model.parameters():
            if isinstance(parameter, DistributedParameter) and not parameter._initialized:
                run_init_method(parameter)
    initialize_modules(model, init)


def grouped_parameters(model: nn.Module) -> Iterator[tuple[Group, list[nn.Parameter]]]:
    """Yield ``(group, parameters)`` for every group over which parameters of ``model`` are sharded, each parameter once.

    Parameters that are not distributed come with the group of all ranks.
    """
    grouped: dict[tuple[int, ...], tuple[Group, list[nn.Parameter]]] = {}
    for parameter in model.parameters():
        group = parameter.group if isinstance(parameter, DistributedParameter) else current().world
        grouped.setdefault(group.ranks, (group, []))[1].append(parameter)
    yield from grouped.values()
