"""A rank alone in a collective, or in another one than the rest, is an error on every rank, which
says who is where.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import bmt_core
import bmt_params
from bmt_core.comm import all_gather_object
from bmt_core.comm.annotate import annotate
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.observer import ObserverContext
from bmt_core.errors import CallError
from bmt_core.run import collectives as distributed
from bmt_core.run import runtime
from bmt_testing import rank_pool, run_ranks
from bmt_testing.pool import serve_store
from bmt_watch import call_check, call_watch
from bmt_watch.call_log import (
    NOT_COMPARED,
    RECORDS,
    CallLog,
    RankCalls,
    Text,
    first_difference,
)
from bmt_watch.explanation import MAY_BE_FURTHER, Findings, StuckCalls, state_key
from bmt_watch.observer import CallObserver
from bmt_watch.rank_states import (
    Call,
    RankState,
    awaited_ranks,
    missing_ranks,
    ring_of_waits,
    waits,
)
from bmt_watch.run_end import RunEnd


@contextlib.contextmanager
def quick_watch() -> Iterator[None]:
    """Everything a tenth as long as it is, so that the tests are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_watch, "PERIOD", call_watch.PERIOD / 10)
        patch.setattr(call_watch, "LOOK_AFTER", call_watch.LOOK_AFTER / 10)
        patch.setattr(call_watch, "WARN_AFTER", call_watch.WARN_AFTER / 100)
        patch.setattr(call_check, "FIRST_CALLS", 5)
        yield


@contextlib.contextmanager
def standard_error() -> Iterator[list[str]]:
    """What this process and its libraries write to standard error, when the block has ended."""
    lines: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file


def observer() -> CallObserver:
    found = bmt_core.current().observer
    assert isinstance(found, CallObserver)
    return found


def context_of(
    store: dist.Store, rank: int = 1, world_size: int = 2, server_rank: int | None = None
) -> ObserverContext:
    return ObserverContext(
        rank=rank,
        world_size=world_size,
        store=store,
        server="node0",
        server_rank=server_rank,
        has_several_hosts=False,
        timeout=60,
        check_calls=None,
    )


def watch_of(
    store: dist.Store, rank: int = 1, world_size: int = 2, server_rank: int | None = None
) -> call_watch.CallWatch:
    context = context_of(store, rank, world_size, server_rank)
    return call_watch.CallWatch(context, store, CallLog(), RunEnd(context))


