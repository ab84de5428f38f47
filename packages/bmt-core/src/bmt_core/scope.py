"""What lasts as long as the outermost bmt module's call: gathered parameters, and the rank's random stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from bmt_core.parameter import DistributedParameter
from bmt_core.rng import rank_random
from bmt_core.runtime import current, is_initialized


class _Gathered(NamedTuple):
    # The parameter is kept, so that its id is not given to another one while the entry lives.
    parameter: DistributedParameter
    version: int
    full: torch.Tensor


class _Scope(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.gathered: dict[tuple[int, bool, bool], _Gathered] = {}
        self.reads_parts = False


_scope = _Scope()


@contextmanager
def forward_scope(*, own_random: bool = True) -> Iterator[None]:
    """Enter one module's call. Leaving the outermost one forgets what was gathered; nested ones share it.

    ``own_random`` False: the generators stay as they are, for a caller that has set them.
    """
    if _scope.depth > 0 or not is_initialized():
        yield
        return
    with rank_random(current()) if own_random else nullcontext():
        _scope.depth += 1
        try:
            yield
        finally:
            _scope.depth -= 1
            _scope.gathered.clear()


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


def gather_once(parameter: DistributedParameter) -> torch.Tensor:
    """Return ``parameter.gather()``, made once per outermost call however often it is asked for. Collective.

    It is made again when the parameter has changed, or for autograd after it was made without.
    """
    if _scope.reads_parts:
        return parameter
    if _scope.depth == 0:
        return parameter.gather()
    with_grad = torch.is_grad_enabled() and parameter.requires_grad
    key = (id(parameter), with_grad, torch.is_inference_mode_enabled())
    found = _scope.gathered.get(key)
    if found is None or found.version != parameter._version:
        found = _Gathered(parameter, parameter._version, parameter.gather())
        _scope.gathered[key] = found
    return found.full
