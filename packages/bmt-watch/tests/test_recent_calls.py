"""What ranks know of the last calls of one that is killed or stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch

import bmt_core
from bmt_testing import rank_pool
from bmt_watch.call_log import (
    NOT_COMPARED,
    CallLog,
    LoggedCall,
    RankCalls,
    Text,
    first_difference,
)
from bmt_watch.explanation import last_known
from bmt_watch.observer import CallObserver
from bmt_watch.rank_states import Call, RankState


def call(number: int, place: str = "", group: str = "dp") -> Call:
    return Call(group=group, ranks=(0, 1), number=number, text="all_reduce", place=place)


def logged(call: Call, time: float, made_by: tuple[int, ...]) -> LoggedCall:
    return LoggedCall(call, call.text, time, 1, made_by)


def known(made_by: list[tuple[int, ...]], state: RankState | None = None) -> RankState:
    """What another rank knows of rank 1, which has made calls every second, in layers of the same
    number.
    """
    calls = [
        logged(call(n, f"in the forward of layers.{n}" if n else ""), 10.5 + n, ranks)
        for n, ranks in enumerate(made_by)
    ]
    return last_known(1, state or RankState(), [calls], 20.0)


def test_the_last_call_that_has_ended_and_the_next_one_are_those_of_a_silent_rank() -> None:
    found = known([(0, 1), (0, 1), (0,), (0,)], RankState(place="in the forward of layers.0"))
    assert found.last == call(1) and found.following == call(2)
    assert found.entered == {"dp": 1} and found.seconds == 20.0 - 11.5
    assert found.last.place == "in the forward of layers.1" and found.place == ""


def test_a_rank_has_made_a_call_in_which_others_found_it_though_the_call_has_not_ended() -> None:
    found = known([(0, 1), (0, 1), (0,), (1,), (0,)])
    assert found.last == call(3) and found.following == call(4)


def test_the_latest_call_that_others_know_of_is_the_last_one() -> None:
    """Rank 0 is far ahead of rank 2, and each has a call with rank 1 of its own."""
    gather = logged(call(5, "in the forward of layers.0", "rows"), 13.0, (1, 2))
    reduction = logged(call(2, "in the backward of layers.1", "columns"), 13.2, (0,))
    before = logged(call(1, "in the backward of layers.1", "columns"), 1.0, (0, 1))
    shown = [[before, reduction], [gather]]
    for known_by in (shown, shown[::-1]):
        found = last_known(1, RankState(), known_by, 20.0)
        assert found.last == gather.call and found.following == reduction.call


def test_what_a_rank_has_written_itself_stays_if_others_know_no_later_call() -> None:
    place = "in the forward of layers.1"
    state = RankState(entered={"dp": 1}, last=call(1, place), waiting=call(1, place), place=place)
    found = known([(0, 1), (0, 1), (0,)], state)
    assert found == replace(state, following=call(2))


class UnderWay:
    def is_completed(self) -> bool:
        return False


def test_calls_under_way_are_shown_as_made_by_whom_they_are_known_to_be() -> None:
    log, place = CallLog(), "in the backward of layers.0"
    group, work = log.add_group("dp", (0, 1)), UnderWay()
    text = Text.of("all_reduce", "all_reduce", place)
    for number, first in ((1, 0), (2, 1), (3, -1), (4, NOT_COMPARED)):
        log.add(group, number, text, first)
    log.under_way[2] = ref(work)
    under_way = log.calls_under_way()
    log.write_state(RankState(waiting=replace(call(3), record=3), under_way=under_way, record=4))
    shown = RankCalls(log.to_bytes()).calls
    assert [each.made_by for each in shown] == [(0, 1), [1], [-1], None]
    assert [each.call.place for each in shown] == [place] * 4
    assert last_known(1, RankState(), [shown], 0.0).last == shown[1].call


def calls_that_a_killed_rank_has_not_made() -> list[int]:
    """Return the numbers of calls that rank 0 makes and that rank 1, as far as it knows, does not;
    the first of them has failed before the second begins.
    """
    run = bmt_core.current()
    run.world.all_reduce(torch.ones(1)).wait()
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failed: Any = run.world.all_reduce(torch.ones(1))
    with contextlib.suppress(RuntimeError):
        failed._work.wait()  # without the watch, after whose failure no call is made
    run.world.all_reduce(torch.ones(1))
    assert isinstance(run.observer, CallObserver)
    log = run.observer.log
    log.write_state(RankState(under_way=log.calls_under_way(), record=log.serial))
    shown = RankCalls(log.to_bytes()).calls
    return [each.call.number for each in shown if each.made_by and 1 not in each.made_by]


@pytest.mark.slow("bmt-watch", "bmt-core")
@pytest.mark.ranks(2)
def test_a_call_that_failed_before_another_one_began_was_not_made_by_all() -> None:
    survivor, _ = rank_pool(2).outcomes(calls_that_a_killed_rank_has_not_made)
    assert survivor.value == [2, 3]


def test_a_queued_call_of_a_gpu_is_shown_with_the_place_where_it_was_made() -> None:
    place = "in the backward of layers.1"
    logs = [CallLog(rank=rank) for rank in range(2)]
    for size, log in enumerate(logs):
        group, text = log.add_group("dp", (0, 1)), f"all_gather, {size} bytes"
        log.queued[group] = 1, Text.of(text, text, place)
        log.add(group, *log.queued[group], NOT_COMPARED)
    (last,) = logs[0].last_on_device()
    assert last.place == place and last.number == 1
    difference = first_difference(RankCalls(log.to_bytes()) for log in logs)
    assert difference.count(" bytes, made in the backward of layers.1") == 2
