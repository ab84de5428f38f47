"""What an optimizer's update of an element depends on: declared, or found out by stepping
small tensors.

[Note: trial steps] A new optimizer of the same class with the same options
(:mod:`bmt_params.guards.optimizer_twin`) steps tensors of its own several times, with gradients
whose size differs from step to step, from tensor to tensor, and from one end of a tensor to the
other: all tensors together, each alone, and in 1-D parts as several ranks would have them. Where
the results are the same, the update does not need what it was not given. First in float64, where
rounding and what is looked for differ by many orders of magnitude (in float32 if it cannot step
float64, because half types hide much); then in the parameters' own dtype with a tensor that is
large enough for states of 8 bits and for factors of matrices. States and numbers in groups are
compared as well: they show a norm or a factor many steps before the values do, and what differs
between parts could not be saved. Tensors are compared by the mean over all elements, because a few
may round otherwise: kernels compute the last elements of a tensor by other instructions than the
first."""

from __future__ import annotations

import inspect
import io
import math
import random
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from bmt_core.torch_internals import without_optimizer_hooks
from bmt_params.guards.optimizer_twin import CannotCopyError, twin_of

Needs = Literal["elements", "tensors", "all tensors", "unknown"]

DRAWS_NUMBERS = "two trials of the same differ, as if it drew random numbers"
"""The reason why the needs of an optimizer are unknown whose trials went well."""

_SMALL_SHAPES = ((12, 20), (15,), (7, 9))
# 8-bit states begin at 4096 elements, factors of matrices at 128 rows and columns.
_LARGE_SHAPES = ((160, 192),)
_CUTS = (0.0, 0.37, 0.37, 1.0)  # of a tensor's elements: three parts, of which the second is empty
_SCALES = (1.0, 0.1, 3.0, 1e-3, 10.0)
# More are not tried, because trials of a group take some milliseconds.
_MOST_GROUPS = 16
# Of the way that a tensor's elements went, on average.
_SAME = {torch.float64: 1e-6, torch.float32: 1e-4}
_SAME_IN_HALF = 1e-3


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """What an optimizer needs to see at once to update an element as it would in a whole model."""

    needs: Needs
    """``"elements"``: nothing else, so it is elementwise; ``"tensors"``: the whole tensor;
    ``"all tensors"``: all parameters.
    """
    needs_shape: bool = False
    """Whether whole tensors have to be in their shapes; in 1-D, as one rank or ZeRO level 0 has
    them, the result is another.
    """
    reason: str = ""
    """What was found, or why nothing could be, as the end of a sentence."""
    fails_on_empty: bool = False
    """Whether its step raises for a parameter without elements, of which a rank may
    have several.
    """
    needs_closure: bool = False
    """Whether its step raises without a closure."""


_ORDER: tuple[Needs, ...] = ("elements", "unknown", "tensors", "all tensors")


def kind_of(optimizer: Any, *, has_closure: bool = False) -> OptimizerKind:
    """Return the kind of ``optimizer``: that of the group that needs most."""
    kinds = kinds_of_groups(optimizer, has_closure=has_closure)
    nothing = OptimizerKind(needs="elements")
    return max(kinds, key=lambda kind: _ORDER.index(kind.needs), default=nothing)


def kinds_of_groups(optimizer: Any, *, has_closure: bool = False) -> list[OptimizerKind]:
    """Return the kind of each parameter group of ``optimizer``.

    A group's key ``bmt_elementwise``, or an attribute of the optimizer or its class of that name,
    says it. Otherwise it is found out, by [Note: trial steps], which takes some milliseconds, and
    is remembered until there are other groups. ``optimizer`` and the generators of random numbers
    are as before. ``has_closure`` says whether ``step`` is given one; an optimizer whose step
    cannot do without is tried with one anyway. The result is the same on all ranks that have
    optimizers of the same options.
    """
    known = _known.get(optimizer)
    if known is None or len(known) != len(optimizer.param_groups):
        _known[optimizer] = known = _declared_or_found(optimizer, has_closure)
    return known


_known: WeakKeyDictionary[Any, list[OptimizerKind]] = WeakKeyDictionary()