class Layer(bmt_params.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt_params.DistributedParameter(torch.ones(3, 4))


def different_sizes() -> None:
    part = torch.ones(10 + bmt_core.rank())
    bmt_core.current().world.all_gather(torch.ones(2 * part.numel()), part).wait()


def different_names() -> None:
    with annotate(f"for layer {bmt_core.rank()}"):
        distributed.all_reduce(torch.ones(3))


def a_weight_printed_on_one_rank() -> None:
    layer = Layer()
    if bmt_core.rank() == 0:
        str(layer.weight)
    distributed.all_reduce(torch.ones(3))


def different_groups() -> None:
    run = bmt_core.current()
    if bmt_core.rank() == 0:
        all_gather_object("alone", run.world)
    else:
        run.lanes.gather.group(run.world).all_reduce(torch.ones(3)).wait()


def a_rank_that_has_ended() -> None:
    if bmt_core.rank() == 0:
        try:
            raise ValueError("no luck")
        finally:
            bmt_core.shutdown()
    distributed.all_reduce(torch.ones(3))


def a_caught_error_that_another_call_follows() -> None:
    with contextlib.suppress(CallError):
        different_sizes()
    distributed.all_reduce(torch.ones(3))


def a_killed_rank() -> None:
    if bmt_core.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(torch.ones(3))


def failure_of(case: Callable[[], None]) -> str:
    """Return what ``case`` raises."""
    runtime.init_distributed(device="cpu", timeout=300)
    try:
        case()
    except (CallError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runtime.shutdown()
    return ""


def read_slowly(store: torch.distributed.Store) -> None:
    store.wait(["warned"])


def all_reduce_ones() -> None:
    assert distributed.all_reduce(torch.ones(3)).tolist() == [2.0] * 3


def meet_before_a_call_on_devices() -> None:
    group = observer().group("late", (0, 1))
    group.enter_on_device(("all_reduce",), torch.ones(1))


def warned_of_a_late_rank(call: Callable[[], None]) -> str:
    """Rank 1 makes the ``call`` when rank 0 has warned that it waits for it."""
    runtime.init_distributed(device="cpu", timeout=300)
    said: list[str] = []
    run = bmt_core.current()
    store = observer().store.clone()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store.set("warned", "")

    handler = Handler()
    call_watch.logger.addHandler(handler)
    if run.rank == 1:
        read_slowly(store)
    call()
    call_watch.logger.removeHandler(handler)
    runtime.shutdown()
    return " ".join(said)


def different_calls_on_devices() -> None:
    """What a backend for devices does; the operation itself is left out."""
    group = observer().group("devices", (0, 1))
    for number in range(call_check.FIRST_CALLS + 1):
        group.enter_on_device(("all_reduce", number), torch.ones(1))
    group = observer().group("others", (0, 1))
    for number in range(call_check.FIRST_CALLS + bmt_core.rank()):  # one more is not checked
        group.enter_on_device(("all_reduce", number), torch.ones(1))
    group = observer().group("last", (0, 1))
    group.enter_on_device(("all_reduce", bmt_core.rank()), torch.ones(1))


CASES = [
    different_calls_on_devices,
    different_sizes,
    different_names,
    a_weight_printed_on_one_rank,
    different_groups,
    a_rank_that_has_ended,
    a_caught_error_that_another_call_follows,
]


def all_cases() -> tuple[list[str], list[dict[str, str]], str]:
    with quick_watch():
        failures = {case.__name__: failure_of(case) for case in CASES}
        warning = warned_of_a_late_rank(all_reduce_ones)
        with standard_error() as noise:
            warned_of_a_late_rank(meet_before_a_call_on_devices)
        failures["what torch prints"] = "".join(noise)
        runtime.init_distributed(device="cpu")
        told = all_gather_object((warning, failures), bmt_core.current().world)
        runtime.shutdown()
        return [said for said, _ in told], [found for _, found in told], failure_of(a_killed_rank)


@pytest.mark.ranks(2)
def test_every_rank_raises_and_says_who_is_where() -> None:
    survivor, killed = rank_pool(2).outcomes(all_cases, init=None, timeout=600)
    assert killed.error_type == "Died"
    warnings, failures, of_killed = survivor.value
    assert [said.pop("what torch prints") for said in failures] == ["", ""]
    for rank, said in enumerate(failures):
        one, other = "all_gather torch.float32, 40 bytes", "all_gather torch.float32, 44 bytes"
        for name in ("different_sizes", "a_caught_error_that_another_call_follows"):
            assert said[name].startswith("CallError: Ranks have entered different calls: rank ")
            assert (
                one in said[name]
                and other in said[name]
                and "call 1 of group dp/main/0 (ranks 0, 1)" in said[name]
            )
        assert "for layer 0" in said["different_names"] and "for layer 1" in said["different_names"]
        printed = said["a_weight_printed_on_one_rank"]
        assert (
            "all_gather torch.float32, 24 bytes, for Layer.weight of shape (3, 4)" in printed
            and "all_reduce sum" in printed
        )
        on_devices = said["different_calls_on_devices"]
        assert (
            "call 1 of group last" in on_devices
            and "all_reduce 0" in on_devices
            and "all_reduce 1" in on_devices
        )
        in_ring = said["different_groups"]
        assert (
            "rank 0 is in call 1 of group dp/main/0 (ranks 0, 1): all_gather torch.uint8, 512"
            " bytes, which rank 1 has not"
        ) in in_ring
        assert (
            "rank 1 is in call 1 of group dp/gather/0 (ranks 0, 1): the first operation on the"
            " group, which"
        ) in in_ring
        ended = said["a_rank_that_has_ended"]
        assert ended.startswith(("ValueError: no luck", "CallError: Rank 0 has ")[rank])
        assert "ValueError: no luck" in ended
    assert warnings[1] == ""
    assert (
        "rank 0 has waited 0 s in call 1 of group dp/main/0 (ranks 0, 1): all_reduce sum"
        in warnings[0]
    )
    assert (
        "It waits for rank 1, which has entered no call yet.\nRank 1 is now here (most recent"
        " call last):\n"
    ) in warnings[0]
    line = 'store.wait(["warned"])'
    assert re.search(
        rf'File ".*test_call_check.py", line \d+, in read_slowly\n +{re.escape(line)}$', warnings[0]
    )
    assert (
        "CallError: The process of rank 1, which has entered no call before call 1 of group"
        in of_killed
    )


def more_calls_than_are_kept() -> float:
    """The root of a broadcast runs ahead by more calls than the store keeps."""
    group, total = bmt_core.current().world, 0.0
    for number in range(40):
        tensor = torch.full((2,), float(number))
        group.broadcast(tensor, 0).wait()
        total += float(tensor[0])
        if number % 16 == 15:
            group.all_reduce(tensor).wait()
    return total


def with_four_slots() -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_check, "_SLOTS", 4)
        runtime.init_distributed(device="cpu")
        return more_calls_than_are_kept()


def unchecked() -> bool:
    return not isinstance(bmt_core.current().observer, CallObserver)


def test_a_rank_may_be_ahead_by_more_calls_than_are_kept_and_the_check_can_be_off() -> None:
    assert rank_pool(2).run(with_four_slots, init=None) == [sum(range(40))] * 2
    assert rank_pool(2).run(unchecked, init={"check_calls": False}) == [True, True]


def section_that_rank_1_does_not_enter() -> None:
    group = bmt_core.current().world
    if group.rank == 1:
        raise ValueError("planted")
    with collective_section(group, "saving"):
        group.all_reduce(torch.ones(1)).wait()


def test_a_section_whose_call_fails_makes_no_other_call() -> None:
    outcome, _ = rank_pool(2).outcomes(section_that_rank_1_does_not_enter)
    assert outcome.traceback.count("Rank 1 has failed (ValueError: planted)") == 1, outcome
    assert "all_reduce" in outcome.error_message


def call(group: str, number: int) -> Call:
    return Call(group=group, ranks=(0, 1, 2), number=number, text="all_reduce")


def test_a_rank_that_computes_is_waited_for_and_a_ring_of_waits_is_found() -> None:
    states = {
        0: RankState(entered={"a": 1}, waiting=call("a", 1)),
        1: RankState(entered={"b": 1}, waiting=call("b", 1)),
        2: RankState(entered={"a": 1}),
    }
    assert sorted(ring_of_waits(waits(states, transfers=False))) == [0, 1]
    computing = {**states, 1: RankState(entered={"b": 1})}
    assert missing_ranks(call("a", 1), computing) == [1]
    assert ring_of_waits(waits(computing, transfers=True)) == []
    receive = Call(group="a receive from rank 0", ranks=(0,), number=0, text="a receive")
    receiving = {**states, 1: RankState(entered={"b": 1}, waiting=receive)}
    # What it waits for may be on its way.
    assert ring_of_waits(waits(receiving, transfers=False)) == []
    assert sorted(ring_of_waits(waits(receiving, transfers=True))) == [0, 1]
    assert awaited_ranks(call("a", 1), receiving) == {0: [1], 1: [0]}
    sending = Call(group="a send to rank 1", ranks=(1,), number=0, text="a send to rank 1")
    transfer = {**receiving, 0: RankState(waiting=sending)}
    assert ring_of_waits(waits(transfer, transfers=True)) == []


@pytest.mark.parametrize(("hosts", "name"), [("aab", "Rank 1 on a"), ("aaa", "Rank 1")])
def test_of_several_hosts_that_of_a_rank_that_has_ended_is_named(hosts: str, name: str) -> None:
    call = Call(group="a", ranks=(0, 1), number=1, text="all_reduce")
    ended = RankState(ended="boom", host=hosts[1])
    for waits_for_it, why in (
        (True, f"and rank 0 waits for it in {call}."),
        (False, "and others still wait for it."),
    ):
        waiting = RankState(
            entered={"a": 1}, waiting=call if waits_for_it else None, is_cut_off=True, host=hosts[0]
        )
        store = dist.HashStore()
        for rank, state in enumerate((waiting, ended, RankState(host=hosts[2]))):
            store.set(state_key(rank), state.to_json())
        found = StuckCalls(store, 3, longest_silence=60.0).look()
        assert found.failure == f"{name} has ended (boom), {why}"


@pytest.mark.parametrize(
    ("training_step", "when"), [(1, ""), (2, " after 1 step"), (9, " after 8 steps")]
)
def test_a_rank_that_has_ended_well_may_have_had_fewer_batches(
    training_step: int, when: str
) -> None:
    call = Call(group="a", ranks=(0, 1), number=1, text="all_reduce")
    store = dist.HashStore()
    ended = RankState(ended="", training_step=training_step)
    for rank, state in enumerate((RankState(entered={"a": 1}, waiting=call), ended)):
        store.set(state_key(rank), state.to_json())
    found = StuckCalls(store, 2, longest_silence=60.0).look()
    assert found.failure is not None and found.failure.startswith(
        f"Rank 1 has ended{when}, and rank 0 waits for it in {call}. If its loop had fewer batches,"
        " give every rank the same number of them, for example by DistributedSampler; else look for"
    )


def test_the_rank_is_named_for_which_others_wait_in_other_groups() -> None:
    first = Call(group="a", ranks=(0, 1), number=1, text="all_reduce")
    second = Call(group="b", ranks=(1, 2), number=1, text="all_gather")
    states = [
        RankState(entered={"a": 1}, waiting=first),
        RankState(entered={"b": 1}, waiting=second),
        RankState(stack="  in evaluate"),
    ]
    store = dist.HashStore()
    for rank, state in enumerate(states):
        store.set(state_key(rank), state.to_json())
    found = StuckCalls(store, 3, longest_silence=60.0).look()
    assert found.of(first) == (
        "It waits for rank 1, which is in call 1 of group b (ranks 1, 2): all_gather. Through"
        " others it waits for rank 2, which has entered no call yet.\nRank 2 is now here (most"
        " recent call last):\n  in evaluate"
    )
    assert found.of(second).startswith(
        "It waits for rank 2, which has entered no call yet.\nRank 2"
    )
    silent = StuckCalls(store, 3, longest_silence=0.0).look()
    assert "Nothing was heard of rank 2 for 0 s" in silent.of(first)
    receive = Call(
        group="a receive from rank 0", ranks=(0,), number=0, text="a receive from rank 0"
    )
    store.set(state_key(2), RankState(waiting=receive).to_json())
    in_ring = StuckCalls(store, 3, longest_silence=60.0).look().of(first)
    assert "Ranks wait for each other, if nothing is on its way: rank " in in_ring
    assert "rank 2 is in a receive from rank 0, and waits for rank 0" in in_ring
    assert (
        "rank 0 is in call 1 of group a (ranks 0, 1): all_reduce, which rank 1 has not entered"
    ) in in_ring


def test_ranks_of_one_call_are_not_said_to_wait_for_each_other_though_one_is_silent() -> None:
    first = Call(group="a", ranks=(0, 1), number=1, text="all_reduce")
    store = dist.HashStore()
    states = RankState(entered={"a": 1}, waiting=first), RankState(entered={"a": 1}, last=first)
    for rank, state in enumerate(states):
        store.set(state_key(rank), state.to_json())
    found = StuckCalls(store, 2, longest_silence=0.0).look().of(first)
    assert "It waits for rank 0, " in found and "; rank 1, whose last call was call 1" in found
    assert "Nothing was heard of rank 1" in found and "wait for each other" not in found
    assert found.endswith(f"or it is stopped. {MAY_BE_FURTHER}")
    lost = RankState(entered={"a": 1}, waiting=first, is_cut_off=True)
    store.set(state_key(0), lost.to_json())
    failure = StuckCalls(store, 2, longest_silence=0.0).look().failure
    assert failure is not None and failure.endswith(f"did not say that it leaves. {MAY_BE_FURTHER}")


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2)), min_size=3, max_size=3)
)
def test_no_ring_where_an_order_of_the_calls_exists(ranks: list[tuple[bool, int, int]]) -> None:
    """Ranks at any places of one order of calls, a1 b1 a2 b2 …, never seem stuck: the last of them
    goes on.
    """
    states = {}
    for rank, (is_waiting, first, second) in enumerate(ranks):
        made = [call(group, number) for number, group in itertools.product((1, 2), "ab")][
            : first + second
        ]
        entered = {group: sum(one.group == group for one in made) for group in "ab"}
        states[rank] = RankState(entered=entered, waiting=made[-1] if is_waiting and made else None)
    assert ring_of_waits(waits(states, transfers=True)) == []


