"""What an optimizer's update of an element depends on, found out by stepping small tensors.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from bmt_core.torch_internals import without_optimizer_hooks
from bmt_params.guards.optimizer_twin import CannotCopyError, twin_of

Needs = Literal["elements", "tensors", "all tensors", "unknown"]

_SMALL_SHAPES = ((12, 20), (15,), (7, 9))
# 8-bit states begin at 4096 elements, factors of matrices at 128 rows and columns.
_LARGE_SHAPES = ((160, 192),)
_CUTS = (0.0, 0.37, 0.37, 1.0)  # of a tensor's elements: three parts, of which the second is empty
_SCALES = (1.0, 0.1, 3.0, 1e-3, 10.0)
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


ELEMENTWISE = OptimizerKind(needs="elements")
_ORDER: tuple[Needs, ...] = ("elements", "unknown", "tensors", "all tensors")


def kind_of(optimizer: Any, *, has_closure: bool = False) -> OptimizerKind:
    """Return the kind of ``optimizer``: that of the group that needs most. See
    :func:`kinds_of_groups`.
    """
    kinds = kinds_of_groups(optimizer, has_closure=has_closure)
    most = max(kinds, key=lambda kind: _ORDER.index(kind.needs), default=ELEMENTWISE)
    return most


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
        of_class, key = _of_class.setdefault(type(optimizer), {}), _key_of(optimizer, has_closure)
        known = of_class.get(key)
        if known is None:
            known = _declared_or_found(optimizer, has_closure)
        if key is not None:
            of_class[key] = known
        _known[optimizer] = known
    return known


_known: WeakKeyDictionary[Any, list[OptimizerKind]] = WeakKeyDictionary()
# By class and what optimizers of it have in common: they need not be tried again.
_of_class: WeakKeyDictionary[type, dict[object, list[OptimizerKind]]] = WeakKeyDictionary()
_OF_TORCH = ("_optimizer_", "_hook_", "_zero_grad_", "_patch_", "_step_count", "_opt_called")


def _key_of(optimizer: Any, has_closure: bool) -> object | None:
    """What optimizers of one class must have in common to be of one kind; None if they keep objects
    of their own, which may make a difference.
    """
    of_torch = ("defaults", "state", "param_groups")
    own = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in of_torch and not name.startswith(_OF_TORCH)
    }
    if not all(value is None or isinstance(value, (int, float, str)) for value in own.values()):
        return None
    groups = [(_options_key(g), g.get("bmt_elementwise")) for g in optimizer.param_groups]
    devices = {p.device.type for g in optimizer.param_groups for p in g["params"]}
    return repr((groups, sorted(devices), sorted(own.items()), has_closure))


def _declared_or_found(optimizer: Any, has_closure: bool) -> list[OptimizerKind]:
    groups = optimizer.param_groups
    declared = [
        group.get("bmt_elementwise", getattr(optimizer, "bmt_elementwise", None))
        for group in groups
    ]
    kinds: dict[int, OptimizerKind] = {}
    for i, says in enumerate(declared):
        if says is not None:
            reason = "it says bmt_elementwise = False"
            needs_closure = has_required_closure(optimizer)
            kinds[i] = (
                OptimizerKind(needs="elements", needs_closure=needs_closure)
                if says
                else OptimizerKind(
                    needs="tensors", needs_shape=True, reason=reason, needs_closure=needs_closure
                )
            )
    alike: dict[object, list[int]] = {}
    for i in range(len(groups)):
        if i not in kinds:
            alike.setdefault(_options_key(groups[i]), []).append(i)
    found = _found(optimizer, [same[0] for same in alike.values()], has_closure)
    for same in alike.values():
        kinds.update(dict.fromkeys(same, found[same[0]]))
    return [kinds[i] for i in range(len(groups))]


def has_required_closure(optimizer: Any) -> bool:
    """Whether the step of an optimizer, or of a class of them, cannot be called without one."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _options_key(group: Mapping[str, Any]) -> object:
    """What two groups have in common that are tried as one: options that are numbers may differ if
    none is 0.
    """
    left_out = {"params", "param_names", "lr", "initial_lr", "name", "bmt_elementwise"}
    options = {
        key: bool(value) if type(value) is float else value
        for key, value in group.items()
        if key not in left_out
    }
    return repr(sorted(options.items(), key=lambda item: item[0])), _dtype_of(group)


