"""What ranks know of the last calls of one that is killed or stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bmt_core
from bmt_core.comm.annotate import NOWHERE, Passed
from bmt_testing import rank_pool
from bmt_watch.call_log import CallLog, GroupLog, first_difference
from bmt_watch.observer import CallObserver
from bmt_watch.rank_states import Call, RankState
from bmt_watch.silent_ranks import RecentCall, Shown, last_known


def call(number: int, place: str = "", group: str = "dp") -> Call:
    return Call(group=group, ranks=(0, 1), number=number, text="all_reduce", place=place)


FORWARDS: list[Passed] = [(f"in the forward of layers.{n}", 10.0 + n, (0, 1)) for n in range(9)]
LATER = ", or later somewhere from the forward of layers.3 to the forward of layers.8"


def known(
    made_by: list[tuple[int, ...]], passed: list[Passed] = FORWARDS, state: RankState | None = None
) -> RankState:
    """What another rank knows of rank 1, which has made calls every second, in layers of the same
    number.
    """
    calls = [
        RecentCall(call(n, f"in the forward of layers.{n}" if n else ""), 10.5 + n, ranks)
        for n, ranks in enumerate(made_by)
    ]
    return last_known(1, state or RankState(), [Shown(calls, passed)], 20.0)


def test_the_last_call_that_has_ended_and_the_next_one_are_those_of_a_silent_rank() -> None:
    found = known([(0, 1), (0, 1), (0,), (0,)])
    assert found.last == call(1) and found.following == call(2)
    assert found.entered == {"dp": 1} and found.seconds == 20.0 - 11.5
    assert found.place == f"in the forward of layers.1 or in the forward of layers.2{LATER}"


def test_a_rank_has_made_a_call_in_which_others_found_it_though_the_call_has_not_ended() -> None:
    found = known([(0, 1), (0, 1), (0,), (1,), (0,)])
    assert found.last == call(3) and found.following == call(4)


def test_places_that_a_rank_does_not_share_are_not_its_own() -> None:
    of_another_stage: list[Passed] = [(text, when, (0, 2)) for text, when, _ in FORWARDS]
    found = known([(0, 1), (0, 1), (0,)], of_another_stage)
    assert found.place == "" and found.last is not None and found.last.place == ""


def test_ranks_that_came_there_at_other_times_say_the_same_places() -> None:
    """Rank 0 is far ahead of rank 2, and each has a call with rank 1 of its own."""
    forward, backward = "in the forward of layers.1", "in the backward of layers.1"
    gather = RecentCall(call(5, "in the forward of layers.0", "rows"), 13.0, (1, 2))
    reduction = RecentCall(call(2, backward, "columns"), 13.2, (0,))
    before = RecentCall(call(1, backward, "columns"), 1.0, (0, 1))
    of_rank_0: list[Passed] = [
        ("in the forward of layers.0", 10.0, (0, 1)),
        (forward, 10.5, (0, 1)),
        (backward, 11.0, (0, 1)),
    ]
    of_rank_2: list[Passed] = [
        ("in the forward of layers.0", 12.5, (1, 2)),
        (forward, 13.5, (1, 2)),
    ]
    of_rank_2.append((backward, 14.0, (1, 2)))
    shown = [Shown([before, reduction], of_rank_0), Shown([gather], of_rank_2)]
    for known_by in (shown, shown[::-1]):
        found = last_known(1, RankState(), known_by, 20.0)
        assert found.last == gather.call and found.following == reduction.call
        assert found.place == f"in the forward of layers.0 or {forward} or {backward}"


def test_a_rank_may_have_made_the_next_calls_too_if_nobody_waits_for_them_at_once() -> None:
    places = [f"in the backward of layers.{n}" for n in (4, 3, 2, 1)]
    passed: list[Passed] = [(place, 10.0 + n, (0, 1)) for n, place in enumerate(places)]
    calls = [RecentCall(call(n + 1, place), 10.5 + n, (0,)) for n, place in enumerate(places)]
    calls[0] = calls[0]._replace(made_by=(0, 1))
    found = last_known(1, RankState(), [Shown(calls, passed)], 20.0)
    assert found.following == calls[1].call
    assert found.place == f"{' or '.join(places[:2])}, or later {' or '.join(places[2:])}"


def test_a_host_whose_clock_is_ahead_tells_its_newest_places_too() -> None:
    calls = [RecentCall(call(1, "in the forward of layers.0"), 10.5, (0, 1))]
    found = last_known(1, RankState(), [Shown(calls, FORWARDS[:2])], 10.7)
    assert found.place == "in the forward of layers.0 or in the forward of layers.1"


def test_a_rank_may_have_made_the_next_call_if_it_came_to_no_place_before() -> None:
    calls = RecentCall(call(1), 10.5, (0, 1)), RecentCall(call(2), 11.5, (0,))
    later: list[Passed] = [("in the forward of layers.2", 12.0, (0, 1))]
    found = last_known(1, RankState(), [Shown(calls, later)], 20.0)
    assert found.following == call(2) and found.place == "in the forward of layers.2"


def test_of_many_places_the_first_and_the_last_are_named() -> None:
    many: list[Passed] = [
        (f"in the forward of layers.{n}", 11.6 + n / 10, (0, 1)) for n in range(9)
    ]
    found = known([(0, 1), (0, 1), (0,)], many)
    assert found.place == "somewhere from the forward of layers.1 to the forward of layers.8"


def test_a_rank_may_have_gone_on_from_the_place_that_it_has_written() -> None:
    state = RankState(entered={"dp": 1}, last=call(1), place="in the forward of layers.1")
    found = known([(0, 1), (0, 1), (0,)], state=state)
    assert found.following == call(2)
    assert found.place == f"{state.place} or in the forward of layers.2{LATER}"
    elsewhere = replace(state, place="in the backward of layers.1")
    assert known([(0, 1), (0, 1), (0,)], state=elsewhere).place == elsewhere.place


def test_a_rank_may_have_left_the_place_of_its_last_call_since_it_has_written() -> None:
    place = "in the forward of layers.1"
    state = RankState(entered={"dp": 1}, last=call(1, place), place=place)
    found = known([(0, 1), (0, 1), (0,)], state=state)
    assert found.place == f"{place} or in the forward of layers.2{LATER}"
    later = replace(state, place="in the forward of layers.2")
    assert known([(0, 1), (0, 1), (0,)], state=later).place == f"{later.place}{LATER}"
    outside = replace(state, place="")
    assert known([(0, 1), (0, 1), (0,)], state=outside).place == ""
    outside = RankState(entered={"dp": 1}, last=call(1))
    assert known([(0, 1), (0, 1), (0,)], state=outside).place == ""
    waits = replace(state, waiting=call(1, place))
    assert known([(0, 1), (0, 1), (0,)], state=waits).place == place
    further = replace(state, entered={"dp": 2}, last=call(2, place))
    assert known([(0, 1), (0, 1), (0,)], state=further).place == place


class UnderWay:
    def is_completed(self) -> bool:
        return False


def test_calls_under_way_are_shown_as_made_by_whom_they_are_known_to_be() -> None:
    log, place = CallLog(), "in the backward of layers.0"
    log.groups.append(calls := GroupLog("dp", (0, 1)))
    for number, first in ((1, 0), (2, 1), (3, -1)):
        calls.add((number, call(number, place), 0, ("", ""), NOWHERE, 1, float(number), first))
    calls.under_way.append((call(2), UnderWay()))
    log.waiting = call(3), 0.0
    shown = Shown.from_json(log.recent(FORWARDS))
    assert [each.made_by for each in shown.calls] == [[0, 1], [1], [-1]]
    assert [each.call.place for each in shown.calls] == [place] * 3
    assert [text for text, _, _ in shown.passed] == [text for text, _, _ in FORWARDS]


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
    shown = Shown.from_json(run.observer.log.recent([]))
    return [each.call.number for each in shown.calls if 1 not in each.made_by]


@pytest.mark.ranks(2)
def test_a_call_that_failed_before_another_one_began_was_not_made_by_all() -> None:
    survivor, _ = rank_pool(2).outcomes(calls_that_a_killed_rank_has_not_made)
    assert survivor.value == [2, 3]


def test_a_queued_call_of_a_gpu_is_shown_with_the_place_where_it_was_made() -> None:
    place = SimpleNamespace(text="in the backward of layers.1")
    logs = [CallLog() for _ in range(2)]
    for size, log in enumerate(logs):
        log.groups.append(group := GroupLog("dp", (0, 1)))
        group.add((1, ("all_gather",), size, ("", ""), place, 1, 1.0, None))
    last = logs[0].groups[0].last_on_device()
    assert last is not None and last.place == "in the backward of layers.1"
    difference = first_difference({rank: log.to_bytes() for rank, log in enumerate(logs)})
    assert difference.count(" bytes, made in the backward of layers.1") == 2
