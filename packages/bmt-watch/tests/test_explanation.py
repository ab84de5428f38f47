"""Who is named as the reason why calls do not end, from what ranks have written of themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from bmt_watch.explanation import MAY_BE_FURTHER, StuckCalls, state_key
from bmt_watch.rank_states import (
    Call,
    RankState,
    awaited_ranks,
    missing_ranks,
    ring_of_waits,
    waits,
)


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
