"""``module_call``: the outermost call of a bmt module, with parameters gathered once and random
numbers of the rank's own.

[Note: random streams] The user's program, and everything that makes parameters, draws from torch's
default generators, which ``init_distributed`` seeded alike on all ranks. Dropout must differ
between ranks that compute different rows, or different tokens of one sequence. So the outermost bmt
module that is called draws one number from the shared CPU generator, mixes it with the rank's index
among those whose losses are parts of one sum, and runs under generators seeded with the result;
when it returns, the states of the shared generators are restored. Tensor-parallel ranks have one
such index, so they agree.

Which stream is active is written in the seed itself (its top bits), not in a variable of this
process: activation checkpointing saves the generators' states in forward and restores them for the
recomputation, possibly on another thread, and a module called there must see what it saw the first
time. A run in which no two ranks compute different tokens draws exactly as plain torch does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from bmt_core.errors import CallError, ConfigError
from bmt_core.run.runtime import Runtime, current, is_initialized
from bmt_core.torch_internals import (
    are_transforms_active,
    counting_versions,
    never_compiled,
    storage_key,
    version_of,
    without_torch_functions,
)
from bmt_params.guards.first_values import FirstValues
from bmt_params.models_of_run import CallEnd, ModelsOfRun
from bmt_params.modules.gathered_copy import as_gathered_copy, refuse_written
from bmt_params.parameter import DistributedParameter

_MARK = 0x2B5A
_MARK_SHIFT = 48
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads neighbouring indices
# All of bmt's own attributes are annotated there; others are the program's.
_OF_BMT = frozenset(DistributedParameter.__annotations__)


class _Gathered(NamedTuple):
    # The parameter is kept, so that its id is not given to another one while the entry lives.
    parameter: DistributedParameter
    version: int
    full: torch.Tensor
    full_version: int


# One for each thread, because on GPUs torch recomputes in threads of its own.
class _OutermostCall(threading.local):
    # Not attributes of the class, which torch 2.11's compiler takes for constants.
    def __init__(self) -> None:
        self.depth = 0
        self.reads_parts = False
        self.is_refused = False
        self.gathered: dict[tuple[int, bool, bool], _Gathered] = {}


_call = _OutermostCall()


def module_call(
    module: nn.Module | None = None, *, own_random: bool = True
) -> AbstractContextManager[None]:
    """Return a context for a call of ``module``. Nested calls share gathered parameters; the
    outermost one frees them at its end.

    Unless ``own_random`` is False, code inside draws the rank's own random numbers.
    """
    if _call.is_refused:
        raise ConfigError(
            "A module was called inside whole_parameters(), where parameters may only be read and"
            " written. Call it afterwards."
        )
    if _call.depth > 0 or not is_initialized():
        return nullcontext()
    # The compiler would put the last check into its graph.
    if module is not None and not torch.compiler.is_compiling() and are_transforms_active():
        raise used_in_transform(module)
    return _outermost_call(module, own_random=own_random)


def used_in_transform(used: nn.Module | DistributedParameter) -> ConfigError:
    """Return the error for ``used``, which would be gathered inside of ``torch.func.grad`` or
    its like.

    Tensors made inside of a transform are gone at its end. A buffer for gathered parameters made
    there would crash the process.
    """
    return ConfigError(
        f"{type(used).__name__} was used inside of a transform of torch.func (grad, vjp, jacrev,"
        " jvp, vmap, ...), which cannot see how parameters are gathered and gradients reduced. Use"
        " torch.autograd.grad or torch.autograd.functional, or transform a model of plain torch."
        " Weights that a module's forward has read before, it can use in a transform."
    )


@contextmanager
def _outermost_call(module: nn.Module | None, *, own_random: bool) -> Iterator[None]:
    with rank_random(current()) if own_random else nullcontext():
        _call.depth += 1
        ends: list[CallEnd] = []
        read = None
        try:
            if module is not None:
                ends = _begin(module)
            yield
            # Not in the finally: a call that has failed says nothing about the next ones.
            read = _read_parameters() if _call.gathered else []
        finally:
            _call.depth -= 1
            _call.gathered.clear()
            if ends:
                _end(ends, read)


@contextmanager
def reading_parts() -> Iterator[None]:
    """Inside, attributes of a ``DistributedModule`` are the parts: nothing is gathered."""
    before, _call.reads_parts = _call.reads_parts, True
    try:
        yield
    finally:
        _call.reads_parts = before


@contextmanager
def refusing_calls() -> Iterator[None]:
    """Inside, calling a module of bmt raises :class:`ConfigError`."""
    before, _call.is_refused = _call.is_refused, True
    try:
        yield
    finally:
        _call.is_refused = before


def is_call_under_way() -> bool:
    """Whether the forward of a module of bmt runs, in which parameters are whole."""
    return _call.depth > 0


def is_gathered(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is what :func:`gather_once` returned in the call under way."""
    storage = storage_key(tensor)
    return any(storage_key(found.full) == storage for found in _call.gathered.values())


