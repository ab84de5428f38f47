"""Values for what was made on the meta device: each module's own initialisation, with one block whole at a time.

What is whole when, and how it is known what was written: see [Note: whole while it is written] in
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
from bmt_core.init.whole_parameters import WholeParameters, whole_bytes
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

    Modules with something in them that has no values are visited, children first, as ``model.apply()`` does. A visit
    calls ``init(module)``; without ``init``, the ``_init_weights(module)`` of the nearest module around that has one
    (Hugging Face's convention); without that, the module's ``reset_parameters()`` or ``init_weights()``. Where the
    first leaves tensors of the module itself without values, the others follow. A parameter keeps what the first module
    that owns it drew, and so do tied ones when others own them too; a module around may write it again. What has values
    keeps them. What a constructor does beyond these methods is not repeated.

    Numbers are drawn by every rank alike, so that the values are those of one process, for any number of ranks.
    Collective where a module around writes to what a module inside initialised.
    """
    plain = [name for name, p in model.named_parameters() if p.is_meta and not isinstance(p, DistributedParameter)]
    if plain:
        raise ConfigError(
            f"{list_names(plain, [])} are on the meta device and not distributed. Wrap the model with BMTrainModelWrapper, or make"
            " them part of a Block, before they are initialised."
        )
    materialize_buffers(_with_meta_buffers(model), current().device)
    with initializing():
        for parameter in filter(_is_target, model.parameters()):
            run_init_method(parameter)
    targets = [parameter for parameter in model.parameters() if _is_target(parameter)]
    if targets or uninitialized_names(model)[1]:
        _Visits(model, targets, init).run(_with_blanks(model))
        _recheck_buffers(model)
    parameters, buffers = uninitialized_names(model)
    promised = {name for name, p in model.named_parameters() if isinstance(p, DistributedParameter) and p._initialized}
    parameters = [name for name in parameters if name not in promised]
    if parameters or buffers:
        raise ConfigError(f"{list_names(parameters, buffers)} have no values after initialisation. {_REMEDY}")


def initialize_unsaved_buffers(model: nn.Module) -> None:
    """Compute the buffers that no checkpoint holds, and leave all else of ``model`` as it is."""
    materialize_buffers(_with_meta_buffers(model), current().device)
    wanted = {id(module) for module in model.modules() if any(_unsaved_blanks(module))}
    if wanted:
        _Visits(model, [], None).run(wanted)
        _recheck_buffers(model)


def run_init_method(parameter: DistributedParameter) -> None:
    """Give ``parameter`` the values that its ``init_method`` gives the whole tensor, if it has one."""
    if parameter._init_method is None:
        return
    whole = torch.empty(parameter._tp_original_shape, dtype=parameter.dtype, device=parameter.device)
    parameter._init_method(whole)
    if whole.shape != parameter.full_shape:
        split = parameter._tp_split_dim
        whole = whole.chunk(current().topology.axis_size("tp"), dim=split)[current().topology.axis_rank("tp")]
    parameter.copy_(parameter.local_part(whole))


@contextmanager
def initializing() -> Iterator[None]:
    """Run code that initialises whole tensors: without gradients, and not on the meta device."""
    with torch.no_grad(), reading_parts(), off_meta_device():
        yield


_REMEDY = (
    "The model was made on the meta device, where what __init__ computes is lost, and no initialisation sets them."
    " Set them in the module's reset_parameters(), or pass init=, a function that is called with each module, or make"
    " these tensors under torch.device('cpu'). For a model that will be loaded: BMTrainModelWrapper(model, init=False)."
)


class _Visits:
    """One walk over a model that lets modules initialise themselves."""

    def __init__(self, model: nn.Module, targets: list[DistributedParameter], init: ModuleInit | None) -> None:
        self._model = model
        self._init = init
        self._wholes = WholeParameters(targets, budget=_largest_unit(model))
        self._seen: set[int] = set()

    def run(self, wanted: set[int]) -> None:
        """Visit the modules whose ids are ``wanted``."""
        try:
            with initializing():
                self._walk(self._model, None, False, wanted)
        finally:
            self._wholes.release_all()

    def _walk(self, module: nn.Module, owner: nn.Module | None, in_block: bool, wanted: set[int]) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if _takes(module, "_init_weights", 1):
            owner = module
        for child in module.children():
            self._walk(child, owner, in_block or _is_block(module), wanted)
        if id(module) in wanted:
            self._visit(module, owner)
        if not in_block:
            self._wholes.release_all()

    def _visit(self, module: nn.Module, owner: nn.Module | None) -> None:
        self._wholes.begin_visit()
        for number, call in enumerate(_initializers(module, owner, self._init)):
            if number == 0 or self._lacks_values(module):
                self._call(module, call)

    def _call(self, module: nn.Module, call: ModuleInit) -> None:
        before = dict(module._parameters)
        self._wholes.begin_call(module)
        with self._wholes:
            call(module)
        self._wholes.end_call()
        if any(module._parameters.get(name) is not parameter for name, parameter in before.items()):
            raise ConfigError(
                f"The initialisation of {type(module).__name__} gave it other parameters than it had, which would not be"
                " sharded. Write to the parameters that are there: torch.nn.init.normal_(self.weight), say."
            )
        materialize_buffers([module], current().device)

    def _lacks_values(self, module: nn.Module) -> bool:
        own = [buffer for buffer in module._buffers.values() if buffer is not None]
        for buffer in own:
            mark_if_nan_is_left(buffer)
        return self._wholes.lacks_values(module) or not all(has_values(buffer) for buffer in own)


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
    method = getattr(type(module), name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * (count + 1))
    except TypeError:
        return False
    return True


def _is_target(parameter: nn.Parameter) -> TypeGuard[DistributedParameter]:
    return isinstance(parameter, DistributedParameter) and not has_values(parameter) and not parameter._initialized


def _is_block(module: nn.Module) -> bool:
    return bool(getattr(type(module), "_bmt_shards_as_one", False))


def _largest_unit(model: nn.Module) -> int:
    """Bytes of the largest block, or of the largest parameters that one module has for itself."""
    units = [module.parameters(recurse=_is_block(module)) for module in model.modules()]
    return max(sum(whole_bytes(p) for p in unit if isinstance(p, DistributedParameter)) for unit in units)


def _with_blanks(model: nn.Module) -> set[int]:
    """Ids of the modules that have something without values in them, at any depth."""
    found: set[int] = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        own = [*module._parameters.values(), *module._buffers.values()]
        if not all(tensor is None or has_values(tensor) for tensor in own):
            steps = path.split(".") if path else []
            found |= {id(modules[".".join(steps[:depth])]) for depth in range(len(steps) + 1)}
    return found


def _with_meta_buffers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if any(b is not None and b.is_meta for b in m._buffers.values())]


def _unsaved_blanks(module: nn.Module) -> Iterator[str]:
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None and not has_values(buffer):
            yield name


def _recheck_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        mark_if_nan_is_left(buffer)
