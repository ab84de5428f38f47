"""What lasts as long as the outermost bmt module's call: gathered parameters, and the rank's random stream.

[Note: reads that are expected] Which parameters outside of Blocks a call reads is remembered with its outermost module, one
memory for calls with gradients and one for those without. The next such call gathers what the last one read (the first: all that
the module holds), at once and when it begins, so that it is there, or on its way, when it is read. What was not expected, or
was changed meanwhile, is gathered by itself. Every rank reads the same, so every rank expects the same.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from bmt_core.modules.root_group import Together
from bmt_core.params.parameter import DistributedParameter
from bmt_core.params.uninitialized import has_values
from bmt_core.run.random_numbers import rank_random
from bmt_core.run.runtime import current, is_initialized


class _Gathered(NamedTuple):
    # The parameter is kept, so that its id is not given to another one while the entry lives.
    parameter: DistributedParameter
    version: int
    full: torch.Tensor


class _Ahead(NamedTuple):
    together: Together
    mode: tuple[bool, bool]


Key = tuple[int, bool, bool]
_Expected = dict[tuple[bool, bool], list[weakref.ref[DistributedParameter]]]


class _Scope(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.gathered: dict[Key, _Gathered] = {}
        self.ahead: dict[int, _Ahead] = {}  # by the ids of the parameters
        self.read: dict[int, DistributedParameter] = {}
        self.reads_parts = False


_scope = _Scope()
_expected: weakref.WeakKeyDictionary[nn.Module, _Expected] = weakref.WeakKeyDictionary()


@contextmanager
def forward_scope(module: nn.Module | None = None, *, own_random: bool = True) -> Iterator[None]:
    """Enter the call of ``module``. Leaving the outermost one forgets what was gathered; nested ones share it.

    ``own_random`` False: the generators stay as they are, for a caller that has set them.
    """
    if _scope.depth > 0 or not is_initialized():
        yield
        return
    with rank_random(current()) if own_random else nullcontext():
        mode = _mode()
        _scope.depth += 1
        try:
            if module is not None:
                _begin_call(module, mode)
            yield
            if module is not None:
                _expected.setdefault(module, {})[mode] = [weakref.ref(p) for p in _scope.read.values() if _is_apart(p)]
        finally:
            _scope.depth -= 1
            _scope.gathered.clear()
            ahead, _scope.ahead, _scope.read = _scope.ahead, {}, {}
            for together in {id(found.together): found.together for found in ahead.values()}.values():
                together.abandon()


@contextmanager
def reading_parts() -> Iterator[None]:
    """Inside, attributes of a ``DistributedModule`` are the parts: nothing is gathered."""
    before, _scope.reads_parts = _scope.reads_parts, True
    try:
        yield
    finally:
        _scope.reads_parts = before


def is_gathered(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is what :func:`gather_once` returned in the call under way."""
    storage = tensor.untyped_storage()._cdata
    return any(found.full.untyped_storage()._cdata == storage for found in _scope.gathered.values())


@torch._disable_dynamo  # For a model that is compiled as a whole; the public torch.compiler.disable imports the compiler at once.
def gather_once(parameter: DistributedParameter) -> torch.Tensor:
    """Return ``parameter.gather()``, made once per outermost call however often it is asked for. Collective.

    It is made again when the parameter has changed, or for autograd after it was made without.
    """
    if _scope.reads_parts:
        return parameter
    if _scope.depth == 0:
        return parameter.gather()
    _scope.read[id(parameter)] = parameter
    key = _key_of(parameter, _mode())
    found = _scope.gathered.get(key)
    if found is None and id(parameter) in _scope.ahead:
        _take(_scope.ahead[id(parameter)])
        found = _scope.gathered.get(key)
    if found is None or found.version != parameter._version:
        found = _Gathered(parameter, parameter._version, parameter.gather())
        _scope.gathered[key] = found
    return found.full


@torch._disable_dynamo
def _begin_call(module: nn.Module, mode: tuple[bool, bool]) -> None:
    _gather_ahead(module, mode)
    for observer in current().call_observers:
        observer(module)


def _gather_ahead(module: nn.Module, mode: tuple[bool, bool]) -> None:
    known = _expected.get(module, {}).get(mode)
    parameters = module.parameters() if known is None else [reference() for reference in known]
    kinds: dict[object, list[DistributedParameter]] = {}
    for parameter in parameters:
        # One without values raises when it is read, by its own gather().
        if isinstance(parameter, DistributedParameter) and _is_apart(parameter) and has_values(parameter):
            kinds.setdefault((parameter.group.ranks, parameter.dtype, parameter.device), []).append(parameter)
    for members in kinds.values():
        together = Together(members, _scope.read)
        together.start()
        _scope.ahead.update({id(member): _Ahead(together, mode) for member in members})


def _take(ahead: _Ahead) -> None:
    """Make what was gathered ahead the gathered parameters, unless the call is in another mode by now."""
    if ahead.mode != _mode():
        return
    members = ahead.together.parameters
    for member, version, full in zip(members, ahead.together.versions, ahead.together.take(), strict=True):
        del _scope.ahead[id(member)]
        _scope.gathered[_key_of(member, ahead.mode)] = _Gathered(member, version, full)


def _mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _key_of(parameter: DistributedParameter, mode: tuple[bool, bool]) -> Key:
    return id(parameter), mode[0] and parameter.requires_grad, mode[1]


def _is_apart(parameter: DistributedParameter) -> bool:
    """Whether the parameter has to be gathered, and no Block does it."""
    return parameter.group.size > 1 and not parameter._shard.replicated and not parameter._in_block