def test_a_ring_that_another_rank_joins_in_the_same_call_is_a_new_one() -> None:
    store = dist.HashStore()
    found = StuckCalls(store, 3, longest_silence=60.0)
    computing = RankState()
    for first in (computing, RankState(entered={"a": 1}, waiting=call("a", 1))):
        states = [
            first,
            RankState(entered={"a": 1}, waiting=call("a", 1)),
            RankState(entered={"b": 1}, waiting=call("b", 1)),
        ]
        for rank, state in enumerate(states):
            store.set(state_key(rank), state.to_json())
        assert found.look().failure is None


def test_a_state_survives_the_way_through_the_store() -> None:
    state = RankState(
        beat=3,
        entered={"a": 1},
        last=call("a", 1),
        waiting=call("a", 1),
        stack="here",
        ended="",
        host="node1",
    )
    assert RankState.from_json(state.to_json()) == state


def meets(init_method: str, check_calls: bool | None) -> bool:
    """Whether a run that meets by ``init_method`` compares calls."""
    runtime.init_distributed(init_method, device="cpu", check_calls=check_calls)
    try:
        return isinstance(runtime.current().observer, CallObserver)
    finally:
        runtime.shutdown()


def test_a_file_in_which_ranks_meet_is_not_lengthened_by_every_call_unless_asked(
    tmp_path: Path,
) -> None:
    for check_calls, is_compared in ((None, False), (True, True)):
        init_method = f"file://{tmp_path}/store-{check_calls}"
        assert rank_pool(2).run(meets, init_method, check_calls, init=None) == [is_compared] * 2
    assert rank_pool(2).run(meets, "env://", None, init=None) == [True] * 2


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


