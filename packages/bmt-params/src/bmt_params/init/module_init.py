"""``initialize_modules``: initialise a model made on the meta device, each module by its own
methods, Block by Block.

[Note: whole while initialised] in :mod:`bmt_params.init.whole_on_read` says how these methods can
read and write whole parameters.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.torch_internals import counting_versions, unsaved_buffers
from bmt_params.init.model_order import ModelOrder
from bmt_params.init.whole_on_read import WholeOnRead, is_block
from bmt_params.modules.outermost_call import reading_parts
from bmt_params.parameter import DistributedParameter, note_whole_values
from bmt_params.parameter_holders import group_of_owners
from bmt_params.uninitialized import (
    has_values,
    list_names,
    mark_if_nan_is_left,
    materialize_buffers,
    off_meta_device,
    uninitialized_names,
)

ModuleInit = Callable[[nn.Module], Any]


@counting_versions()
def initialize_modules(model: nn.Module, init: ModuleInit | None = None) -> None:
    """Initialise all parameters and buffers of ``model`` without values; raise :class:`ConfigError`
    if some still have none.

    Modules that contain such tensors are initialised in the order of ``model.apply()``, children
    first: by ``init(module)``; or else by the ``_init_weights(module)`` of the nearest enclosing
    module that has one (Hugging Face's convention); or else by the module's ``reset_parameters()``
    or ``init_weights()``. If one of these leaves a tensor of the module itself without values, the
    next one is called too. A tied parameter keeps the values that the first of its modules gave it,
    but an enclosing module may overwrite any parameter inside it. Tensors that had values before
    keep them. Anything else that a constructor did is not repeated.

    All ranks draw the same numbers, and ranks that have layers of their own, as pipeline stages do,
    take turns, so the values are those of one process, for any number of ranks.
    :class:`ConfigError` if a module that all ranks have draws the values of layers that only some
    have. Collective if the grid has axes besides ``dp``, or an enclosing module reads a parameter
    that a module inside it initialised.
    """
    plain = [
        name
        for name, p in model.named_parameters()
        if p.is_meta and not isinstance(p, DistributedParameter)
    ]
    if plain:
        raise ConfigError(
            f"{list_names(plain, [])} are on the meta device and not distributed. Wrap the model"
            " with BMTrainModelWrapper, or make them part of a Block, before they are initialised."
        )
    owners = group_of_owners(model.parameters())
    with initializing():
        run_init_methods(
            {name: p for name, p in model.named_parameters() if _needs_values(p)}, owners
        )
    targets = list(filter(_needs_values, model.parameters()))
    incomplete = {module for module in model.modules() if any(uninitialized_names(module))}
    _initialize(incomplete, model, targets, init, owners)
    parameters = [name for name, parameter in model.named_parameters() if _needs_values(parameter)]
    buffers = uninitialized_names(model)[1]
    if parameters or buffers:
        raise ConfigError(
            f"{list_names(parameters, buffers)} have no values after initialisation. The model was"
            " made on the meta device, where what __init__ computes is lost, and no initialisation"
            " sets them. Set them in the module's reset_parameters(), or pass init=, a function"
            " that is called with each module, or make these tensors under torch.device('cpu'). For"
            " a model that will be loaded: BMTrainModelWrapper(model, init=False)."
        )


def initialize_unsaved_buffers(model: nn.Module) -> None:
    """Compute the buffers of ``model`` that no checkpoint holds (``persistent=False``). Everything
    else is left unchanged.
    """
    unsaved = ((m, m._buffers.get(name)) for m in model.modules() for name in unsaved_buffers(m))
    incomplete = {
        module for module, buffer in unsaved if buffer is not None and not has_values(buffer)
    }
    _initialize(incomplete, model, [], None, group_of_owners(model.parameters()))


def run_init_methods(parameters: Mapping[str, DistributedParameter], owners: Group) -> None:
    """Call the ``init_method`` of each of ``parameters``, by name, that has one. ``owners``: see
    :class:`ModelOrder`.
    """
    ModelOrder(parameters, owners).run(lambda name: _run_init_method(parameters[name]))


def _run_init_method(parameter: DistributedParameter) -> None:
    """Call the ``init_method`` of ``parameter``, if it has one, with a whole tensor, and keep this
    rank's part.
    """
    if parameter._init_method is None:
        return
    whole = torch.empty(parameter.whole_shape, dtype=parameter.dtype, device=parameter.device)
    parameter._init_method(whole)
    parameter.copy_(parameter.local_part(parameter.own_slice(whole)))
    note_whole_values(parameter, whole, version=parameter._version)


@contextmanager
def initializing() -> Iterator[None]:
    """Inside, nothing records gradients, modules return parameters ungathered, and tensors are not
    made on the meta device.
    """
    with torch.no_grad(), reading_parts(), off_meta_device():
        yield


def _initialize(
    modules: set[nn.Module],
    model: nn.Module,
    targets: list[DistributedParameter],
    init: ModuleInit | None,
    owners: Group,
) -> None:
    """Initialise ``modules`` of ``model``. Of the parameters they write to, only ``targets`` keep
    the new values.
    """
    device = current().device
    materialize_buffers(
        [m for m in model.modules() if any(b.is_meta for b in m.buffers(recurse=False))], device
    )
    named = {module.name: module for module in _children_first(model, "", None, False, set())}
    order = ModelOrder(named, owners)
    incomplete = order.on_any_rank(name for name, entry in named.items() if entry.module in modules)
    # The owners have agreed on these names, so all of them return or none.
    if not incomplete:
        return
    with initializing(), WholeOnRead(model, targets) as wholes:

        def initialize(name: str) -> None:
            module = named[name].module
            left: set[Any] | None = None
            for call in (
                # Even if it has values here and none elsewhere: all ranks draw the same.
                _initializers(module, named[name].owner, init) if name in incomplete else ()
            ):
                unwritten = wholes.call(call, module)
                left = unwritten if left is None else left & unwritten
                # It may have assigned new buffers, made on the host.
                materialize_buffers([module], device)
                for buffer in module.buffers():
                    mark_if_nan_is_left(buffer)
                if not left and all(map(has_values, module.buffers(recurse=False))):
                    break
            # A Block's parameters stay whole until the Block, the last of its modules, is done.
            if not named[name].in_block:
                wholes.shard()

        order.run(initialize)


class _NamedModule(NamedTuple):
    name: str
    module: nn.Module
    owner: nn.Module | None  # the nearest module with _init_weights: itself or one around it
    in_block: bool  # whether a Block contains it


def _children_first(
    module: nn.Module, name: str, owner: nn.Module | None, in_block: bool, seen: set[nn.Module]
) -> Iterator[_NamedModule]:
    """Yield each module, those inside of it first."""
    if module not in seen:
        seen.add(module)
        owner = module if _accepts(module, "_init_weights", 1) else owner
        for child_name, child in module.named_children():
            inner = f"{name}.{child_name}" if name else child_name
            yield from _children_first(child, inner, owner, in_block or is_block(module), seen)
        yield _NamedModule(name, module, owner, in_block)


def _initializers(
    module: nn.Module, owner: nn.Module | None, init: ModuleInit | None
) -> list[ModuleInit]:
    calls: list[ModuleInit] = [] if init is None else [init]
    if owner is not None:
        calls.append(owner._init_weights)  # type: ignore[arg-type]
    # Hugging Face's init_weights() calls _init_weights() for all modules inside, as is done
    # here already.
    names = ["reset_parameters", "_reset_parameters", *(["init_weights"] if owner is None else [])]
    resets = (name for name in names if _accepts(module, name, 0))
    return [*calls, *(operator.methodcaller(name) for name in resets)]


def _accepts(module: nn.Module, name: str, count: int) -> bool:
    """Whether ``module`` has a method ``name`` that can be called with ``count`` arguments."""
    try:
        inspect.signature(getattr(type(module), name)).bind(*[None] * (count + 1))
    except (AttributeError, TypeError):
        return False
    return True


def _needs_values(parameter: nn.Parameter) -> TypeGuard[DistributedParameter]:
    return (
        isinstance(parameter, DistributedParameter)
        and not has_values(parameter)
        and not parameter._initialized
    )