@never_compiled  # for a model that is compiled as a whole
def gather_once(parameter: DistributedParameter) -> torch.Tensor:
    """Return the whole ``parameter``, gathered once per outermost call however often it is read.
    Collective.

    The owner gathers it together with others; without an owner it is gathered alone. It is gathered
    again if it has changed, or if it is read with autograd after it was gathered without.
    """
    if _call.reads_parts:
        return parameter
    # Outside of a forward each read gets a copy of its own, to which a constructor may write.
    if _call.depth == 0:
        with counting_versions():
            copy = as_gathered_copy(parameter.gather(), parameter)
        vars(copy).update(user_attributes(parameter))
        return copy
    with without_torch_functions():
        has_grad = torch.is_grad_enabled() and parameter.requires_grad
        # What was gathered without autograd, or in inference mode, has no graph for a later reader.
        key = id(parameter), has_grad, torch.is_inference_mode_enabled()
        found = _call.gathered.get(key)
        # The program may write to a parameter, or step, inside of a call.
        if found is None or found.version != parameter._version:
            # What was gathered before the transform may be read in it.
            if are_transforms_active():
                raise used_in_transform(parameter)
            owner = parameter._owner
            full = None if owner is None else owner.read(parameter)
            full = parameter.gather(parameter._compute_dtype) if full is None else full
            found = _gathered_now(parameter, full)
            _call.gathered[key] = found
        return found.full


def _gathered_now(parameter: DistributedParameter, full: torch.Tensor) -> _Gathered:
    """Return the entry for ``full``, gathered now. It gets the attributes that the program has set
    on ``parameter``.
    """
    vars(full).update(user_attributes(parameter))
    return _Gathered(parameter, parameter._version, full, version_of(full))


def gather_as_leaves(
    parameters: Iterable[DistributedParameter],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gather ``parameters`` so that the current call reads them as leaves, which several graphs may
    share. Collective.

    Returns (whole parameter, leaf) pairs. After the backward passes of these graphs the caller runs
    backward from the whole parameters with the gradients of the leaves, which reduces them.
    """
    assert _call.depth > 0, "a call must be under way"
    pairs = []
    for parameter in parameters:
        with torch.enable_grad():
            whole = gather_once(parameter)
        leaf = whole.detach().requires_grad_(whole.requires_grad)
        # Forward may read it inside of no_grad(), too.
        for has_grad in {parameter.requires_grad, False}:
            read = leaf if has_grad else leaf.detach()
            _call.gathered[id(parameter), has_grad, False] = _gathered_now(parameter, read)
        pairs.append((whole, leaf))
    return pairs


@never_compiled
def _read_parameters() -> list[DistributedParameter]:
    """Return the parameters that the call under way has read; raise if it wrote to one."""
    for found in _call.gathered.values():
        if version_of(found.full) != found.full_version:  # user code wrote to it
            refuse_written(found.full.shape)
    return [found.parameter for found in _call.gathered.values()]


@never_compiled
def _begin(module: nn.Module) -> list[CallEnd]:
    run = current()
    first_values = run.state(FirstValues)
    # Before the observers gather anything: parts of different values make no model.
    if first_values.noted:
        first_values.compare()
    ends: list[CallEnd] = []
    try:
        for begins in run.state(ModelsOfRun).at_calls:
            ends.append(begins(module))
    except BaseException:
        _end(ends, None)
        raise
    return ends


@never_compiled
def _end(ends: list[CallEnd], read: list[DistributedParameter] | None) -> None:
    for end in ends:
        # It may wait for a call that fails, too. An error that has ended the call comes first.
        with suppress(CallError) if read is None else nullcontext():
            end(read)


@contextmanager
def rank_random(runtime: Runtime) -> Iterator[None]:
    """Draw from this rank's own stream inside; see [Note: random streams]."""
    if runtime.topology.sum_size == 1 or torch.initial_seed() >> _MARK_SHIFT == _MARK:
        yield
        return
    # Before the states are saved, so that the next call draws another number.
    draw = int(torch.randint(2**62, (), device="cpu"))
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(runtime.device) if runtime.device.type == "cuda" else None
    seed = rank_seed(draw, runtime.topology.sum_rank)
    # Not by torch.manual_seed(), which seeds the generators of all devices.
    torch.default_generator.manual_seed(seed)
    if cuda_state is not None:
        torch.cuda.default_generators[runtime.device.index].manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, runtime.device)


def rank_seed(draw: int, sum_rank: int) -> int:
    """Return the marked seed of ``sum_rank`` for one draw from the shared generator.

    >>> rank_seed(5, 0) != rank_seed(5, 1) and rank_seed(5, 1) >> 48 == 0x2B5A
    True
    """
    mixed = (draw + (sum_rank + 1) * _MIX) * _MIX % 2**64
    return _MARK << _MARK_SHIFT | mixed >> (64 - _MARK_SHIFT)


def user_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of ``parameter`` that a program has set, such as the ``infshape`` of
    muP. Code that reads ``self.weight.scale`` in a forward must find them on the whole tensor.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.scale = 3.0
    >>> user_attributes(weight)
    {'scale': 3.0}
    """
    return {
        name: value
        for name, value in vars(parameter).items()
        if name not in _OF_BMT and not name.startswith("_bmt")
    }


class UserAttributes:
    """Copies the attributes that the program has set on ``parameters`` to the tensors that stand in
    their place.

    For each call this compares one number, unless some parameter has such attributes.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._attributes = [vars(parameter) for parameter in parameters]
        # The number of attributes at the last look, and by index all names that were ever copied:
        # some tensors stay from step to step, and an attribute may be deleted.
        self._count = -1
        self._copied: dict[int, set[str]] = {}

    def copy_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give each of ``tensors`` the attributes of its parameter."""
        count = sum(map(len, self._attributes))
        if count != self._count:
            self._count = count
            for index, parameter in enumerate(self._parameters):
                if present := user_attributes(parameter):
                    self._copied.setdefault(index, set()).update(present)
        for index in self._copied:
            names = self._copied[index]
            present, target = user_attributes(self._parameters[index]), vars(tensors[index])
            names |= present.keys()
            for name in names - present.keys():
                target.pop(name, None)
            target.update(present)
