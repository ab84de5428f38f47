"""``init_parameters``: initial values that do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.init.module_init import ModuleInit, initialize_modules, initializing, run_init_method
from bmt_core.params.own_parameters import group_of_owners, in_one_order
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
    with the same seed. Every rank draws all numbers and keeps its part, so that no values are communicated, and one whole
    tensor exists at a time. Where ranks have layers of their own, as pipeline stages do, one draws on where the other
    stopped. Tied parameters are initialised once. Parameters of a Block made with ``initialized=True`` keep their values.
    Collective where the grid has axes besides ``dp``.

    What was made on the meta device and has no ``init_method`` is then initialised by its modules, children first,
    with one block whole at a time: by ``init(module)``, by the ``_init_weights(module)`` of a module around, or by
    ``reset_parameters()``; see :func:`bmt_core.init.module_init.initialize_modules`.
    """
    with initializing():
        _run_init_methods(model)
    initialize_modules(model, init)


def _run_init_methods(model: nn.Module) -> None:
    named = {name: p for name, p in model.named_parameters() if isinstance(p, DistributedParameter)}
    owners = group_of_owners(named.values())
    names_of_ranks = all_gather_object(list(named), owners)
    order = in_one_order(names_of_ranks)
    sets = [set(names) for names in names_of_ranks]
    holders = [[name in names for names in sets] for name in order]
    for name, here, following in zip(order, holders, [*holders[1:], None], strict=True):
        if name in named and not named[name]._initialized:
            run_init_method(named[name])
        if here != following and not all(here):
            _draw_on(owners, here.index(True))


def _draw_on(group: Group, src: int) -> None:
    """Give the ranks of ``group`` the state of torch's generators that rank ``src`` of it has. Collective over the group."""
    device = current().device
    own = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    host, on_device = broadcast_object(own, group, src)
    torch.set_rng_state(host)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)


def grouped_parameters(model: nn.Module) -> Iterator[tuple[Group, list[nn.Parameter]]]:
    """Yield ``(group, parameters)`` for every group over which parameters of ``model`` are sharded, each parameter once.

    Parameters that are not distributed come with the group of all ranks.
    """
    grouped: dict[tuple[int, ...], tuple[Group, list[nn.Parameter]]] = {}
    for parameter in model.parameters():
        group = parameter.group if isinstance(parameter, DistributedParameter) else current().world
        grouped.setdefault(group.ranks, (group, []))[1].append(parameter)
    yield from grouped.values()
