"""Initialises a model made on the meta device: each module by its own methods, one Block after the other.

How the code of a module reads and writes whole parameters: [Note: whole while initialised] in
:mod:`bmt_core.init.whole_parameters`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.init.whole_parameters import WholeParameters, is_block
from bmt_core.modules.outermost_call import reading_parts
from bmt_core.params.parameter import DistributedParameter
from bmt_core.params.uninitialized import (
    has_values,
    list_names,
    mark_if_nan_is_left,
    materialize_buffers,
    off_meta_device,
    uninitialized_names,
)
from bmt_core.run.runtime import current

ModuleInit = Callable[[nn.Module], Any]


def initialize_modules(model: nn.Module, init: ModuleInit | None = None) -> None:
    """Give values to all of ``model`` that has none, and raise :class:`ConfigError` naming what nothing gives any.

    Modules with something in them that has no values are initialised, children first, as ``model.apply()`` does: by
    ``init(module)``; without ``init``, by the ``_init_weights(module)`` of the nearest module around that has one
    (Hugging Face's convention); without that, by the module's ``reset_parameters()`` or ``init_weights()``. Where the
    first leaves tensors of the module itself without values, the others follow. A parameter keeps what the first module
    that owns it drew, and so do tied ones when others own them too; a module around may write it again. What has values
    keeps them. What a constructor does beyond these methods is not repeated.

    Numbers are drawn by every rank alike, so that the values are those of one process, for any number of ranks.
    Collective where a module around reads what a module inside initialised.
    """
    plain = [name for name, p in model.named_parameters() if p.is_meta and not isinstance(p, DistributedParameter)]
    if plain:
        raise ConfigError(
            f"{list_names(plain, [])} are on the meta device and not distributed. Wrap the model with BMTrainModelWrapper, or"
            " make them part of a Block, before they are initialised."
        )
    with initializing():
        for parameter in filter(_needs_values, model.parameters()):
            run_init_method(parameter)
    targets = list(filter(_needs_values, model.parameters()))
    incomplete = {module for module in model.modules() if any(uninitialized_names(module))}
    _initialize(incomplete, model, targets, init)
    parameters = [name for name, parameter in model.named_parameters() if _needs_values(parameter)]
    buffers = uninitialized_names(model)[1]
    if parameters or buffers:
        raise ConfigError(
            f"{list_names(parameters, buffers)} have no values after initialisation. The model was made on the meta device,"
            " where what __init__ computes is lost, and no initialisation sets them. Set them in the module's"
            " reset_parameters(), or pass init=, a function that is called with each module, or make these tensors under"
            " torch.device('cpu'). For a model that will be loaded: BMTrainModelWrapper(model, init=False)."
        )


def initialize_unsaved_buffers(model: nn.Module) -> None:
    """Compute the buffers that no checkpoint holds (``persistent=False``), and leave all else of ``model`` as it is."""
    unsaved = ((m, m._buffers.get(name)) for m in model.modules() for name in m._non_persistent_buffers_set)
    incomplete = {module for module, buffer in unsaved if buffer is not None and not has_values(buffer)}
    _initialize(incomplete, model, [], None)


def run_init_method(parameter: DistributedParameter) -> None:
    """Give ``parameter`` the values that its ``init_method`` gives the whole tensor, if it has one."""
    if parameter._init_method is None:
        return
    whole = torch.empty(parameter.whole_shape, dtype=parameter.dtype, device=parameter.device)
    parameter._init_method(whole)
    parameter.copy_(parameter.local_part(parameter.own_slice(whole)))


@contextmanager
def initializing() -> Iterator[None]:
    """Run code that initialises whole tensors: without gradients, and not on the meta device."""
    with torch.no_grad(), reading_parts(), off_meta_device():
        yield


def _initialize(
    modules: set[nn.Module], model: nn.Module, targets: list[DistributedParameter], init: ModuleInit | None
) -> None:
    """Let ``modules`` of ``model`` initialise themselves, and ``targets`` keep what is written to them."""
    device = current().device
    materialize_buffers([m for m in model.modules() if any(b.is_meta for b in m.buffers(recurse=False))], device)
    if not modules:
        return
    with initializing(), WholeParameters(model, targets) as wholes:
        for module, owner, in_block in _children_first(model, None, False, set()):
            left: set[Any] | None = None
            for call in _initializers(module, owner, init) if module in modules else ():
                unwritten = wholes.call(call, module)
                left = unwritten if left is None else left & unwritten
                materialize_buffers([module], device)
                for buffer in module.buffers():
                    mark_if_nan_is_left(buffer)
                if not left and all(map(has_values, module.buffers(recurse=False))):
                    break
            if not in_block:
                wholes.shard()


def _children_first(
    module: nn.Module, owner: nn.Module | None, in_block: bool, seen: set[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module | None, bool]]:
    """Yield each module with the nearest one around that has ``_init_weights``, and whether it is inside a Block."""
    if module not in seen:
        seen.add(module)
        owner = module if _takes(module, "_init_weights", 1) else owner
        for child in module.children():
            yield from _children_first(child, owner, in_block or is_block(module), seen)
        yield module, owner, in_block


def _initializers(module: nn.Module, owner: nn.Module | None, init: ModuleInit | None) -> list[ModuleInit]:
    calls: list[ModuleInit] = [] if init is None else [init]
    if owner is not None:
        calls.append(owner._init_weights)  # type: ignore[arg-type]
    # Hugging Face's init_weights() initialises all modules inside, each by _init_weights(), which is called already.
    names = ["reset_parameters", "_reset_parameters", *(["init_weights"] if owner is None else [])]
    resets = (name for name in names if _takes(module, name, 0))
    return [*calls, *(operator.methodcaller(name) for name in resets)]


def _takes(module: nn.Module, name: str, count: int) -> bool:
    """Whether ``module`` has a method ``name`` that can be called with ``count`` arguments."""
    try:
        inspect.signature(getattr(type(module), name)).bind(*[None] * (count + 1))
    except (AttributeError, TypeError):
        return False
    return True


def _needs_values(parameter: nn.Parameter) -> TypeGuard[DistributedParameter]:
    return isinstance(parameter, DistributedParameter) and not has_values(parameter) and not parameter._initialized
