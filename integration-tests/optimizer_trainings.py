"""A small training by any optimizer, on several ranks and in plain torch, and what came of it."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_optim import OptimManager, whole
from bmt_params.guards.optimizer_kind import kind_of
from bmt_params.parameter import DistributedParameter
from bmt_tp import ColumnParallelLinear, RowParallelLinear
from bmt_zero import Block

STEPS = 12
TOLERANCE = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.bfloat16: 3e-2,
}  # of the way of the parameter that went farthest

Values = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one optimizer came to."""

    needs: str = ""
    result: str
    """``right``; ``rounding`` if layers are split and it is as near as 20 times the way that plain
    torch comes from itself with the batch in two halves; ``random`` if it is as near as 3 times
    that with another seed; ``refused``, ``warned``, ``wrong``, ``raises``; or ``fails``, in
    plain torch.
    """
    detail: str = ""
    milliseconds: float = 0
    """Of the processor, for finding out what the optimizer needs."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The parameters after the training in plain torch; and how far from them it comes with each
    batch in two halves, and with another seed, as a part of the way of the parameter that went
    farthest.
    """

    values: Values
    rounding: float
    randomness: float

    def error_of(self, values: Values) -> float:
        """Return how far ``values`` are from the expected ones, as a part of that way."""
        dtype = next(iter(values.values())).dtype
        starts = _values(_model(dtype, _Dense, lambda m: m))
        return _distance(self.values, values) / _distance(self.values, starts)

    @property
    def last_place(self) -> float:
        """One unit in the last place of the largest value, as a part of that way."""
        dtype = next(iter(self.values.values())).dtype
        starts = _values(_model(dtype, _Dense, lambda m: m))
        largest = max(float(value.abs().max()) for value in self.values.values())
        return torch.finfo(dtype).eps * largest / _distance(self.values, starts)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training on ranks: parameters of ``dtype`` at ZeRO ``level``; ``way`` is ``manager`` for an
    optimizer that is given to an ``OptimManager`` as it is, ``whole`` or ``together`` for one made
    by ``bmt.optim.whole``.
    """

    dtype: torch.dtype = torch.float32
    level: int = 3
    way: str = "manager"


class Recipe:
    """How to make an optimizer of class ``kind`` (module:class).

    ``options`` are those of its constructor, in which a class stands as (module, name), and some
    that say what else it takes: ``inner``, another optimizer in place of parameters; ``model``;
    ``matrices``, the option that says which groups have the matrices; ``matrices only``.
    """

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        module, _, name = kind.partition(":")
        self._kind: Any = getattr(importlib.import_module(module), name)
        self._options = {key: _resolved(value) for key, value in options.items()}

    def plain(self, params: list[Any], model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer that the class's constructor makes."""
        rest = self._rest
        made: torch.optim.Optimizer
        if "model" in self._options:
            made = self._kind(model, **rest)
        elif "inner" in self._options:
            made = self._kind(torch.optim.AdamW(params, lr=0.01), **rest)
        else:
            made = self._kind(self._groups(params), **rest)
        return made

    def whole(self, params: list[Any], *, together: bool) -> torch.optim.Optimizer:
        """Return one of the class that steps whole tensors."""
        if "model" in self._options:
            raise TypeError("its constructor takes a model, and no parameters")
        kind = self._kind
        if "inner" in self._options:

            class WithInner(kind):  # type: ignore[misc]
                def __init__(self, params: Any, **options: Any) -> None:
                    super().__init__(torch.optim.AdamW(params, lr=0.01), **options)

            kind = WithInner
        return whole(kind, self._groups(params), together=together, **self._rest)

    @property
    def _rest(self) -> dict[str, Any]:
        own = ("model", "inner", "matrices", "matrices only")
        return {key: value for key, value in self._options.items() if key not in own}

    def _groups(self, params: list[Any]) -> list[Any]:
        matrices = [p for p in params if len(getattr(p, "whole_shape", p.shape)) == 2]
        if "matrices only" in self._options:
            return matrices
        if "matrices" not in self._options:
            return params
        others = [p for p in params if not any(p is matrix for matrix in matrices)]
        option = self._options["matrices"]
        return [{"params": matrices, option: True}, {"params": others, option: False}]


