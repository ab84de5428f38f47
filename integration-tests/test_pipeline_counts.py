"""``count`` and ``count_fn``: the mean over the tokens of all micro-batches of all pipelines, with
its gradients, as in plain torch.
"""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_trainings import (
    GRIDS,
    LENGTH,
    Piped,
    Plain,
    of_all_stages,
    of_pipeline,
    outcome,
    text,
    whole_gradients,
)
from torch import nn

from bmt_core.errors import RemoteError
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_params.guards.same_data import LossComparison
from bmt_pipeline import eval_step, train_step
from bmt_testing import on_ranks, run_ranks
from cells import run_cells

IGNORED = -100


def masked_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with 0 to 3 tokens that count: the first four rows have none, so a micro-batch
    has none.
    """
    ids, targets = (x[0].clone() for x in text())
    for row in range(len(targets)):
        targets[row, : LENGTH - (row % (LENGTH + 1) if row >= 4 else 0)] = IGNORED
    return ids, targets


def sum_of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def count_of_tokens(targets: torch.Tensor) -> torch.Tensor:
    return (targets != IGNORED).sum()


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("1f1b", {}),
    "v": ("zero-bubble", {"chunks": 2, "placement": "v"}),
}


def several_steps(schedule: str, options: dict[str, Any], loss_scale: float | None) -> Any:
    """The mean losses, norms and parameters of a training in which two calls of ``train_step``, one
    with a number and one with a function, make the gradients of one step.
    """
    halves = zip(*[x.chunk(2) for x in masked_text()], strict=True)
    batches: Any = [of_pipeline(*half) for half in halves]
    model = Piped(4, 3, True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer)
    losses, norms = [], []
    for _ in range(3):
        evaluated = eval_step(model, sum_of_tokens, batches[0], 2, count_fn=count_of_tokens)
        losses.append(float(evaluated))
        counts: list[Any] = [
            {"count": count_of_tokens(batches[0][1])},
            {"count_fn": count_of_tokens},
        ]
        for batch, count in zip(batches, counts, strict=True):
            loss = train_step(model, sum_of_tokens, batch, schedule, 2, manager=manager, **count)
            losses.append(float(loss))
        norms.append(float(manager.clip_grad_norm(model.parameters(), 0.1)))
        manager.step()
        manager.zero_grad()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    return of_all_stages((losses + norms, [], whole))


@pytest.mark.parametrize(
    ("form", "grid", "gradients"), [("1f1b", "pp 2 x dp 2", "sum"), ("v", "pp 2", "mean")]
)
def test_several_calls_of_a_step_have_the_mean_over_the_tokens_of_all(
    form: str, grid: str, gradients: Any
) -> None:
    plain = Plain(4).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ids, targets = masked_text()
    numbers: list[float] = []
    norms = []
    for _ in range(3):
        sums = [
            sum_of_tokens(plain(x), y) for x, y in zip(ids.chunk(2), targets.chunk(2), strict=True)
        ]
        counts = [count_of_tokens(half) for half in targets.chunk(2)]
        means = [float(total.detach() / n) for total, n in zip(sums, counts, strict=True)]
        numbers += [means[0], *means]
        (sum(sums) / sum(counts)).backward()  # type: ignore[union-attr]
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    ranks, stages = GRIDS[grid]
    init = {"pipe_size": stages, "gradients": gradients}
    for found, _, whole in run_ranks(several_steps, ranks, *FORMS[form], 8.0, init=init):
        assert found == pytest.approx(numbers + norms, rel=1e-5)
        torch.testing.assert_close(whole, dict(plain.state_dict()), rtol=1e-5, atol=1e-7)


def norm_after(what: str) -> float:
    """The norm of the gradients of a step, before which another one was thrown away or failed."""
    model, (ids, targets) = Piped(2, 3, True), masked_text()
    optimizer, manager = torch.optim.SGD(model.parameters(), lr=0.1), OptimManager()
    manager.add_optimizer(optimizer)
    step: Any = {"num_micro_batches": 2, "count_fn": count_of_tokens, "manager": manager}
    loss_fn: Any = None if what == "failed" else sum_of_tokens
    if what != "nothing":
        with contextlib.suppress(TypeError, RemoteError):
            train_step(model, loss_fn, (ids[8:], targets[8:]), **step)
        optimizer.zero_grad()
    train_step(model, sum_of_tokens, (ids[:8], targets[:8]), **step)
    return float(manager.clip_grad_norm(model.parameters(), math.inf))


def test_steps_that_were_thrown_away_or_failed_leave_no_counts() -> None:
    cells = [("nothing",), ("thrown away",), ("failed",)]
    runs = run_cells(norm_after, 2, cells, init={"pipe_size": 2})
    (_, wanted), *others = runs
    for _, found in others:
        assert found == pytest.approx(wanted)


@on_ranks(2, 4, init=lambda ranks: {"pipe_size": ranks // 2, "gradients": "mean"})
def test_without_a_manager_a_step_has_the_mean_over_the_tokens_of_all_pipelines() -> None:
    ids, targets = masked_text()
    plain = Plain(4).double()
    wanted = sum_of_tokens(plain(ids), targets) / count_of_tokens(targets)
    wanted.backward()
    schedule, options = FORMS["1f1b" if current().world_size == 2 else "v"]
    model, batch = Piped(4, 3, True, **options), of_pipeline(ids, targets)
    step: Any = partial(train_step, count_fn=count_of_tokens)
    assert step(model, sum_of_tokens, batch, schedule, 4).item() == pytest.approx(wanted.item())
    gradients = whole_gradients(plain)
    for name, gradient in whole_gradients(model).items():
        torch.testing.assert_close(gradient, gradients[name], msg=name)


@on_ranks(2, init={"pipe_size": 2})
def test_what_is_no_sum_or_no_count_is_refused_on_all_ranks() -> None:
    model, counted = Piped(4, 3, True), {"count_fn": count_of_tokens}
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (
            lambda out, x: (sum_of_tokens(out, x), count_of_tokens(x)),
            {},
            "Return the mean loss of a micro-batch, or the sum of its losses, and give count_fn",
        ),
        (
            sum_of_tokens,
            {"count_fn": lambda x: (x != IGNORED).sum(0)},
            "count_fn must return a number or a 0-dim tensor, not (3,)",
        ),
        (
            sum_of_tokens,
            counted if current().rank == 0 else {},
            "rank 0 has train_step with 1f1b, num_micro_batches=4, count_fn, and rank 1 train_step"
            " with 1f1b",
        ),
        (sum_of_tokens, {"count": 3, **counted}, "Give count, the number of tokens, or count_fn"),
        (sum_of_tokens, {"count": -3}, "count must be 0 or more, not -3."),
    ]
    for loss_fn, options, message in refusals:
        step = partial(train_step, model, loss_fn, masked_text(), "1f1b", 4, **options)
        assert message in str(outcome(step))


@on_ranks(4, init={"pipe_size": 2, "tp_size": 2})
def test_losses_that_must_be_the_same_are_compared_in_a_step_with_counts() -> None:
    """Losses that differ on ranks that must compute the same one."""
    current().state(LossComparison).axes.add("tp")

    def loss_fn(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sum_of_tokens(logits, x) * (1 + current().topology.axis_rank("tp"))

    model = Piped(4, 3, True)
    text = outcome(lambda: train_step(model, loss_fn, masked_text(), "1f1b", 4, count=30))
    assert "must have the same loss, and the values of loss differ" in str(text)


def one_pipeline_that_fails(where: str) -> tuple[str, str, float]:
    """Let ``loss_fn`` or ``count_fn`` fail in the first of two pipelines; return the error, and
    after how many seconds it came.
    """
    ids, targets = masked_text()
    model = Piped(4, 3, True)
    fails = current().topology.axis_rank("dp") == 0

    def loss_fn(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if fails and where == "loss_fn":
            raise ZeroDivisionError("mine")
        return sum_of_tokens(logits, x)

    def count_fn(x: torch.Tensor) -> torch.Tensor | None:
        if fails and where == "count_fn":
            raise ZeroDivisionError("mine")
        return None if where == "nothing" and fails else count_of_tokens(x)

    begin = time.monotonic()
    try:
        train_step(model, loss_fn, (ids, targets), "1f1b", 2, count_fn=count_fn)  # type: ignore[arg-type]
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


FAILURES = {
    "loss_fn": ("ZeroDivisionError", "mine"),
    "count_fn": ("ZeroDivisionError", "mine"),
    "nothing": ("ValueError", "count_fn must return a number or a 0-dim tensor, not a NoneType."),
}


SLOW = pytest.mark.slow("bmt-core", "bmt-pipeline", "bmt-watch")


# Ranks wait for seconds to find out who has failed.
@pytest.mark.parametrize(
    "where", [pytest.param("loss_fn", marks=SLOW), "count_fn", pytest.param("nothing", marks=SLOW)]
)
def test_a_failure_in_one_of_several_pipelines_is_known_to_all_at_once(where: str) -> None:
    kind, message = FAILURES[where]
    init = {"pipe_size": 2, "timeout": 50}
    # A rank that has failed ends its run: the others hear of it then.
    found = run_ranks(one_pipeline_that_fails, 4, where, init=init, timeout=100, own_run=True)
    kinds = [error for error, _, _ in found]
    assert kinds.count(kind) == 1 and kinds.count("RemoteError") == 3
    assert all(message in error and seconds < 25 for _, error, seconds in found)