def queue(log: CallLog, number: int, shown: str, compared: str | None = None) -> None:
    """Note a call of the first group as one on a GPU after the first ones."""
    text = Text.of(shown, shown if compared is None else compared, "")
    log.queued[0] = number, text
    log.add(0, number, text, NOT_COMPARED)


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


def test_a_failure_that_is_known_when_the_time_is_over_is_the_error() -> None:
    store = dist.HashStore()
    watch = watch_of(store)
    call = Call(group="rows", ranks=(0, 1), number=3, text="all_gather")
    assert "Rank 1 has waited 5 s in call 3" in str(watch.error_of_timeout(call, 5.0))
    watch.end.fail("Rank 0 has ended.", store)
    assert str(watch.error_of_timeout(call, 5.0)).startswith("Rank 0 has ended. This is rank 1")


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


A_SEND = Call(group="a send to rank 1", ranks=(1,), number=0, text="a send to rank 1")
CALL_FIVE = Call(group="rows", ranks=(0, 1), number=5, text="all_gather")


@pytest.mark.parametrize(
    ("waiter", "step", "call", "fails"),
    [
        (0, 3, A_SEND, True),
        (0, 4, A_SEND, False),
        (2, 3, A_SEND, False),
        (0, 3, CALL_FIVE, True),
        (0, 3, replace(CALL_FIVE, number=4), False),
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_who_waits_for_a_rank_that_has_given_up_ends_the_run(
    waiter: int, step: int, call: Call, on_device: bool, fails: bool
) -> None:
    """Rank 1 has given up in step 3 after call 4 of group rows, and goes on with rank 2. A rank of
    the next step waits for what will come, and so does rank 2.
    """
    store = dist.HashStore()
    looks = StuckCalls(store, 3, 10.0)
    waits: dict[str, Any] = {"on_device": (call,)} if on_device else {"waiting": call}
    found = []
    for beat in range(1, 6):
        states = [RankState(beat=beat, step=3) for _ in range(3)]
        states[1] = RankState(
            beat=beat, step=3, entered={"rows": 4}, given_up="planted", stays_with=(1, 2)
        )
        entered = {call.group: call.number}
        states[waiter] = RankState(beat=beat, step=step, entered=entered, **waits)
        for rank, state in enumerate(states):
            store.set(state_key(rank), state.to_json())
        found.append(looks.look().failure)
    assert found[:2] == [None, None]
    expected = f"Rank 1 has failed (planted), and rank 0 waits for it in {call}."
    assert set(found[2:]) == ({expected} if fails else {None})


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