def has_required_closure(optimizer: Any) -> bool:
    """Whether the step of an optimizer, or of a class of them, cannot be called without one."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _key_of(
    optimizer: Any, group: Mapping[str, Any]
) -> tuple[bool | None, str, torch.dtype | None]:
    """Return what groups of one kind have in common: what they say, and their options. Those that
    are numbers may differ if none is 0.
    """
    left_out = {"params", "param_names", "lr", "initial_lr", "name", "bmt_elementwise"}
    options = {
        key: bool(value) if type(value) is float else value
        for key, value in group.items()
        if key not in left_out
    }
    says = group.get("bmt_elementwise", getattr(optimizer, "bmt_elementwise", None))
    return None if says is None else bool(says), repr(sorted(options.items())), _dtype_of(group)


def _dtype_of(group: Mapping[str, Any]) -> torch.dtype | None:
    return next((p.dtype for p in group["params"]), None)


def _declared_or_found(optimizer: Any, has_closure: bool) -> list[OptimizerKind]:
    keys = [_key_of(optimizer, group) for group in optimizer.param_groups]
    untold = len({key for key in keys if key[0] is None})
    found: dict[object, OptimizerKind] = {}
    for index, key in enumerate(keys):
        says = key[0]
        if key in found:
            continue
        if says is not None:
            found[key] = OptimizerKind(
                needs="elements" if says else "tensors",
                needs_shape=not says,
                reason="" if says else "it says bmt_elementwise = False",
                needs_closure=has_required_closure(optimizer),
            )
        elif untold > _MOST_GROUPS:
            reason = f"it has {untold} groups of different options"
            found[key] = OptimizerKind(needs="unknown", reason=reason)
        else:
            found[key] = _found(optimizer, index, has_closure)
    return [found[key] for key in keys]


def _found(optimizer: Any, index: int, has_closure: bool) -> OptimizerKind:
    """Return the kind of group number ``index``, from trials that go on as long as every element
    seems to be updated by itself.
    """
    groups = optimizer.param_groups
    of_all = (p.device for group in groups for p in group["params"] if not p.is_meta)
    device = next(of_all, torch.device("cpu"))
    own_dtype = _dtype_of(groups[index]) or torch.float32
    found: OptimizerKind | None = None
    with _undisturbed(device):
        for dtype, shapes, steps in (
            (torch.float64, _SMALL_SHAPES, 12),
            (torch.float32, _SMALL_SHAPES, 12),
            (own_dtype, _LARGE_SHAPES, 8),
        ):
            if found is not None and shapes is _SMALL_SHAPES:
                continue
            trial = _Trial(optimizer, index, device, dtype)
            try:
                found = trial.kind(shapes, steps, has_closure)
            except _CannotTellError as reason:
                # It may take its own dtype only, or lose a step in the rounding of its own dtype.
                if found is None and shapes is _LARGE_SHAPES:
                    found = OptimizerKind(needs="unknown", reason=str(reason))
            if found is not None and found.needs != "elements":
                break
    assert found is not None
    return found


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Leave random numbers, hooks on steps, warnings and compiled functions as they are."""
    state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        warnings.catch_warnings(),
        without_optimizer_hooks(),
        torch.enable_grad(),
        redirect_stdout(io.StringIO()),
        # Compiling for sizes that only a trial has takes seconds.
        torch.compiler.set_stance("force_eager"),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)


class _CannotTellError(Exception):
    """Trial steps do not say what an optimizer needs; the text says why."""


Tensors = list[torch.Tensor]
# Of each tensor: itself, by the name "", its state and the options of its group.
Result = list[dict[str, torch.Tensor]]


