"""A backend that knows nothing of the watch, and a run without the watch."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import pytest
import torch

from bmt_core.comm import CommBackend, Group, TorchBackend
from bmt_core.comm.observer import RunObserver
from bmt_core.comm.protocols import ReduceOp, Work
from bmt_core.run import runtime
from bmt_core.run.runtime import current
from bmt_testing import rank_pool
from bmt_watch.observer import CallObserver


class Unknowing(TorchBackend):
    """As one of somebody else: its groups cannot be interrupted, and end by their own timeout."""

    name = "unknowing"

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        group = super().new_group(ranks, name)
        group.is_interruptible = False  # type: ignore[misc]
        return group


def start(backend: type[CommBackend] | str, timeout: float = 60.0) -> runtime.Runtime:
    runtime.init_distributed(device="cpu", comm_backend=backend, timeout=timeout)
    return runtime.current()


def a_call_that_rank_1_does_not_make() -> None:
    run = start(Unknowing)
    run.world.all_reduce(torch.ones(1)).wait()
    if run.rank == 1:
        raise ValueError("planted")
    run.world.all_reduce(torch.ones(1)).wait()


@pytest.mark.ranks(2)
def test_a_rank_whose_backend_cannot_be_interrupted_raises_why_the_run_has_ended() -> None:
    first, second = rank_pool(2).outcomes(a_call_that_rank_1_does_not_make, init=None)
    assert second.error_type == "ValueError" and first.error_type == "CallError"
    assert first.error_message == (
        "Rank 1 has failed (ValueError: planted). This is rank 0, in call 2 of group dp/main/0"
        " (ranks 0, 1): all_reduce sum torch.float32, 4 bytes."
    )


class Broken(TorchBackend):
    """Its calls cannot start after the second one, as those of NCCL over sockets once a rank has
    gone.
    """

    name = "broken"

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        group = super().new_group(ranks, name)
        all_reduce, calls = group.all_reduce, itertools.count()

        def fails_late(tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
            if next(calls) > 1:
                current().observer.store.wait(["planted"])  # type: ignore[attr-defined]
                raise torch.distributed.DistBackendError("the peer has closed its connection")
            return all_reduce(tensor, op)

        group.all_reduce = fails_late  # type: ignore[method-assign]
        return group


def calls_that_cannot_start() -> None:
    run = start(Broken)
    run.world.all_reduce(torch.ones(1)).wait()
    run.world.all_reduce(torch.ones(1)).wait()
    if run.rank == 1:
        run.observer.store.set("planted", "")  # type: ignore[attr-defined]
        raise ValueError("planted")
    run.world.all_reduce(torch.ones(1)).wait()


@pytest.mark.ranks(2)
def test_a_call_that_cannot_start_because_a_rank_is_gone_says_so() -> None:
    first, _ = rank_pool(2).outcomes(calls_that_cannot_start, init=None)
    assert first.error_type == "CallError"
    assert first.error_message == "Rank 1 has failed (ValueError: planted)."


def a_receive_that_never_ends() -> list[str]:
    """What rank 0 is told while it waits in a receive, which ends when rank 1 leaves."""
    said: list[str] = []
    told = threading.Event()
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        told.set()

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("bmt_core").addHandler(handler)
    run = start(Unknowing)
    observer: Any = run.observer
    if run.rank == 1:
        observer.store.wait(["waits"])
        observer.fail("Rank 1 has other plans.")
        observer.store.wait(["told"])
    else:
        observer.store.set("waits", "")
        waiter = threading.Thread(
            target=lambda: told.wait(30) and observer.store.clone().set("told", "")
        )
        waiter.start()
        with pytest.raises(RuntimeError, match="Rank 1 has other plans"):
            run.world.recv(torch.ones(1), 1).wait()
        waiter.join()
    logging.getLogger("bmt_core").removeHandler(handler)
    runtime.shutdown()
    return said


def test_a_receive_that_cannot_be_interrupted_is_named_in_a_warning() -> None:
    said, _ = rank_pool(2).run(a_receive_that_never_ends, init=None)
    assert said == ["bmt: rank 0 cannot go on. Rank 1 has other plans."]


def without_the_watch() -> tuple[bool, float]:
    run = start("torch")
    total = torch.ones(1)
    run.world.all_reduce(total).wait()
    run.lanes.reduce.group(run.world).all_reduce(total).wait()
    observed = isinstance(run.observer, CallObserver), type(run.observer) is RunObserver
    runtime.shutdown()
    return observed == (False, True), total.item()


def test_a_run_without_the_watch_makes_its_calls() -> None:
    env = {"BMT_DISABLE_PLUGINS": "bmt-watch"}
    assert rank_pool(2).run(without_the_watch, init=None, env=env) == [(True, 4.0)] * 2
