"""``train_step`` under every schedule against one process in plain torch."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from pipeline_trainings import (
    GRIDS,
    Bare,
    Piped,
    Plain,
    Record,
    compare,
    expected,
    loss_of,
    of_all_stages,
    of_pipeline,
    on_grid,
    scheduled,
    text,
    whole_gradients,
)
from torch import nn
from torch.distributed import TCPStore

from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_params import DistributedParameter
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_testing import on_ranks, run_ranks
from cells import cells, run_cells

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("gpipe", {}),
    "1f1b": ("1f1b", {}),
    "interleaved": ("interleaved", {"chunks": 2}),
    "gpipe, two chunks": ("gpipe", {"chunks": 2}),
    "zero-bubble": ("zero-bubble", {}),
    "zero-bubble, v": ("zero-bubble", {"chunks": 2, "placement": "v"}),
}


def of_form(form: str, layers: int, micro_batches: int) -> Record:
    schedule, options = FORMS[form]
    return scheduled(layers, 3, True, schedule, micro_batches, **options)


@pytest.mark.parametrize(
    ("grid", "layers", "micro_batches", "forms"),
    [
        ("pp 2 x dp 2", 5, 8, [*FORMS]),
        ("pp 4", 9, 2, ["gpipe", "interleaved", "zero-bubble, v"]),
        ("pp 2", 5, 1, ["1f1b", "gpipe, two chunks", "zero-bubble"]),
    ],
)
def test_a_step_by_any_schedule_is_that_of_plain_torch(
    grid: str, layers: int, micro_batches: int, forms: list[str]
) -> None:
    wanted = expected(layers)
    ranks, stages = GRIDS[grid]
    cells = [(form, layers, micro_batches) for form in forms]
    init = {"pipe_size": stages}
    for (form, *_), records in run_cells(of_form, ranks, cells, init=init, timeout=180):
        print(form)
        for record in records:
            compare(record, wanted)


@on_ranks(2, init={"pipe_size": 2})
@cells("has_manager", [False, True])
def test_only_a_step_without_a_manager_warns_of_gradients_that_are_sums(has_manager: bool) -> None:
    model = Piped(2, 3, True)
    manager, optimizer = OptimManager(), torch.optim.SGD(model.parameters(), lr=0.1)
    manager.add_optimizer(optimizer)
    tokens = torch.zeros(4, 3, dtype=torch.long)
    options: Any = {"num_micro_batches": 2, "manager": manager if has_manager else None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_step(model, loss_of, (tokens, tokens), **options)
        (manager if has_manager else optimizer).step()
    said = [str(warning.message) for warning in caught if "sums over" in str(warning.message)]
    assert len(said) == (not has_manager and current().rank == 0)


def compiled() -> Record:
    """Train with compiled layers, which are traced and differentiated as usual and run as
    they are.
    """
    compile = torch.compile
    torch.compile = functools.partial(compile, backend="aot_eager")  # type: ignore[assignment]
    try:
        return scheduled(2, 3, True, "zero-bubble", 4, compile=True)
    finally:
        torch.compile = compile


def test_compiled_layers_train_as_plain_torch() -> None:
    for record in on_grid("pp 2", compiled, timeout=120):
        compare(record, expected(2))


def loss_in_float32(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_of(logits.float(), targets)


def gradients_of_one_step(
    dtype: torch.dtype, micro_batches: int
) -> dict[str, dict[str, torch.Tensor]]:
    """By form: the gradients of all stages, of which those of one micro-batch too many or too few
    would be far away.
    """
    found = {}
    batch: Any = of_pipeline(*(x[0] for x in text()))
    for form, (schedule, options) in FORMS.items():
        model = Piped(4, 3, False, **options).to(dtype)
        train_step(model, loss_in_float32, batch, schedule, micro_batches, manager=OptimManager())
        (_, (gradients, *_), _) = of_all_stages(([], [whole_gradients(model)], {}))
        found[form] = gradients
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance", "grid", "micro_batches"),
    [(torch.bfloat16, 0.03, "pp 2", 8), (torch.float32, 1e-5, "pp 2 x dp 2", 4)],
    ids=["bfloat16", "float32"],
)
def test_gradients_of_joined_micro_batches_are_those_of_plain_torch(
    dtype: torch.dtype, tolerance: float, grid: str, micro_batches: int
) -> None:
    """Some micro-batches are one product each, or all of a step."""
    plain: nn.Module = Plain(4).double().to(dtype).double()
    ids, targets = (x[0] for x in text())
    loss_of(plain(ids), targets).backward()
    wanted = whole_gradients(plain)
    for found in on_grid(grid, gradients_of_one_step, dtype, micro_batches):
        for form, gradients in found.items():
            assert gradients.keys() == wanted.keys()
            for name, gradient in gradients.items():
                assert gradient.dtype == dtype
                error = (gradient.double() - wanted[name]).norm() / wanted[name].norm()
                assert error < tolerance, (form, name, error)


@on_ranks(2, init={"pipe_size": 2})
def test_a_stage_that_tells_shapes_does_not_wait_until_they_are_taken() -> None:
    """Take a step in which stage 0 can end its third micro-batch only after stage 1 has begun its
    second one.

    Before that, stage 1 sends for the first time what its layer returns, which stage 0 takes after
    its fourth micro-batch.
    """
    runtime = current()
    model = Piped(4, 0, False, chunks=2)
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
    calls = itertools.count()

    def meet(module: nn.Module, args: Any) -> None:
        if (runtime.rank, call := next(calls)) == (1, 1):
            store.set("stage 1 has begun its second micro-batch", b"")
        elif (runtime.rank, call) == (0, 2):
            store.wait(["stage 1 has begun its second micro-batch"])

    model.layers.layers()[0].register_forward_pre_hook(meet)
    ids, targets = (x[0] for x in text())
    train_step(model, loss_of, (ids, targets), "gpipe", 4, manager=OptimManager())


class Shift(nn.Module):
    """Adds a parameter and a bias, so that each has the gradient of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + self.weight + bias


