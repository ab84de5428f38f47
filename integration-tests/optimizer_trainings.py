"""A small training by any optimizer, on several ranks and in plain torch, and what came of it."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.params.optimizer_kind import kind_of
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_tp import ColumnParallelLinear, RowParallelLinear
from bmt_zero import Block

STEPS = 12
TOLERANCE = {
    torch.float64: 1e-7,
    torch.float32: 1e-3,
    torch.bfloat16: 3e-2,
}  # of the way of the parameter that went farthest

Make = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one optimizer came to."""

    needs: str = ""
    result: str
    """``right``, ``refused``, ``warned``, ``wrong``, or ``fails`` where plain torch fails too."""
    detail: str = ""
    milliseconds: float = 0
    """For finding out what the optimizer needs."""


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


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
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


def trained_plainly(make: Make, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters after the training in one process."""
    model = _model(dtype, _Dense, lambda m: m)
    model.load_state_dict(_values(model))
    torch.manual_seed(0)
    optimizer = make([*model.parameters()], model)
    _train(optimizer, lambda step: _loss(model, step, dtype, 0, 1), optimizer.step)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_in_blocks(
    make: Make, dtype: torch.dtype, level: int, found: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return whole parameters after the training on these ranks, all of which see the same data;
    note the kind in ``found``.
    """
    topology = current().topology
    split = topology.axis_size("tp") > 1 if "tp" in topology.sizes else False
    part, parts = (topology.axis_rank("tp"), topology.axis_size("tp")) if split else (0, 1)
    model = _model(dtype, _Split if split else _Dense, lambda m: Block(m, zero_level=level))
    model.load_state_dict(_values(_model(dtype, _Dense, lambda m: m)))
    torch.manual_seed(0)
    optimizer = make([*model.parameters()], model)
    begin = time.perf_counter()
    found["needs"] = kind_of(optimizer).needs
    found["milliseconds"] = (time.perf_counter() - begin) * 1e3
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    _train(optimizer, lambda step: _loss(model, step, dtype, part, parts), manager.step)
    whole = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DistributedParameter)
        whole[name] = p.gather_all().detach().clone()
    return whole


def _train(
    optimizer: Any, loss_of: Callable[[int], torch.Tensor], step: Callable[[], object]
) -> None:
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    needs_closure = False
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
            except Exception:
                if number:
                    raise
                needs_closure = True
        optimizer.step(closure)


def outcome_of(kind: str, options: dict[str, Any], dtype: torch.dtype, level: int) -> Training:
    """Train by the optimizer of class ``kind`` (module:class) on these ranks and in plain torch,
    and compare.
    """
    module, _, name = kind.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:
        return Training(result="fails", detail=f"import: {error}")
    extra = {key: _resolved(value) for key, value in options.items()}

    def make(params: Any, model: nn.Module) -> torch.optim.Optimizer:
        if "model" in extra:
            return cls(model, **_without(extra, "model"))  # type: ignore[no-any-return]
        if "inner" in extra:
            made: torch.optim.Optimizer = cls(
                torch.optim.AdamW(params, lr=0.01), **_without(extra, "inner")
            )
        elif "matrices only" in extra:
            matrices = [p for p in params if len(getattr(p, "whole_shape", p.shape)) == 2]
            made = cls(matrices, **_without(extra, "matrices only"))
        elif "matrices" in extra:
            shape = [getattr(p, "whole_shape", p.shape) for p in params]
            groups = [
                {
                    "params": [
                        p for p, s in zip(params, shape, strict=True) if (len(s) == 2) is is_matrix
                    ],
                    extra["matrices"]: is_matrix,
                }
                for is_matrix in (True, False)
            ]
            made = cls(groups, **_without(extra, "matrices"))
        else:
            made = cls(params, **extra)
        return made

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wanted = trained_plainly(make, dtype)
        except Exception as error:
            return Training(
                result="fails", detail=f"in plain torch too: {type(error).__name__}: {error}"
            )
        caught.clear()
        return _compared(make, dtype, level, wanted, caught)


def _compared(
    make: Make,
    dtype: torch.dtype,
    level: int,
    wanted: dict[str, torch.Tensor],
    caught: list[warnings.WarningMessage],
) -> Training:
    found: dict[str, Any] = {}
    try:
        values = trained_in_blocks(make, dtype, level, found)
    except ConfigError as error:
        return Training(result="refused", detail=str(error), **found)
    except Exception as error:
        return Training(result="raises", detail=f"{type(error).__name__}: {error}", **found)
    starts = _values(_model(dtype, _Dense, lambda m: m))
    moved = max(float((wanted[name] - starts[name]).abs().max()) for name in wanted)
    error = max(float((wanted[name] - values[name]).abs().max()) for name in wanted) / moved
    reasons = [str(w.message) for w in caught if "could not be found out" in str(w.message)]
    if error <= TOLERANCE[dtype]:
        result = "right"
    else:
        result = "warned" if reasons else "wrong"
    return Training(result=result, detail=" ".join([f"{error:.1e}", *reasons]), **found)


def _without(options: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k != key}


def _resolved(value: Any) -> Any:
    """Classes stand in options as (module, name)."""
    return (
        getattr(importlib.import_module(value[0]), value[1])
        if isinstance(value, tuple) and len(value) == 2
        else value
    )
