"""What an optimizer needs to see, found out by trial steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import odd_optimizers as odd
import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bmt_params.guards import optimizer_kind
from bmt_params.guards.optimizer_kind import OptimizerKind, kind_of, kinds_of_groups


def parameters(*, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((4, 3), (5,))]


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    **{
        kind.__name__: kind
        for kind in (
            torch.optim.Adadelta,
            torch.optim.Adagrad,
            torch.optim.Adam,
            torch.optim.Adamax,
            torch.optim.AdamW,
            torch.optim.ASGD,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.RMSprop,
            torch.optim.Rprop,
            torch.optim.SGD,
            odd.Plain,
            odd.Sign,
            odd.InTrainMode,
            odd.RenamesOption,
        )
    },
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True, amsgrad=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, 0.9, weight_decay=0.1, nesterov=True),
    "lr in a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
    "before warm-up": lambda params: torch.optim.Adam(params, lr=0.0),
    "tiny steps": lambda params: torch.optim.Adam(params, lr=1e-7),
    "wrapped": lambda params: odd.Averaged(torch.optim.Adam(params)),
    "without its argument": lambda params: odd.KeepsNothing(params, 7),
}
TENSORS: dict[str, Callable[[Any], Any]] = {
    "norm": odd.Norm,
    "mean": odd.Mean,
    "largest": odd.Largest,
    "no float64": odd.NoFloat64,
    "later norm": odd.LaterNorm,
    "quantised": odd.Quantised,
    "wrapped norm": lambda params: odd.Averaged(odd.Norm(params)),
    "renamed option": lambda params: odd.RenamesOption(params, clip=True),
    "norm at warm-up": lambda params: odd.Norm(params, lr=0.0),
}
SHAPED: dict[str, Callable[[Any], Any]] = {
    "rows": odd.Rows,
    "noisy rows": odd.NoisyRows,
    "dims": odd.NoDecayOfVectors,
    "Adafactor": torch.optim.Adafactor,
    "matrices": lambda params: odd.MatricesOnly(params[:1]),
    "Muon": lambda params: torch.optim.Muon(params[:1]),
}
TOGETHER: dict[str, Callable[[Any], Any]] = {
    "clip": odd.GlobalClip,
    "step size": odd.StepSizeFromAll,
    "LBFGS": torch.optim.LBFGS,
    "SAM": lambda params: odd.Sharpness(params, torch.optim.SGD, lr=0.1),
}
HALF = {"foreach", "AdamW", "Plain", "norm", "no float64", "quantised", "rows", "clip", "SGD"}


def all_kinds() -> list[Any]:
    expected = [
        (ELEMENTWISE, ("elements", False)),
        (TENSORS, ("tensors", False)),
        (SHAPED, ("tensors", True)),
    ]
    expected.append((TOGETHER, ("all tensors", False)))
    return [
        pytest.param(make, wanted, dtype, id=f"{name}-{dtype}")
        for makes, wanted in expected
        for name, make in makes.items()
        for dtype in ([torch.float32, torch.bfloat16] if name in HALF else [torch.float32])
    ]


@pytest.mark.parametrize(("make", "wanted", "dtype"), all_kinds())
def test_what_an_optimizer_needs_is_found_out(
    make: Callable[[Any], Any], wanted: tuple[str, bool], dtype: torch.dtype
) -> None:
    kind = kind_of(made := make(parameters(dtype=dtype)))
    assert (kind.needs, kind.needs_shape) == wanted, kind
    assert kind.needs_closure == isinstance(made, (torch.optim.LBFGS, odd.Sharpness))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (odd.Noisy, "two trials of the same differ"),
        (
            lambda params: odd.OfModel(torch.nn.Linear(3, 2)),
            "an optimizer like it cannot be made: .*model",
        ),
        (
            torch.optim.SparseAdam,
            "its step raises RuntimeError: SparseAdam does not support dense gradients",
        ),
        (
            lambda params: torch.optim.SGD(
                [{"params": [p], "weight_decay": 0.0} for p in params], lr=0
            ),
            "",
        ),
    ],
)
def test_what_cannot_be_found_out_has_a_reason(make: Callable[[Any], Any], reason: str) -> None:
    kind = kind_of(make(parameters()))
    assert kind.needs == ("unknown" if reason else "elements")
    assert pytest.importorskip("re").search(reason, kind.reason)


def test_an_optimizer_that_fails_on_empty_parameters_is_known() -> None:
    assert kind_of(odd.LogsLargest(parameters())) == OptimizerKind(
        needs="elements", fails_on_empty=True
    )
    assert not kind_of(odd.Plain(parameters())).fails_on_empty


def test_what_is_declared_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Says(odd.Norm):
        bmt_elementwise = True

    monkeypatch.setattr(optimizer_kind, "twin_of", None)
    assert kind_of(Says(parameters())).needs == "elements"
    optimizer = odd.Plain(parameters())
    optimizer.bmt_elementwise = False  # type: ignore[attr-defined]
    assert kind_of(optimizer).needs == "tensors" and kind_of(optimizer).needs_shape


def test_groups_are_judged_each_by_its_options() -> None:
    one, two = parameters()
    muon = torch.optim.Adafactor([{"params": [one]}, {"params": [two], "bmt_elementwise": True}])
    assert [kind.needs for kind in kinds_of_groups(muon)] == ["tensors", "elements"]
    assert kind_of(muon).needs == "tensors"


def test_groups_that_were_added_are_tried() -> None:
    optimizer = odd.RenamesOption(parameters())
    assert [kind.needs for kind in kinds_of_groups(optimizer)] == ["elements"]
    optimizer.add_param_group({"params": parameters(), "bmt_elementwise": False})
    assert [kind.needs for kind in kinds_of_groups(optimizer)] == ["elements", "tensors"]


def test_many_groups_of_like_options_are_tried_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    twin_of = optimizer_kind.twin_of
    monkeypatch.setattr(
        optimizer_kind, "twin_of", lambda *arguments: made.append(arguments) or twin_of(*arguments)
    )
    groups = [
        {"params": parameters(), "lr": 0.1 / (i + 1), "weight_decay": i % 2 * 0.1}
        for i in range(40)
    ]
    assert {kind.needs for kind in kinds_of_groups(torch.optim.AdamW(groups))} == {"elements"}
    assert {index for _, index, _ in made} == {0, 1}
    before = len(made)
    groups = [{"params": parameters(), "betas": (0.5, 0.9 + i / 1000)} for i in range(40)]
    assert kind_of(torch.optim.AdamW(groups)).reason == "it has 40 groups of different options"
    assert len(made) == before


def test_nothing_of_the_program_changes() -> None:
    params, calls = parameters(), []
    optimizer = torch.optim.AdamW(params, lr=0.1)
    # Puts a function in place of step.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    optimizer.register_step_pre_hook(lambda *arguments: calls.append("own"))
    handles = [
        register(lambda *arguments: calls.append("all"))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    torch.manual_seed(5)
    random.seed(5)
    wanted = torch.rand(2), random.random()
    torch.manual_seed(5)
    random.seed(5)
    before = copy.deepcopy(optimizer.state_dict())
    try:
        assert kind_of(optimizer).needs == "elements" and not calls
        kind_of(odd.Noisy(parameters()))
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(torch.rand(2), wanted[0]) and random.random() == wanted[1]
    assert optimizer.state_dict() == before and scheduler.last_epoch == 0
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in params)


def test_an_optimizer_is_tried_once() -> None:
    optimizer = odd.Norm(parameters())
    assert kinds_of_groups(optimizer) is kinds_of_groups(optimizer)


def test_an_optimizer_that_has_stepped_is_known_as_before() -> None:
    for make, needs in (
        (odd.Plain, "elements"),
        (odd.Norm, "tensors"),
        (torch.optim.Adagrad, "elements"),
    ):
        params = parameters()
        optimizer = make(params)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert kind_of(optimizer).needs == needs
