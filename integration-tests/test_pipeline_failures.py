"""A stage that fails, dies or stops ends all stages of its pipeline; after an exception the model
goes on as before it.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_trainings import Bare, Piped, loss_of, outcome, text, whole_gradients

import bmtrain as bmt
from bmt_core import RemoteError
from bmt_core.errors import CallError
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_params import DistributedParameter
from bmt_pipeline import failures, train_step
from bmt_pipeline.wait_errors import waiting_for
from bmt_testing import on_ranks, rank_pool, run_ranks
from bmt_watch.observer import CallObserver
from cells import cells

SLOW = pytest.mark.slow("bmt-core", "bmt-pipeline", "bmt-watch")


INIT = {"pipe_size": 2, "num_micro_batches": 4, "timeout": 30}


class Interrupt(Exception):
    """What fails on one stage."""


def interrupt(*_: Any) -> None:
    raise Interrupt("no luck") from KeyError("its cause")


def run(
    schedule: str | None, where: str, stage: int, at: int, act: Callable[..., Any] = interrupt
) -> list[Any]:
    """The losses of the steps, by ``schedule``, or by the list; an error where ``act`` has raised,
    on ``stage`` in step ``at``.

    Of several pipelines the first one fails, and the error ends the run.
    """
    is_only = current().topology.axis_size("dp") == 1
    model = Piped(4, 3, True)
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    steps: list[Any] = []
    calls = 0

    def is_time(which: str) -> bool:
        topology = current().topology
        is_here = topology.axis_rank("pp") == stage and topology.axis_rank("dp") == 0
        return where == which and len(steps) == at and is_here

    def forward_hook(module: Any, args: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls % 4 == 2:  # not in the first micro-batch
            if is_time("forward"):
                act()
            if is_time("backward"):
                output.register_hook(act)

    def before_layers(*args: Any) -> Any:
        if is_time("before_layers"):
            act()
        return Piped.before_layers(model, *args)

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if is_time("loss_fn"):
            act()
        return loss_of(logits, targets)

    model.layers.layers()[0].register_forward_hook(forward_hook)
    model.before_layers = before_layers  # type: ignore[method-assign]
    for ids, targets in zip(*text(), strict=True):
        manager.zero_grad()
        try:
            if is_time("between"):
                act()
            if schedule is None:
                loss = loss_fn(model(ids), targets)
                manager.backward(loss)
            else:
                loss = train_step(model, loss_fn, (ids, targets), schedule, 4, manager=manager)
            manager.step()
            steps.append(float(loss.detach()))
        except Exception as error:
            if act is not interrupt or not is_only:
                raise
            steps.append(f"{type(error).__name__}: {error}")
            calls = 0
    return steps


CASES = [
    *[
        (schedule, where, 1, at)
        for schedule in (None, "1f1b")
        for where in ("forward", "backward")
        for at in (0, 2)
    ],
    *[("1f1b", "before_layers", 0, at) for at in (0, 2)],
    *[("1f1b", "loss_fn", 1, at) for at in (0, 2)],
    ("1f1b", "forward", 0, 0),
    ("zero-bubble", "backward", 0, 2),
]


def all_cases() -> list[tuple[Any, list[Any]]]:
    return [(case, run(*case)) for case in [*CASES, ("1f1b", "", 0, 0)]]


def test_a_step_that_failed_on_one_stage_raises_on_all_and_leaves_nothing() -> None:
    """The steps after it come to what they come to wherever it has failed; a pipelined list and a
    schedule agree on that.
    """
    losses: dict[tuple[bool, int], set[float]] = {}
    for rank, found in enumerate(run_ranks(all_cases, 2, init=INIT)):
        *failed, (_, undisturbed) = found
        for (schedule, where, stage, at), steps in failed:
            error = steps[at]
            assert isinstance(error, str), (where, steps)
            if rank == stage:
                assert error == "Interrupt: no luck"
            else:
                assert error.startswith(
                    f"RemoteError: Stage {stage} of the pipeline (rank {stage}) failed"
                )
                assert "Traceback" in error and "Interrupt: no luck" in error
            after = steps[at + 1 :]
            assert all(isinstance(loss, float) for loss in after), (where, after)
            assert steps[:at] == pytest.approx(undisturbed[:at])
            losses.setdefault((schedule is None, at), set()).add(round(sum(after), 5))
    assert all(len(sums) == 1 for sums in losses.values()), losses


def leave() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    threading.Event().wait()


@pytest.mark.parametrize(
    ("how", "schedule", "where", "stage"),
    [
        ("leave", "1f1b", "between", 0),
        pytest.param("leave", None, "forward", 1, marks=SLOW),
        pytest.param("stop", None, "forward", 0, marks=SLOW),
    ],
)
def test_a_rank_that_is_gone_or_stops_is_named(
    how: str, schedule: str | None, where: str, stage: int
) -> None:
    init = {"pipe_size": 2, "num_micro_batches": 4, "timeout": 5 if how == "stop" else 30}
    grace = 0.1 if how == "stop" else 20.0
    act = {"leave": leave, "stop": stop}[how]
    outcomes = rank_pool(2).outcomes(run, schedule, where, stage, 1, act, init=init, grace=grace)
    assert outcomes[stage].error_type == {"leave": "Died", "stop": "Hung"}[how]
    left = outcomes[1 - stage]
    assert left.error_type == "RemoteError", left
    assert f"waited for stage {stage} (rank {stage}) to" in left.error_message
    says = {"leave": "The process of rank {}, ", "stop": "It waits for rank {}, "}[how]
    assert says.format(stage) in left.error_message


@pytest.mark.parametrize(
    ("act", "schedule", "where"),
    [
        (interrupt, "1f1b", "backward"),
        pytest.param(leave, None, "forward", marks=SLOW),
        pytest.param(stop, "1f1b", "forward", marks=SLOW),
    ],
)
def test_a_stage_of_one_pipeline_ends_the_ranks_of_all(
    act: Callable[..., Any], schedule: str | None, where: str
) -> None:
    """Rank 2 is stage 1 of the first of two pipelines; rank 3 has the same layers, in the
    other one.
    """
    init = {"pipe_size": 2, "num_micro_batches": 4, "timeout": 8 if act is stop else 30}
    # A rank that stops never ends by itself. The others have begun to wait when the first of them
    # ends. Ranks start within 8 s.
    grace = 4.0 if act is stop else 20.0
    outcomes = rank_pool(4).outcomes(
        run, schedule, where, 1, 1, act, init=init, timeout=100, grace=grace
    )
    assert outcomes[2].error_type == {interrupt: "Interrupt", leave: "Died", stop: "Hung"}[act]
    if act is interrupt:
        assert "KeyError: 'its cause'" in outcomes[2].traceback
    for rank in (0, 1, 3):
        left = outcomes[rank]
        assert left.error_type in ("RemoteError", "CallError"), left
        assert "rank 2" in left.error_message, left
        if act is interrupt:
            place = "a step, in the backward of up.weight and 4 others"
            told = f"Stage 1 of the pipeline (rank 2) failed in the computation of {place}: "
            assert told in left.error_message and "no luck" in left.error_message, left
        if act is stop:
            says = r"waited for stage 1 \(rank 2\) to.*It waits for rank 2"
            if rank != 0:  # may say first that it has waited in a collective, through another rank
                says += "|waits for rank 2"
            assert re.search(says, left.error_message, re.DOTALL), left


class WithCalls(torch.nn.Module):
    """A layer whose ranks along ``tp`` exchange rows. On rank 3 forward number ``at`` raises. With
    ``reads`` the host waits for the device in each forward.
    """

    def __init__(self, at: int, reads: bool) -> None:
        super().__init__()
        self.at = at
        self.reads = reads
        self.up = bmt.nn.ColumnParallelLinear(8, 8, bias=False)
        self.down = bmt.nn.RowParallelLinear(8, 8, bias=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.up(x)
        if self.reads:
            x.sum().item()
        if current().rank == 3 and self.calls == self.at:
            interrupt()
        out: torch.Tensor = self.down(x)
        return out


def train_with_calls(at: int, *, reads: bool = False) -> None:
    stages = current().topology.axis_size("pp")
    model = Bare([WithCalls(at, reads) for _ in range(stages)])
    bmt.init_parameters(model)
    batch = torch.ones(8, 8, device=current().device)
    for _ in range(2):
        train_step(model, torch.nn.functional.mse_loss, (batch, batch), "1f1b", 4)


@pytest.mark.parametrize(
    ("ranks", "grid", "at"),
    [
        (4, {"pipe_size": 2, "tp_size": 2}, 3),
        pytest.param(4, {"pipe_size": 2}, 3, marks=SLOW),
        # The next stage has no inputs, and computes nothing either.
        pytest.param(6, {"pipe_size": 3}, 1, marks=SLOW),
    ],
)
def test_a_rank_whose_partners_wait_for_it_in_their_layers_ends_all(
    ranks: int, grid: dict[str, int], at: int
) -> None:
    """The timeout is half an hour; the pool kills whoever is left after 20 s."""
    init = {"num_micro_batches": 4, **grid}
    for ended in rank_pool(ranks).outcomes(train_with_calls, at, init=init, timeout=40, grace=20):
        if ended.error_type != "Interrupt":  # rank 3 itself, if it waits for nobody
            assert ended.error_type in ("RemoteError", "CallError"), ended
            assert "Stage 1 of the pipeline (rank 3) failed in the c" in ended.error_message
        assert "no luck" in ended.error_message


@on_ranks(4, init=INIT)
def test_pipelines_that_all_failed_go_on_and_name_the_next_failure() -> None:
    """Stage 1 of every pipeline fails in each step but the second."""
    model, step = Piped(4, 3, True), 0

    def fail_sometimes(*_: Any) -> None:
        if step != 1 and current().topology.axis_rank("pp") == 1:
            raise Interrupt(f"no luck in step {step}")

    model.layers.layers()[0].register_forward_hook(fail_sometimes)
    for batch in zip(*text(), strict=True):
        said = str(outcome(partial(train_step, model, loss_of, batch, "1f1b", 4)))
        expected = {str(step)} if step != 1 else set()
        assert set(re.findall(r"no luck in step (\d)", said)) == expected, said
        observer = current().observer
        # Who has left the step is not taken for somebody who waits in it.
        assert isinstance(observer, CallObserver) and observer.log.step == 0
        step += 1


@on_ranks(4, init=INIT)
def test_a_failure_in_the_backward_of_one_pipeline_is_none_of_the_forward_of_another() -> None:
    """In two steps of a list, of which the layers on stage 1 fail in the first backward.

    The first pipeline ends its forward after the other one has failed in its backward.
    """
    model, run, step = Piped(4, 2, False), current(), 0
    is_first = run.topology.axis_rank("dp") == 0

    def fail(module: Any, args: Any, output: torch.Tensor) -> None:
        if step == 0 and run.topology.axis_rank("pp") == 1:
            output.register_hook(interrupt)
            if is_first and module.calls == 4:
                number = run.state(failures._Steps).number
                deadline = time.monotonic() + 20
                while not any(
                    failures._store().check([f"failure/{n}"]) for n in (number, number + 1)
                ):
                    assert time.monotonic() < deadline

    def count(module: Any, args: Any) -> None:
        module.calls = getattr(module, "calls", 0) + 1

    last = model.layers.layers()[-1]
    last.register_forward_pre_hook(count)
    last.register_forward_hook(fail)
    for batch in list(zip(*text(), strict=True))[:2]:
        own, wanted = (x.chunk(run.world_size)[run.rank] for x in batch)
        loss = loss_of(model(own), wanted)
        if step == 0:
            with pytest.raises(Exception, match="no luck"):
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        step += 1


@on_ranks(2, init={"pipe_size": 2})
@cells(
    "level, use_checkpoint, schedule",
    [(0, False, "1f1b"), (1, True, None), (2, False, "1f1b"), (3, True, None)],
)
def test_a_model_clears_what_a_failed_backward_has_left(
    level: int, use_checkpoint: bool, schedule: str | None
) -> None:
    """``zero_grad()`` leaves nothing of a backward that failed on stage 0 in its second
    micro-batch.
    """
    model = Piped(2, level, use_checkpoint)
    ids, targets = (x[0] for x in text())

    def backward() -> dict[str, torch.Tensor]:
        if schedule is None:
            loss_of(model(ids), targets).backward()  # type: ignore[no-untyped-call]
        else:
            train_step(model, loss_of, (ids, targets), schedule, 2)
        return whole_gradients(model)

    expected = backward()
    model.zero_grad()
    calls = itertools.count()

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        if next(calls) == 1 and current().rank == 0:
            output.register_hook(interrupt)

    handle = model.layers.layers()[0].register_forward_hook(hook)
    with pytest.raises((Interrupt, RemoteError)):
        backward()
    handle.remove()
    assert all(isinstance(parameter, DistributedParameter) for parameter in model.parameters())
    model.zero_grad()
    torch.testing.assert_close(backward(), expected)


def errors_after_an_interrupt(schedule: str | None) -> list[str]:
    """What is raised by the step in which all stages are interrupted, and by the next one. Stage 0
    is a micro-batch ahead.
    """
    model = Piped(4, 3, True)
    ids, targets = (x[0] for x in text())
    calls = itertools.count(current().rank)

    def interrupt_in_time(*_: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    model.layers.layers()[0].register_forward_hook(interrupt_in_time)
    found = []
    for _ in range(2):
        try:
            if schedule is None:
                model(ids)
            else:
                train_step(model, loss_of, (ids, targets), schedule, 2)
        except (KeyboardInterrupt, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    store = current().backend.context.store
    if store is not None:  # who ends earlier fails the stage that still receives
        store.set(f"interrupted/{current().rank}", "")
        store.wait([f"interrupted/{rank}" for rank in range(2)])
    return found


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_no_step_follows_one_that_was_interrupted(schedule: str | None) -> None:
    for interrupted, refused in run_ranks(
        errors_after_an_interrupt, 2, schedule, init={"pipe_size": 2}
    ):
        assert interrupted == "KeyboardInterrupt: "
        assert refused.startswith(
            "RuntimeError: KeyboardInterrupt ended a step of the pipeline in the middle of"
            " its transfers"
        )
    assert run_ranks(errors_after_an_interrupt, 1, schedule) == [
        ["KeyboardInterrupt: "]
    ]  # a single stage has no transfers


@on_ranks(4, init={"pipe_size": 2})
def test_a_rank_that_has_failed_and_waits_in_vain_says_first_why_it_failed() -> None:
    failures.begin_step()
    if current().rank == 3:
        failures.announce_failure("planted")
    current().world.all_reduce(torch.ones(1)).wait()
    in_vain = waiting_for([0], "to send")
    with pytest.raises(RemoteError, match=r"^planted Stage ") as caught, in_vain:
        raise RuntimeError("late")
    assert "waited for stage 0" in str(caught.value) and "late" in str(caught.value)


def step_whose_call_fails() -> None:
    model = Piped(4, 3, True)
    if current().rank == 0:

        def fail(*_: object) -> None:
            raise CallError("planted")

        model.layers.layers()[0].register_forward_hook(fail)
    ids, targets = next(zip(*text(), strict=True))
    train_step(model, loss_of, (ids, targets), "1f1b", 4)


def test_a_stage_whose_call_fails_makes_no_more_transfers() -> None:
    first, second = rank_pool(2).outcomes(step_whose_call_fails, init={"pipe_size": 2}, timeout=60)
    assert (first.error_type, first.error_message) == ("CallError", "planted")
    assert second.error_message.startswith("Stage 1 (rank 1) waited for stage 0 (rank 0) to send")
    assert "Rank 0 has failed (CallError: planted)" in second.error_message


@on_ranks(4, init={"pipe_size": 2})
def test_a_store_that_is_silent_is_not_asked() -> None:
    failures.begin_step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallObserver, "store_answers", False)
        announced = failures.announce_failure("planted")
        assert announced == failures.Failure(current().rank, "planted")
        assert failures.first_failure() is None
    current().world.all_reduce(torch.ones(1)).wait()
    assert failures.first_failure() is None