def _dtype_of(group: Mapping[str, Any]) -> torch.dtype | None:
    return next((p.dtype for p in group["params"]), None)


def _found(optimizer: Any, groups: Sequence[int], has_closure: bool) -> dict[int, OptimizerKind]:
    if not groups:
        return {}
    if len(groups) > _MOST_GROUPS:
        reason = f"it has {len(groups)} groups of different options"
        return dict.fromkeys(groups, OptimizerKind(needs="unknown", reason=reason))
    device = next(
        (p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu")
    )
    with _undisturbed(device):
        try:
            return _Trials(optimizer, groups, device, has_closure).kinds()
        except _CannotTellError as reason:
            return dict.fromkeys(groups, OptimizerKind(needs="unknown", reason=str(reason)))


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


Values = dict[int, list[torch.Tensor]]  # of the groups' tensors
# The same, with states and options by name; "" is the tensor itself.
Results = dict[int, list[dict[str, torch.Tensor]]]


class _Trials:
    """Trial steps of optimizers like a given one: see [Note: trial steps]."""

    def __init__(
        self, optimizer: Any, groups: Sequence[int], device: torch.device, has_closure: bool
    ) -> None:
        self._optimizer, self._groups, self._device = optimizer, groups, device
        self._has_closure = has_closure
        self._needs_closure = False
        self._fails_on_empty = False

    def kinds(self) -> dict[int, OptimizerKind]:
        """Return the kind of each group, from trials that go on as long as every element seems to
        be updated by itself.
        """
        own = {i: _dtype_of(self._optimizer.param_groups[i]) or torch.float32 for i in self._groups}
        exact, single = (dict.fromkeys(self._groups, d) for d in (torch.float64, torch.float32))
        found: dict[int, OptimizerKind] = {}
        for dtypes, shapes, steps in (
            (exact, _SMALL_SHAPES, 12),
            (single, _SMALL_SHAPES, 12),
            (own, _LARGE_SHAPES, 8),
        ):
            if dtypes is single and found:
                continue
            try:
                kinds = self._kinds_in(dtypes, shapes, steps)
            except _CannotTellError:
                if dtypes is own and not found:
                    raise
                # It may take its own dtype only, or lose a step in the rounding of its own dtype.
                continue
            found = {
                i: kinds[i] if i not in found or found[i].needs == "elements" else found[i]
                for i in kinds
            }
            if all(kind.needs != "elements" for kind in found.values()):
                break
        return found

    def _kinds_in(
        self, dtypes: Mapping[int, torch.dtype], shapes: Sequence[tuple[int, ...]], steps: int
    ) -> dict[int, OptimizerKind]:
        starts, gradients, together = self._first_trial(dtypes, shapes, steps)
        compare = _Comparison(starts, together, self._steps(starts, gradients, seed=2))
        parts = self._parts(starts, gradients)
        alone: Results | None = None
        flat: Results | None = None
        if any(compare.differs(i, parts) for i in self._groups):
            alone = self._alone(starts, gradients)
            flat = self._tried(_map(starts, torch.flatten), _map(gradients, lambda g: g.flatten(1)))
        return {
            i: self._kind_of_tensors(compare.differs(i, [alone]), compare.differs(i, [flat]))
            if compare.differs(i, parts)
            else self._kind_of_elements(i in compare.drawn)
            for i in self._groups
        }

    def _kind_of_elements(self, is_random: bool) -> OptimizerKind:
        reason = "two trials of the same differ, as if it drew random numbers" if is_random else ""
        needs: Needs = "unknown" if is_random else "elements"
        return OptimizerKind(
            needs=needs,
            reason=reason,
            fails_on_empty=self._fails_on_empty,
            needs_closure=self._needs_closure,
        )

    def _kind_of_tensors(self, alone: bool, flat: bool) -> OptimizerKind:
        """Return the kind of which results differ in parts, and those of tensors ``alone`` or
        ``flat`` too, or not.
        """
        if alone:
            needs: Needs = "all tensors"
            reason = "stepping two tensors together gives another result than stepping each alone"
        else:
            needs, what = "tensors", "a matrix as a 1-D tensor" if flat else "a tensor in parts"
            reason = f"stepping {what} gives another result than stepping it whole"
        return OptimizerKind(
            needs=needs, needs_shape=flat, reason=reason, needs_closure=self._needs_closure
        )

    def _first_trial(
        self, dtypes: Mapping[int, torch.dtype], shapes: Sequence[tuple[int, ...]], steps: int
    ) -> tuple[Values, Values, Results]:
        """Step all tensors together; matrices alone, and with a closure, if it cannot be
        done otherwise. One that is given a closure is stepped without it to see whether it must be.
        """
        failures: list[str] = []
        matrices = [shape for shape in shapes if len(shape) == 2]
        is_given, self._needs_closure = self._has_closure, True
        for self._has_closure, chosen in product((False, True), (shapes, matrices)):
            starts, gradients = self._tensors(dtypes, chosen, steps)
            try:
                result = self._steps(starts, gradients)
            except CannotCopyError as error:
                failures.append(f"an optimizer like it cannot be made: {error}")
            except Exception as error:  # of a step of anyone's
                failures.append(f"its step raises {type(error).__name__}: {error}")
            else:
                self._needs_closure &= self._has_closure
                if self._has_closure or not is_given:
                    return starts, gradients, result
        self._has_closure = is_given
        raise _CannotTellError(failures[0])

    def _tensors(
        self, dtypes: Mapping[int, torch.dtype], shapes: Sequence[tuple[int, ...]], steps: int
    ) -> tuple[Values, Values]:
        """Return first values, and gradients with the steps in front; the same on every rank
        and device.
        """
        generator = torch.Generator().manual_seed(0)
        starts, gradients = {}, {}
        for i in self._groups:
            lr = self._optimizer.param_groups[i].get("lr")
            # Values in the parameters' own dtype must not be so large that a step is lost in
            # their rounding.
            size = (
                0.5
                if dtypes[i] == torch.float64 or lr is None or not 0 < float(lr) < 1e-2
                else 10 * float(lr)
            )
            starts[i] = [
                self._made(
                    torch.randn(s, generator=generator, device="cpu").double() * size, dtypes[i]
                )
                for s in shapes
            ]
            gradients[i] = [
                self._made(_gradients(s, steps, k, generator), dtypes[i])
                for k, s in enumerate(shapes)
            ]
        return starts, gradients

    def _made(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.to(self._device, dtype)

    def _alone(self, starts: Values, gradients: Values) -> Results | None:
        results: Results = {}
        for i in self._groups:
            results[i] = []
            for start, gradient in zip(starts[i], gradients[i], strict=True):
                found = self._tried({i: [start]}, {i: [gradient]})
                if found is None:
                    return None
                results[i] += found[i]
        return results

    def _parts(self, starts: Values, gradients: Values) -> list[Results | None]:
        """Step the first parts of all tensors, then the second, which are empty, then the third."""
        parts = []
        for begin, end in pairwise(_CUTS):
            found = self._tried(*self._part(starts, gradients, begin, end))
            if begin == end:
                self._fails_on_empty |= found is None
            else:
                parts.append(found)
        return parts

    def _part(
        self, starts: Values, gradients: Values, begin: float, end: float
    ) -> tuple[Values, Values]:
        def cut(values: torch.Tensor) -> torch.Tensor:
            size = values.shape[-1]
            return values[..., int(begin * size) : int(end * size)].contiguous()

        return _map(starts, lambda t: cut(t.flatten())), _map(
            gradients, lambda t: cut(t.flatten(1))
        )

    def _tried(self, starts: Values, gradients: Values) -> Results | None:
        """Return what :meth:`_steps` does; None if it raises, as for shapes that an optimizer does
        not take.
        """
        try:
            return self._steps(starts, gradients)
        except Exception:  # of a constructor or step of anyone's
            return None

    def _steps(self, starts: Values, gradients: Values, seed: int = 1) -> Results:
        _seed(seed, self._device)
        params = {
            i: [torch.nn.Parameter(t.clone()) for t in tensors] for i, tensors in starts.items()
        }
        optimizer = twin_of(self._optimizer, params)
        for k in range(len(next(iter(gradients.values()))[0])):
            give = _GiveGradients(params, gradients, k)
            give()
            if self._has_closure:
                optimizer.step(give)
            else:
                optimizer.step()
        return {
            i: [
                {"": p.detach().double(), **_leaves([optimizer.state.get(p), group])}
                for p in tensors
            ]
            for (i, tensors), group in zip(params.items(), optimizer.param_groups, strict=True)
        }


def _seed(seed: int, device: torch.device) -> None:
    # Not torch.manual_seed, which takes a millisecond where CUDA is not in use.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)


def _leaves(value: Any, name: str = ".") -> dict[str, torch.Tensor]:
    """Return the numbers and tensors in ``value``, by the ways to them."""
    if isinstance(value, torch.Tensor):
        if type(value).dequantize is not torch.Tensor.dequantize:  # a subclass that quantises
            value = value.dequantize()
        return {name: value.detach().double()}
    if isinstance(value, (bool, int, float)):
        return {name: torch.tensor(value, dtype=torch.float64, device="cpu")}
    if isinstance(value, Mapping):
        items = [(key, item) for key, item in value.items() if key != "params"]
    elif isinstance(value, (list, tuple, deque)):
        items = list(enumerate(value))
    else:
        items = (
            list(vars(value).items())
            if type(value).__module__ != "builtins" and hasattr(value, "__dict__")
            else []
        )
    return {
        way: leaf for key, item in items for way, leaf in _leaves(item, f"{name}{key}.").items()
    }


@dataclass(frozen=True)
class _GiveGradients:
    """A closure that computes gradients of step ``k``, each of which depends on its own element
    alone, and their loss, which is a sum over all elements.
    """

    params: Mapping[int, Sequence[torch.Tensor]]
    gradients: Values
    k: int

    def __call__(self, backward: bool = True) -> torch.Tensor:
        loss = torch.tensor(0.0, device="cpu")
        for i, tensors in self.params.items():
            for p, gradient in zip(tensors, self.gradients[i], strict=True):
                value, slope = p.detach(), gradient[self.k]
                p.grad = slope + 0.1 * value
                loss = loss + ((slope + 0.05 * value) * value).sum().to(loss.device)
        return loss


class _Comparison:
    """Compares results with those of stepping all tensors ``together``, of which ``again`` is a
    second trial.
    """

    def __init__(self, starts: Values, together: Results, again: Results) -> None:
        self._together = together
        self._moved = {
            i: [
                _mean(r[""] - start.double())
                for r, start in zip(together[i], starts[i], strict=True)
            ]
            for i in together
        }
        if not all(0 < sum(distances) < math.inf for distances in self._moved.values()):
            raise _CannotTellError("its step changes nothing, or gives infinity or NaN")
        self._same = {
            i: _SAME.get(tensors[0].dtype, _SAME_IN_HALF) for i, tensors in starts.items()
        }
        self._drawn = {
            i: [
                {name: _distance(leaf, [r.get(name)]) for name, leaf in whole.items()}
                for whole, r in zip(together[i], again[i], strict=True)
            ]
            for i in together
        }

    @property
    def drawn(self) -> set[int]:
        """The groups whose results differ between two trials of the same."""
        return {
            i for i, tensors in self._drawn.items() if any(any(drawn.values()) for drawn in tensors)
        }

    def differs(self, i: int, pieces: Sequence[Results | None]) -> bool:
        """Whether group ``i`` in ``pieces`` is not there or another, by more than rounding and
        random numbers explain.
        """
        found = [piece[i] for piece in pieces if piece is not None]
        if len(found) < len(pieces):
            return True
        return any(
            not _distance(leaf, [piece.get(name) for piece in of_tensor])
            <= self._same[i] * (moved if not name else _mean(leaf)) + 2 * drawn[name]
            for whole, moved, drawn, *of_tensor in zip(
                self._together[i], self._moved[i], self._drawn[i], *found, strict=True
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
    sizes = torch.tensor(
        [_SCALES[(k + index) % len(_SCALES)] for k in range(steps)], device="cpu"
    ).double()
    along = torch.linspace(0.2, 3, ways.numel(), device="cpu").double().view(shape)
    return (
        (ways + 0.3 + (1.5 - 1.2 * (index % 2)) * noise)
        * along
        * sizes.view(-1, *[1] * len(shape))
        * (index + 1)
    )


def _map(values: Values, change: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    return {i: [change(t) for t in tensors] for i, tensors in values.items()}