class _Trial:
    """Trial steps of optimizers like one of the groups of a given one: see [Note: trial steps]."""

    def __init__(
        self, optimizer: Any, index: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._optimizer, self._index, self._device = optimizer, index, device
        self._dtype = dtype
        self._has_closure = False

    def kind(
        self, shapes: Sequence[tuple[int, ...]], steps: int, is_given_closure: bool
    ) -> OptimizerKind:
        """Return what tensors of ``shapes`` show in so many steps."""
        starts, gradients, together, needs_closure = self._first(shapes, steps, is_given_closure)
        compare = _Comparison(starts, together, self._stepped(starts, gradients, seed=2))
        parts = [self._part(starts, gradients, begin, end) for begin, end in pairwise(_CUTS)]
        # The second part has no elements.
        fails_on_empty = parts.pop(1) is None
        if not compare.differs(parts):
            is_random = compare.is_random
            return OptimizerKind(
                needs="unknown" if is_random else "elements",
                reason=DRAWS_NUMBERS if is_random else "",
                fails_on_empty=fails_on_empty,
                needs_closure=needs_closure,
            )
        alone = [self._tried([s], [g]) for s, g in zip(starts, gradients, strict=True)]
        whole = None if None in alone else [of for result in alone for of in result or ()]
        flat = self._tried([s.flatten() for s in starts], [g.flatten(1) for g in gradients])
        is_flat_other = compare.differs([flat])
        needs: Needs = "all tensors" if compare.differs([whole]) else "tensors"
        what = "a matrix as a 1-D tensor" if is_flat_other else "a tensor in parts"
        reason = f"stepping {what} gives another result than stepping it whole"
        if needs == "all tensors":
            reason = "stepping two tensors together gives another result than stepping each alone"
        return OptimizerKind(
            needs=needs, needs_shape=is_flat_other, reason=reason, needs_closure=needs_closure
        )

    def _first(
        self, shapes: Sequence[tuple[int, ...]], steps: int, is_given_closure: bool
    ) -> tuple[Tensors, Tensors, Result, bool]:
        """Step all tensors together; matrices alone, and with a closure, if it cannot be
        done otherwise. One that is given a closure is stepped without it to see whether it must be.
        Return first values, gradients, the result, and whether it needs a closure.
        """
        failures: list[str] = []
        needs_closure = True
        matrices = [shape for shape in shapes if len(shape) == 2]
        for self._has_closure, chosen in product((False, True), (shapes, matrices)):
            starts, gradients = self._tensors(chosen, steps)
            try:
                result = self._stepped(starts, gradients)
            except CannotCopyError as error:
                failures.append(f"an optimizer like it cannot be made: {error}")
            except Exception as error:  # of a step of anyone's
                failures.append(f"its step raises {type(error).__name__}: {error}")
            else:
                needs_closure &= self._has_closure
                if self._has_closure or not is_given_closure:
                    return starts, gradients, result, needs_closure
        raise _CannotTellError(failures[0])

    def _tensors(self, shapes: Sequence[tuple[int, ...]], steps: int) -> tuple[Tensors, Tensors]:
        """Return first values, and gradients with the steps in front; the same on every rank
        and device.
        """
        generator = torch.Generator().manual_seed(0)
        lr = self._optimizer.param_groups[self._index].get("lr")
        # Values in the parameters' own dtype must not be so large that a step is lost in
        # their rounding.
        is_small = self._dtype != torch.float64 and lr is not None and 0 < float(lr) < 1e-2
        size = 10 * float(lr) if is_small else 0.5
        starts = [torch.randn(s, generator=generator, device="cpu").double() * size for s in shapes]
        gradients = [_gradients(s, steps, number, generator) for number, s in enumerate(shapes)]
        return self._made(starts), self._made(gradients)

    def _made(self, values: Tensors) -> Tensors:
        return [value.to(self._device, self._dtype) for value in values]

    def _part(self, starts: Tensors, gradients: Tensors, begin: float, end: float) -> Result | None:
        """Step the same part of each tensor, in 1-D, as one of several ranks has them."""

        def cut(values: torch.Tensor) -> torch.Tensor:
            size = values.shape[-1]
            return values[..., int(begin * size) : int(end * size)].contiguous()

        return self._tried(
            [cut(s.flatten()) for s in starts], [cut(g.flatten(1)) for g in gradients]
        )

    def _tried(self, starts: Tensors, gradients: Tensors) -> Result | None:
        """Return what :meth:`_stepped` does; None if it raises, as for shapes that an optimizer
        does not take.
        """
        try:
            return self._stepped(starts, gradients)
        except Exception:  # of a constructor or step of anyone's
            return None

    def _stepped(self, starts: Tensors, gradients: Tensors, seed: int = 1) -> Result:
        # Not torch.manual_seed, which takes a millisecond where CUDA is not in use.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        params = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = twin_of(self._optimizer, self._index, params)
        for slopes in zip(*gradients, strict=True):
            give = partial(_give_gradients, params, slopes)
            give()
            optimizer.step(*[give] * self._has_closure)
        (group,) = optimizer.param_groups
        return [
            {"": p.detach().double(), **_leaves([optimizer.state.get(p), group])} for p in params
        ]


def _leaves(value: Any, name: str = ".") -> dict[str, torch.Tensor]:
    """Return the numbers and tensors in ``value``, by the ways to them."""
    if isinstance(value, torch.Tensor):
        if type(value).dequantize is not torch.Tensor.dequantize:  # a subclass that quantises
            value = value.dequantize()
        return {name: value.detach().double()}
    if isinstance(value, (bool, int, float)):
        return {name: torch.tensor(value, dtype=torch.float64, device="cpu")}
    if isinstance(value, (list, tuple, deque)):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        is_object = type(value).__module__ != "builtins"
        value = getattr(value, "__dict__", {}) if is_object else {}
    return {
        way: leaf
        for key, item in value.items()
        if key != "params"
        for way, leaf in _leaves(item, f"{name}{key}.").items()
    }


def _give_gradients(
    params: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor], backward: bool = True
) -> torch.Tensor:
    """Give ``params`` gradients of which each depends on its own element alone, and return their
    loss, which is a sum over all elements.
    """
    losses = []
    for p, slope in zip(params, slopes, strict=True):
        value = p.detach()
        p.grad = slope + 0.1 * value
        losses.append(((slope + 0.05 * value) * value).sum())
    return torch.stack(losses).sum()