class _Split(nn.Module):
    """Two layers that are split along tp; with ``rows`` of the activations on each rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(24, 160, dtype=dtype)
        self.down = RowParallelLinear(160, 40, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return out


class _Dense(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(24, 160, dtype=dtype)
        self.down = nn.Linear(160, 40, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return out


def _model(
    dtype: torch.dtype,
    first: Callable[[torch.dtype], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
) -> nn.Module:
    head = nn.Sequential(nn.LayerNorm(40, dtype=dtype), nn.Linear(40, 8, dtype=dtype))
    return nn.Sequential(wrap(first(dtype)), wrap(head))


def _values(model: nn.Module) -> Values:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(p.shape, generator=generator)
        .mul(0.2)
        .add(1.0 if name == "1.0.weight" else 0.05)
        .to(p.dtype)
        for name, p in model.named_parameters()
    }


def _data(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(32, 24, generator=generator), torch.randn(32, 8, generator=generator)
    return (x * (1 + step % 3)).to(dtype), y.to(dtype)


def _loss(model: nn.Module, step: int, dtype: torch.dtype, part: int, parts: int) -> torch.Tensor:
    x, y = (t.chunk(parts)[part] for t in _data(step, dtype))
    return (model(x) - y).float().square().mean() / parts


def expected_of(recipe: Recipe, dtype: torch.dtype, *, masters: bool = False) -> Expected:
    """Train in one process; with ``masters``, the optimizer steps float32 copies, and the
    parameters are these, rounded.
    """
    with torch.compiler.set_stance("force_eager"):  # to compile would take most of the time
        values = _trained_plainly(recipe, dtype, masters)
        found = Expected(values=values, rounding=0.0, randomness=0.0)
        return replace(
            found,
            rounding=found.error_of(_trained_plainly(recipe, dtype, masters, parts=2)),
            randomness=found.error_of(_trained_plainly(recipe, dtype, masters, seed=1)),
        )


def _trained_plainly(
    recipe: Recipe, dtype: torch.dtype, masters: bool, *, parts: int = 1, seed: int = 0
) -> Values:
    model = _model(dtype, _Dense, lambda m: m)
    model.load_state_dict(_values(model))
    torch.manual_seed(seed)
    params = [*model.parameters()]
    copies = [nn.Parameter(p.detach().float()) for p in params] if masters else params
    optimizer = recipe.plain(copies, model)

    def loss_of(step: int) -> torch.Tensor:
        losses = [_loss(model, step, dtype, part, parts) for part in range(parts)]
        return torch.stack(losses).sum()

    def step() -> None:
        for copy, p in zip(copies, params, strict=True):
            if masters:
                copy.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copy, p in zip(copies, params, strict=True):
                if masters:
                    p.copy_(copy)
                    p.grad = None

    _train(optimizer, loss_of, step)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    if not all(bool(value.isfinite().all()) for value in values.values()):
        raise FloatingPointError("the parameters become infinite or NaN")
    return values


def trained_in_blocks(recipe: Recipe, case: Case, found: dict[str, Any]) -> Values:
    """Return whole parameters after the training on these ranks, all of which see the same data;
    note what the optimizer needs in ``found``.
    """
    topology, dtype = current().topology, case.dtype
    split = topology.axis_size("tp") > 1 if "tp" in topology.sizes else False
    part, parts = (topology.axis_rank("tp"), topology.axis_size("tp")) if split else (0, 1)
    model = _model(dtype, _Split if split else _Dense, lambda m: Block(m, zero_level=case.level))
    model.load_state_dict(_values(_model(dtype, _Dense, lambda m: m)))
    torch.manual_seed(0)
    if case.way == "manager":
        try:
            optimizer = recipe.plain([*model.parameters()], model)
        except Exception as error:
            raise ConfigError(f"its constructor, {type(error).__name__}: {error}") from error
        begin = time.process_time()
        kind = kind_of(optimizer)
        found["needs"] = f"{kind.needs}, closure" if kind.needs_closure else kind.needs
        found["milliseconds"] = (time.process_time() - begin) * 1e3
    else:
        optimizer = recipe.whole([*model.parameters()], together=case.way == "together")
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    _train(optimizer, lambda step: _loss(model, step, dtype, part, parts), manager.step)
    values = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DistributedParameter)
        values[name] = p.gather_all().detach().clone()
    return values


def _train(
    optimizer: Any, loss_of: Callable[[int], torch.Tensor], step: Callable[[], object]
) -> None:
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    needs_closure, without = False, None
    for number in range(STEPS):

        def closure(number: int = number) -> torch.Tensor:
            with torch.enable_grad():
                optimizer.zero_grad()
                loss = loss_of(number)
                loss.backward()
            return loss

        closure()
        if not needs_closure:
            try:
                step()
                continue
            except ConfigError:
                raise
            except Exception as error:
                if number:
                    raise
                needs_closure, without = True, error
        try:
            optimizer.step(closure)
        except Exception as error:
            raise error if number else without or error from None


def outcomes_of(
    kind: str,
    options: dict[str, Any],
    cases: Sequence[Case],
    expected: Mapping[tuple[torch.dtype, bool], Expected],
) -> list[Training]:
    """Train by the optimizer of class ``kind`` on these ranks, once for each of ``cases``, and
    compare.

    ``expected`` has what :func:`expected_of` returned, by dtype and whether with masters.
    """
    recipe = Recipe(kind, options)
    return [_outcome(recipe, case, expected) for case in cases]


def _outcome(
    recipe: Recipe, case: Case, expected: Mapping[tuple[torch.dtype, bool], Expected]
) -> Training:
    found: dict[str, Any] = {}
    if not any(dtype == case.dtype for dtype, _ in expected):
        return Training(result="fails", detail="plain torch cannot train this")
    with warnings.catch_warnings(record=True) as caught, torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("always")
        try:
            values = trained_in_blocks(recipe, case, found)
        except ConfigError as error:
            return Training(result="refused", detail=str(error), **found)
        except Exception as error:
            return Training(result="raises", detail=f"{type(error).__name__}: {error}", **found)
    steps_whole = case.way != "manager" or found.get("needs") == "tensors"
    is_bfloat16 = case.dtype == torch.bfloat16
    wanted = expected.get((case.dtype, steps_whole and is_bfloat16))
    if wanted is None:
        return Training(result="fails", detail="plain torch cannot train this", **found)
    distance, is_split = wanted.error_of(values), current().topology.sizes.get("tp", 1) > 1
    reasons = [str(w.message) for w in caught if "could not be found out" in str(w.message)]
    # Gradients of ranks are summed in another order, so a bfloat16 parameter may round to the
    # neighbour of the expected one.
    if distance <= max(TOLERANCE[case.dtype], wanted.last_place if is_bfloat16 else 0.0):
        result = "right"
    elif reasons:
        result = "warned"
    elif is_split and distance <= 20 * wanted.rounding:
        result = "rounding"
    elif distance <= 3 * wanted.randomness:
        result = "random"
    else:
        result = "wrong"
    return Training(result=result, detail=" ".join([f"{distance:.1e}", *reasons]), **found)


def _distance(one: Values, other: Values) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _resolved(value: Any) -> Any:
    """Return a class for its (module, name)."""
    return (
        getattr(importlib.import_module(value[0]), value[1])
        if isinstance(value, tuple) and len(value) == 2
        else value
    )