class Shifts(Bare):
    def __init__(self) -> None:
        super().__init__([Shift() for _ in range(2)])
        self.first = DistributedParameter(torch.zeros(4, dtype=torch.bfloat16))
        self.last = DistributedParameter(torch.zeros(4, dtype=torch.bfloat16))

    def before_layers(self, x: torch.Tensor) -> Any:
        return x + self.first, torch.zeros(1, 4, dtype=torch.bfloat16)

    def after_layers(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last


SMALL = torch.tensor([256.0] + [1.0] * 7)
"""The factors of micro-batches, of which the first has a large gradient, the others small ones."""
TOTAL = torch.tensor(263.0).bfloat16().item()


@on_ranks(2, init={"pipe_size": 2, "gradients": "mean"})
@cells("schedule", ["1f1b", "zero-bubble"])
def test_small_gradients_in_half_precision_add_up_over_micro_batches(schedule: str) -> None:
    model, x = Shifts(), torch.zeros(8, 4, dtype=torch.bfloat16)

    def loss_fn(out: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (out.float() * factor[:, None]).sum()

    train_step(model, loss_fn, (x, SMALL), schedule, 8)
    for gradient in whole_gradients(model).values():
        assert set(gradient.flatten().tolist()) == {TOTAL / 8}


@on_ranks(2, init={"pipe_size": 2, "gradients": "mean", "num_micro_batches": 16})
def test_small_gradients_of_what_all_rows_share_add_up_over_micro_batches() -> None:
    bias = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    x = torch.zeros(8, 4, dtype=torch.bfloat16)
    out = PipelineTransformerBlockList([Shift() for _ in range(2)])(x, bias)
    (out.float() * SMALL[:, None] / 2).sum().backward()  # two layers add it
    assert bias.grad is not None and set(bias.grad.flatten().tolist()) == {TOTAL}


class SeveralHeads(PipelineModel):
    """Each pipeline uses one of the heads, and no one uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = PipelineTransformerBlockList([nn.Linear(3, 3) for _ in range(2)])
        self.one, self.two, self.unused = (DistributedParameter(torch.ones(3)) for _ in range(3))

    def before_layers(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.two if current().topology.axis_rank("dp") else self.one)


def used_heads() -> list[bool]:
    """Take a step; return which heads have a gradient."""
    model, batch = SeveralHeads(), (torch.ones(2, 3), torch.zeros(2))
    train_step(model, lambda out, wanted: (out - wanted).square().mean(), batch)
    heads = dict(model.named_parameters(recurse=False))
    return [heads[name].grad is not None for name in ("one", "two", "unused")]


@pytest.mark.parametrize("grid", ["pp 2 x dp 2", "pp 2"])
def test_parameters_outside_of_layers_that_no_rank_uses_get_no_gradient(grid: str) -> None:
    ranks, stages = GRIDS[grid]
    used = [True, ranks > stages, False]
    assert run_ranks(used_heads, ranks, init={"pipe_size": stages}) == [used] * ranks