class _Comparison:
    """Compares results with that of stepping all tensors ``together``, of which ``again`` is a
    second trial.
    """

    def __init__(self, starts: Tensors, together: Result, again: Result) -> None:
        self._together = together
        self._same = _SAME.get(starts[0].dtype, _SAME_IN_HALF)
        self._moved = [
            _mean(result[""] - start.double())
            for result, start in zip(together, starts, strict=True)
        ]
        if not 0 < sum(self._moved) < math.inf:
            raise _CannotTellError("its step changes nothing, or gives infinity or NaN")
        self._drawn = [
            {name: _distance(leaf, [result.get(name)]) for name, leaf in whole.items()}
            for whole, result in zip(together, again, strict=True)
        ]

    @property
    def is_random(self) -> bool:
        """Whether the results of two trials of the same differ."""
        return any(any(drawn.values()) for drawn in self._drawn)

    def differs(self, pieces: Sequence[Result | None]) -> bool:
        """Whether ``pieces`` are not there, or others than the whole, by more than rounding and
        random numbers explain.
        """
        found = [piece for piece in pieces if piece is not None]
        return len(found) < len(pieces) or any(
            not _distance(leaf, [piece.get(name) for piece in of_tensor])
            <= self._same * (moved if not name else _mean(leaf)) + 2 * drawn[name]
            for whole, moved, drawn, *of_tensor in zip(
                self._together, self._moved, self._drawn, *found, strict=True
            )
            for name, leaf in whole.items()
        )


def _distance(whole: torch.Tensor, pieces: Sequence[torch.Tensor | None]) -> float:
    """Return how far ``pieces`` are from ``whole``, of which each is a part, or the same again."""
    there = [piece for piece in pieces if piece is not None]
    if len(there) < len(pieces):
        return math.inf
    if sum(piece.numel() for piece in there) == whole.numel():
        return _mean(torch.cat([piece.flatten() for piece in there]) - whole.flatten())
    if any(piece.shape != whole.shape for piece in there):
        return math.inf
    return max(_mean(piece - whole) for piece in there)


def _mean(values: torch.Tensor) -> float:
    return float(values.abs().nan_to_num().mean()) if values.numel() else 0.0


def _gradients(
    shape: tuple[int, ...], steps: int, index: int, generator: torch.Generator
) -> torch.Tensor:
    """Return gradients for all steps of tensor number ``index``. Their sizes differ between steps,
    tensors, and a tensor's ends.

    Half of the tensors' gradients mostly keep their signs, because some optimizers only begin to
    move when gradients agree.
    """
    ways = torch.randn(shape, generator=generator, device="cpu").double()
    noise = torch.randn(steps, *shape, generator=generator, device="cpu").double()
    scales = [_SCALES[(step + index) % len(_SCALES)] * (index + 1) for step in range(steps)]
    sizes = torch.tensor(scales, dtype=torch.float64, device="cpu").view(-1, *[1] * len(shape))
    along = torch.linspace(0.2, 3, ways.numel(), dtype=torch.float64, device="cpu").view(shape)
    return (ways + 0.3 + (1.5 - 1.2 * (index % 2)) * noise) * along * sizes
