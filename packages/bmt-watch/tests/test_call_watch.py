"""What the watch of a rank says of calls on GPUs, and how it ends the run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from queue import Queue
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from watch_parts import context_of, observer, queue, quick_watch, watch_of

from bmt_core.comm.annotate import annotate
from bmt_core.errors import CallError
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_testing.pool import serve_store
from bmt_watch import call_watch
from bmt_watch.call_log import (
    RECORDS,
    CallLog,
    RankCalls,
    first_difference,
)
from bmt_watch.explanation import Findings
from bmt_watch.observer import CallObserver
from bmt_watch.rank_states import (
    Call,
)


def warnings_of_calls_on_device(layers: list[list[int]]) -> list[str]:
    """Note calls for these layers on each rank as those on a GPU are noted, after the first ones;
    return what is warned of until all ranks have been looked at five times since.
    """
    messages: list[str] = []
    handler, never = logging.Handler(), threading.Event()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    with quick_watch():
        runtime.init_distributed(device="cpu")
        run = runtime.current()
        observer().first_calls = 0
        logging.getLogger("bmt_core").addHandler(handler)
        groups = [observer().group(name, run.world.ranks) for name in ("rows", "columns")]
        for layer, group in itertools.product(layers[run.rank], groups):
            with annotate(f"for layers.{layer}.weight"):
                group.enter_on_device(("all_gather",), torch.zeros(3))
        for optimizer in (run, handler, run):
            observer().log.end_of_step(optimizer)
        first = observer().watch._looks.found.number
        while observer().watch._looks.found.number < first + 5:
            never.wait(0.02)
        logging.getLogger("bmt_core").removeHandler(handler)
        runtime.shutdown()
    return messages


SEVEN = [*range(7)]


@pytest.mark.parametrize("numbers", [[7, 6, 7], [7, 7, 7]])
def test_calls_on_gpus_that_a_rank_has_not_entered_are_named(numbers: list[int]) -> None:
    layers = [SEVEN[:number] for number in numbers]
    for rank, messages in enumerate(run_ranks(warnings_of_calls_on_device, 3, layers, init=None)):
        if max(numbers) == min(numbers) or rank == 1:
            assert messages == []
            continue
        (message,) = messages
        assert f"bmt: rank {rank} has made no call for " in message
        call = "of group rows (ranks 0, 1, 2): all_gather, 12 bytes, for layers"
        waits = f"Its GPU may wait in call 7 {call}.6.weight. It waits for rank 1, whose last call"
        assert waits in message
        last = rf"whose last call was call 6 {re.escape(call)}\.5\.weight"
        assert re.search(last + r" \(it has made none for \d s, and is in step 3\)\.", message)


@pytest.mark.parametrize(
    "of_rank_1",
    [[0, 1, 2, 4, 5, 6], [0, 1, 2, 4, 5, 6, 7], [0, 1, 2, 4, 3, 4, 5, 6], [0, 1, 2, 4, 4, 5, 6]],
    ids=["one less", "another at the end", "one more", "another name"],
)
def test_the_first_call_on_gpus_that_differs_is_named(of_rank_1: list[int]) -> None:
    layers = [SEVEN, of_rank_1, SEVEN]
    for rank, messages in enumerate(run_ranks(warnings_of_calls_on_device, 3, layers, init=None)):
        message = messages[-1]  # a look may come before all have shown their calls
        assert len(messages) <= 2 and f"bmt: rank {rank} has made no call for " in message
        message = re.sub(r"at \d\d:\d\d:\d\d", "at TIME", message)
        assert (
            "Ranks have entered different calls: call 4 of group rows (ranks 0, 1, 2) is on rank 0,"
            " in step 1, at TIME: all_gather, 12 bytes, for layers.3.weight; on rank 1, in step 1,"
            " at TIME: all_gather, 12 bytes, for layers.4.weight. All ranks of a group must make"
            " the same calls" in message
        )


@pytest.mark.parametrize(("at", "is_kept"), [(900, False), (975, True), (1899, True)])
def test_calls_on_gpus_are_compared_by_number_where_two_ranks_have_kept_them(
    at: int, is_kept: bool
) -> None:
    """A purpose that may differ, of call 1700, is shown and not compared. Rank 2 is far behind. A
    step has 100 calls. A call takes a second, and rank 1 is two hours late.
    """
    logs = [CallLog(rank=rank) for rank in range(3)]
    for rank, log in enumerate(logs):
        log.add_group("rows", (0, 1, 2))
        for number in range(1, (1900, 1999, 850)[rank]):
            log.training_step = (number - 1) // 100 + 1
            text = f"all_reduce {rank if number == at else 0}, {number} bytes"
            with mock.patch.object(time, "time", lambda: number + 7200 * rank + 0.5):  # noqa: B023
                queue(log, number, text + f", own {rank}" * (number == 1700), text)
    shown = [RankCalls(log.to_bytes()) for log in logs]
    assert shown[1].calls[0].call.number == 1998 - RECORDS + 1
    (last,) = logs[1].last_on_device()
    assert last.number == 1998 and last.text == "all_reduce 0, 1998 bytes"
    found = first_difference(shown)
    step = (at - 1) // 100 + 1
    times = [time.strftime("%H:%M:%S", time.localtime(at + late)) for late in (0, 7200)]
    of_two = "; ".join(
        f"on rank {rank}, in step {step}, at {times[rank]}: all_reduce {rank}, {at} bytes"
        for rank in range(2)
    )
    assert found == (f"call {at} of group rows (ranks 0, 1, 2) is {of_two}" if is_kept else "")


def test_a_difference_that_was_found_in_an_earlier_pause_is_not_told_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_watch, "WARN_AFTER", 0.0)
    store = dist.HashStore()
    watch = watch_of(store)
    watch.log.add_group("rows", (0, 1))
    told = []
    for number in range(1, 7):
        if number in (1, 4):  # a pause begins after this call
            queue(watch.log, number, "all_gather, 16 bytes")
        difference = "call 1 differs" if number in (2, 3, 4, 6) else ""
        store.set(call_watch._FOUND, Findings(number=number, difference=difference).to_json())
        caplog.clear()
        assert watch.tick()
        told.append("call 1 differs" in caplog.text)
    assert told == [False, True, False, False, False, True]


def warnings_of_a_late_gather() -> list[str]:
    """Gather on a GPU after the first calls; rank 1 leaves one out until rank 0 has warned."""
    messages: list[str] = []
    warned = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            warned.set()

    handler = Handler()
    with quick_watch():
        runtime.init_distributed(device="cuda")
        run = runtime.current()
        logging.getLogger("bmt_core").addHandler(handler)
        store, shard = observer().store.clone(), torch.ones(3, device=run.device)
        output = shard.new_empty(3 * run.world_size)
        for layer in range(10):
            if layer == 9 and run.rank == 1:
                store.wait(["warned"])
            with annotate(f"for layers.{layer}.weight"):
                run.world.all_gather(output, shard).wait()
        if run.rank != 1:
            assert warned.wait(60)
            store.set("warned", "")
        torch.cuda.synchronize()
        logging.getLogger("bmt_core").removeHandler(handler)
        runtime.shutdown()
    return messages


@pytest.mark.gpu(2)
def test_a_gather_on_gpus_that_a_rank_has_not_entered_is_named() -> None:
    messages, of_late_rank = run_ranks(warnings_of_a_late_gather, 2, init=None)
    text = "all_gather torch.float32, 12 bytes, for layers"
    for said in (f": {text}.9.weight. It waits for rank 1", "whose last call was call 9 of group"):
        assert said in messages[0], messages
    assert f"{text}.8.weight" in messages[0] and not of_late_rank


def ended_on_device() -> tuple[str, str]:
    """Fail on rank 1; return what ends calls on the GPU of each rank, and the next such call."""
    with quick_watch():
        runtime.init_distributed(device="cpu")
        run = runtime.current()
        observer().first_calls = 0
        group, told = observer().group("rows", run.world.ranks), Queue[str]()
        group.enter_on_device(("all_gather",), torch.zeros(3))
        observer().on_failure(told.put)
        if run.rank == 1:
            observer().announce("ValueError: planted")
        ended = told.get(timeout=30)
        with pytest.raises(CallError) as raised:
            group.enter_on_device(("all_gather",), torch.zeros(3))
        with pytest.raises(CallError, match="planted"):
            group.enter_transfer("an exchange with", [1 - run.rank])
        runtime.shutdown()
    return ended, str(raised.value)


def test_a_failure_ends_the_calls_on_all_gpus_and_is_raised_by_the_next_ones() -> None:
    failure = "Rank 1 has failed (ValueError: planted)."
    for rank, (ended, raised) in enumerate(run_ranks(ended_on_device, 2, init=None)):
        assert ended == failure
        assert raised == f"{failure} This is rank {rank}, in all_gather, 12 bytes."


SERVE = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.mark.slow("bmt-watch", "bmt-core")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_that_fails_does_not_wait_for_a_silent_store(is_stopped: bool) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server, contextlib.ExitStack() as last, quick_watch():
        last.callback(server.kill)
        assert server.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()))
        check = CallObserver(context_of(store, server_rank=0))
        if is_stopped:
            server.send_signal(signal.SIGSTOP)
            end = time.monotonic() + 30
            while not check.watch.waits_for_store and time.monotonic() < end:
                time.sleep(0.01)
        telling = threading.Thread(target=check.announce, args=("planted",), daemon=True)
        telling.start()
        telling.join(30)
        assert not telling.is_alive()
        assert check.failure == (None if is_stopped else "Rank 1 has failed (planted).")
        if not is_stopped:  # a watch that has read a failure asks no more, and waits for nothing
            check.watch._thread.join(30)
            assert not check.watch._thread.is_alive()
            assert check.watch._answered > check.watch._began
        server.kill()
        check.leave("")


@pytest.mark.parametrize("ended", ["ValueError: planted", ""])
def test_a_rank_that_fails_ends_the_calls_on_its_own_gpu_when_it_leaves(ended: str) -> None:
    told: list[str] = []
    watch = watch_of(dist.HashStore(), rank=0, world_size=1)
    watch.start()
    watch.end.functions.append(told.append)
    watch.close(ended)
    assert told == ([ended] if ended else [])


@pytest.mark.parametrize(
    ("server_rank", "on_device", "was_late", "known"),
    [
        (0, True, False, None),
        (0, False, False, None),
        (None, True, False, None),
        (0, True, True, None),
        (0, True, False, "Rank 2 has failed."),
    ],
    ids=["", "no call on a GPU", "the launcher", "missed the farewell", "known"],
)
def test_the_end_of_the_process_that_serves_the_store_ends_calls_on_gpus(
    server_rank: int | None, on_device: bool, was_late: bool, known: str | None
) -> None:
    """Without a word, as by SIGKILL. A run whose launcher is gone can go on, and so can a rank that
    was stopped while rank 0 said that it leaves. What is known already stays the failure.
    """
    server = serve_store(timedelta(seconds=60))
    store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
    watch = watch_of(store, server_rank=server_rank)
    end, told = watch.end, Queue[str]()
    watch.log.add_group("rows", (0, 1))
    end.functions.append(told.put)
    if on_device:
        queue(watch.log, 1, "all_gather, 16 bytes")
    assert watch.tick()
    del server
    if was_late:
        watch._answered -= 2 * call_watch._READERS_PATIENCE * watch.period
    end.failure = known
    watch.start()
    assert end.is_known.wait(30) and end.store_is_gone
    expected = "The process of rank 0 was killed or has crashed, or cannot be reached: it served"
    if known is not None or (server_rank == 0 and on_device and not was_late):
        assert (known or expected) in told.get(timeout=30)
        with pytest.raises(CallError, match=known or expected):
            end.raise_failure()
    else:
        watch._thread.join()
        assert told.empty() and end.failure is None
    watch.close("")


def test_a_failure_that_is_known_when_the_time_is_over_is_the_error() -> None:
    store = dist.HashStore()
    watch = watch_of(store)
    call = Call(group="rows", ranks=(0, 1), number=3, text="all_gather")
    assert "Rank 1 has waited 5 s in call 3" in str(watch.error_of_timeout(call, 5.0))
    watch.end.fail("Rank 0 has ended.", store)
    assert str(watch.error_of_timeout(call, 5.0)).startswith("Rank 0 has ended. This is rank 1")
