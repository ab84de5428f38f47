"""``init_parameters``: give a model initial values, the same for every number of ranks; and the
other functions of BMTrain's module of this name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bmt_core.torch_internals import counting_versions
from bmt_params.init.module_init import (
    ModuleInit,
    initialize_modules,
    initializing,
    run_init_methods,
)
from bmt_params.parameter import DistributedParameter
from bmt_params.parameter_holders import group_of_owners


class ParameterInitializer:
    """An ``init_method``: called with a tensor, it calls ``func(tensor, *args, **kwargs)``.

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


@counting_versions()
def init_parameters(model: nn.Module, *, init: ModuleInit | None = None) -> None:
    """Initialise every distributed parameter that has an ``init_method``, and then all that has no
    values yet.

    The values equal those of the same calls, in the order of ``model.parameters()``, on whole
    tensors in one process with the same seed. Every rank draws all numbers of a whole tensor and
    keeps its part: nothing is communicated, and one whole tensor exists at a time. If ranks have
    layers of their own, as pipeline stages do, each rank continues the random numbers of the rank
    with the previous layer, and what fails on one of them raises on all. Tied parameters are
    initialised once. Parameters of a Block made with ``initialized=True`` keep their values.
    Collective if the grid has axes besides ``dp``.

    Tensors that were made on the meta device and have no ``init_method`` are then initialised by
    their modules, children first, one Block at a time: by ``init(module)``, by the
    ``_init_weights(module)`` of an enclosing module, or by ``reset_parameters()``. See
    :func:`bmt_params.init.module_init.initialize_modules`.
    """
    with initializing():
        _run_init_methods(model)
    initialize_modules(model, init)


def iterate_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield each parameter of ``model`` once: this rank's part. BMTrain's name of
    ``model.parameters()``.
    """
    yield from model.parameters()


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


def _run_init_methods(model: nn.Module) -> None:
    named = {name: p for name, p in model.named_parameters() if isinstance(p, DistributedParameter)}
    run_init_methods(
        {name: p for name, p in named.items() if not p._initialized},
        group_of_owners(named.values()),
    )
