"""What a run costs the rendezvous store grows with the number of ranks, not with its square; a rank
that cannot start, or does not come, is named on all of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from math import log2
from pathlib import Path
from typing import Any
from unittest import mock

import many_ranks
import pytest
import torch
import torch.distributed as dist
from many_ranks import (
    CALLS_OF_A_SAVE,
    MemoryStore,
    cost_of_a_group,
    cost_of_a_missing_rank,
    cost_of_checked_calls,
    cost_of_compared_calls,
    cost_of_connecting,
    cost_of_start,
    cost_of_watching,
    let_wait,
    on_all_ranks,
    requests_of_monitors,
    watch_of,
)

import bmt_checkpoint
import bmtrain as bmt
from bmt_core.comm.gloo_addresses import GlooAddresses
from bmt_core.comm.torch_backend import limited_checks_of_nccl
from bmt_testing import run_ranks
from bmt_watch import call_watch
from bmt_watch.call_check import GroupCalls, first_calls_of
from bmt_watch.call_watch import period_of
from bmt_watch.rank_states import Call

SLOW = pytest.mark.slow("bmt-core", "bmt-watch")


@pytest.mark.parametrize("ranks", [2, 16, pytest.param(64, marks=SLOW)])
def test_a_start_takes_so_many_requests_of_each_rank_and_reads_so_many_keys(ranks: int) -> None:
    cost = cost_of_start(ranks, latency=0.0)
    assert not cost.texts
    # One tells which process it is, one where gloo listens for torch's own group. Four sections of
    # three each, and the exchange of gloo's addresses, as much as a section. In each rank 0 waits
    # for all reports, reads them, which is two, and writes its verdict.
    assert cost.requests <= 17 * ranks + 9
    assert cost.most_of_others <= 17
    assert cost.most <= 26
    assert cost.keys <= 25 * ranks


def test_a_store_with_a_rate_answers_one_request_after_another() -> None:
    cost = cost_of_start(8, latency=0.0, rate=500)
    assert not cost.texts
    assert cost.seconds >= cost.requests / 500 > 0.2


@pytest.mark.parametrize("ranks", [16, pytest.param(64, marks=SLOW), pytest.param(256, marks=SLOW)])
def test_a_missing_rank_is_found_in_few_requests_and_named(ranks: int) -> None:
    cost = cost_of_a_missing_rank(ranks, absent=11, timeout=2.0)
    assert set(cost.texts) == {*range(ranks)} - {11}
    for text in cost.texts.values():
        assert text.startswith("After 2 s these ranks have not started: 11.")
    assert cost.most <= 5 + 2 * log2(ranks)


@pytest.mark.parametrize("fails", [0, 11, 15])
def test_a_rank_that_cannot_start_is_named_on_all(fails: int) -> None:
    texts = cost_of_start(16, latency=0.0, fails=fails).texts
    assert texts.pop(fails) == "cannot start"
    assert set(texts.values()) == {f"Rank {fails} failed to start: ValueError: cannot start"}
    assert len(texts) == 15


@pytest.fixture
def quick_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_watch, "PERIOD", call_watch.PERIOD / 10)
    monkeypatch.setattr(call_watch, "LOOK_AFTER", call_watch.LOOK_AFTER / 10)


@pytest.mark.parametrize("ranks", [2, 64])
def test_a_checked_call_takes_two_requests_of_each_rank(ranks: int) -> None:
    cost = cost_of_checked_calls(ranks, latency=0.0, calls=3)
    assert not cost.texts
    # The first one also compares texts, and the last one forgets the call before, with two.
    assert cost.requests <= 3 * (2 * ranks + 3)
    assert cost.most <= 3 * 5


def test_a_compared_call_takes_one_request_of_each_rank() -> None:
    cost = cost_of_compared_calls(64, latency=0.0)
    assert not cost.texts
    assert (cost.requests, cost.most) == (64 * CALLS_OF_A_SAVE, CALLS_OF_A_SAVE)


@pytest.mark.parametrize("ranks", [2, 64])
def test_connecting_a_group_takes_five_requests_of_each_member(ranks: int) -> None:
    cost = cost_of_connecting(ranks, latency=0.0)
    assert not cost.texts
    assert cost.requests <= 5 * ranks + 4
    # To meet takes at most four: the last member tells the others, and forgets the meeting before.
    # To learn the addresses takes three, and four of rank 0, which joins them.
    assert cost.most_of_others <= 4 + 3
    assert cost.most <= 4 + 4


@pytest.mark.parametrize("ranks", [2, 5, 24])
def test_gloo_connects_with_three_requests_of_each_member(ranks: int) -> None:
    store: Any = MemoryStore(latency=0.0)
    sums: dict[int, list[float]] = {}

    def part(rank: int) -> None:
        addresses = GlooAddresses(store, "dp/main/0", rank=rank, size=ranks)
        ones = torch.ones(3)
        for name in ("first", "second"):  # as with TORCH_DISTRIBUTED_DEBUG=DETAIL
            own = dist.PrefixStore(name, addresses)
            engine: Any = dist.ProcessGroupGloo(own, rank, ranks, timedelta(seconds=60))
            engine.allreduce([ones]).wait()
        sums[rank] = ones.tolist()

    cost = on_all_ranks(store, ranks, part)
    assert not cost.texts
    assert sums == dict.fromkeys(range(ranks), [float(ranks**2)] * 3)
    assert cost.most_of_others <= 2 * 3 and cost.most <= 2 * 4


def test_gloo_does_not_connect_without_a_member() -> None:
    store: Any = MemoryStore(latency=0.0)

    def part(rank: int) -> None:
        if rank == 1:
            raise ValueError("does not come")
        addresses = GlooAddresses(store, "dp/main/0", rank=rank, size=3)
        dist.ProcessGroupGloo(addresses, rank, 3, timedelta(seconds=60))

    with mock.patch.object(many_ranks, "TIMEOUT", 0.5):
        texts = on_all_ranks(store, 3, part).texts
    assert texts[1] == "does not come"
    assert "did not come" in texts[0] and "did not come" in texts[2]


@pytest.mark.parametrize("ranks", [8, 64, 256, 1024, 16384])
def test_the_first_calls_of_a_group_take_a_slow_store_some_ten_seconds(ranks: int) -> None:
    requests = first_calls_of(ranks) * (2 * ranks + 3)
    beside = 2 * ranks / period_of(ranks) + requests_of_monitors(ranks)
    assert first_calls_of(ranks) >= 1
    assert requests / (2000 - beside) < 10.5 or ranks > 6400


@pytest.mark.parametrize("others", [{0}, {5}, {3, 6}, {1, 2, 3, 4, 5, 6, 7}])
def test_calls_whose_digests_differ_are_shown_by_all_ranks(
    quick_watches: None, others: set[int]
) -> None:
    def enter(group: GroupCalls, rank: int) -> None:
        group.enter_on_device(("all_gather",), torch.ones(4))
        group.enter_on_device(("broadcast" if rank in others else "all_reduce",), torch.ones(4))

    cost = cost_of_a_group(8, enter)
    assert set(cost.texts) == {*range(8)}
    for text in cost.texts.values():
        assert text.startswith("Ranks have entered different calls: rank ")
        assert "call 2 of" in text and "all_reduce, 16 bytes" in text and "broadcast, 16" in text


@pytest.mark.parametrize("waits", [0.0, 0.2])
def test_calls_of_gpus_are_compared_with_those_of_cpus(quick_watches: None, waits: float) -> None:
    def enter(group: GroupCalls, rank: int) -> None:
        if rank == 1:
            time.sleep(waits)
            group.enter(("all_reduce",), torch.ones(4))
        else:
            group.enter_on_device(("all_gather",), torch.ones(4))

    texts = cost_of_a_group(4, enter).texts
    assert {*texts} >= {0, 2, 3}  # rank 1 raises where it waits for its call, if it was the first
    assert all("all_reduce, 16" in text and "all_gather, 16" in text for text in texts.values())


def test_texts_are_compared_after_calls_of_which_digests_were(quick_watches: None) -> None:
    def enter(group: GroupCalls, rank: int) -> None:
        for _ in range(100):
            group.enter_on_device(("all_gather",), torch.ones(4))
        for _ in range(199):
            group.enter(("all_gather",), torch.ones(4))
        group.enter(("all_gather", rank), torch.ones(4))  # where the text of call 44 was

    texts = cost_of_a_group(4, enter).texts
    assert len(texts) >= 3  # the first one goes on
    assert all("call 300 of group dp/main/0" in text for text in texts.values())


@pytest.mark.parametrize("connects", [True, False])
@pytest.mark.parametrize("knows", [True, False])
def test_a_meeting_ends_when_a_rank_has_failed(
    quick_watches: None, monkeypatch: pytest.MonkeyPatch, connects: bool, knows: bool
) -> None:
    if not knows:
        monkeypatch.setattr(call_watch, "_BEFORE_A_MEETING_ENDS", 0.0)

    def use(group: GroupCalls, rank: int) -> None:
        if rank == 2:
            group.end.fail_because_of("ValueError: no luck", group._store)
        elif connects:
            group.connect()
        else:
            group.enter_on_device(("all_gather",), torch.ones(4))

    texts = cost_of_a_group(8, use).texts
    assert {*texts} == {*range(8)} - {2}
    for text in texts.values():
        assert text.startswith("Rank 2 has failed (ValueError: no luck).")


class Net(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.linspace(-1, 1, 35).view(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def requests_of_saves(folder: str, non_blocking: bool) -> list[int]:
    """Return how many requests this rank makes in each of three saves, with the wait for one that
    does not block, and without those of its watch, which it makes at all times.
    """
    model = Net()
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3))
    manager.backward(model(torch.ones(2, 5)).sum())
    manager.step()
    requests: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., object]:
        request = getattr(dist.Store, name)

        def count(*arguments: object, **options: object) -> object:
            if threading.current_thread().name != "bmt-call-watch":
                requests[name] += 1
            return request(*arguments, **options)

        return count

    found = []
    with ExitStack() as stack:
        for name in ("set", "get", "multi_get", "wait", "check", "compare_set", "add"):
            stack.enter_context(mock.patch.object(dist.Store, name, counted(name)))
        for step in range(4):
            requests.clear()
            bmt_checkpoint.save_checkpoint(
                folder, model, manager, step=step, non_blocking=non_blocking
            )
            if non_blocking:
                bmt_checkpoint.wait_for_saves()
            if step > 0 or not non_blocking:  # the first that does not block connects a group
                assert set(requests) == {"compare_set"}  # the comparison of calls
                found.append(requests.total())
    return found[-3:]


@pytest.mark.parametrize(("non_blocking", "requests"), [(False, CALLS_OF_A_SAVE), (True, 8)])
def test_a_save_takes_as_many_requests_of_each_rank_however_many_there_are(
    tmp_path: Path, non_blocking: bool, requests: int
) -> None:
    for ranks in (2, 4):
        found = run_ranks(requests_of_saves, ranks, str(tmp_path / str(ranks)), non_blocking)
        assert found == [[requests] * 3] * ranks


@pytest.mark.parametrize("ranks", [8, pytest.param(600, marks=SLOW)])
def test_ranks_that_wait_leave_the_store_room_and_name_the_one_that_is_missing(ranks: int) -> None:
    cost = cost_of_watching(ranks)
    assert cost.requests_in_training <= 2 * min(ranks, 350) + 1 + cost.of_monitors
    assert cost.requests <= 5 * min(ranks, 350) + 1 + cost.of_monitors
    assert cost.requests <= 2000
    assert cost.keys <= 6 * min(ranks, 350)
    assert len(cost.texts) == ranks - 1
    for rank, text in enumerate(cost.texts):
        assert text.startswith(f"Rank {rank} has waited 10 s in call 7 of group dp/main/0 (ranks 0")
        assert f"It waits for rank {ranks - 1}, which has entered no call yet." in text


@pytest.mark.parametrize(
    ("ranks", "asked", "milliseconds"),
    [(8, None, 1000), (100, None, 1000), (1024, None, 10240), (1024, 500, 500)],
)
def test_monitors_of_nccl_ask_the_store_100_times_a_second_unless_the_user_wants_otherwise(
    monkeypatch: pytest.MonkeyPatch, ranks: int, asked: int | None, milliseconds: int
) -> None:
    name = "TORCH_NCCL_COORD_CHECK_MILSEC"
    monkeypatch.setenv(name, str(asked))  # so that the end of the test restores it
    if asked is None:
        monkeypatch.delenv(name)
    for number in (8, ranks):  # a second run in the process may be larger
        with limited_checks_of_nccl(number):
            found = os.environ[name]
        assert os.environ.get(name) == (None if asked is None else str(asked))
    assert found == str(milliseconds)
    expected = 2048 if asked else min(ranks, 100)
    assert requests_of_monitors(ranks) == expected


def test_when_rank_0_has_stopped_the_next_rank_looks_and_the_others_hear_of_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_watch, "PERIOD", 0.01)
        store = MemoryStore(latency=0.0)
        watches = [watch_of(store, rank, ranks=3) for rank in range(3)]
        call = Call(group="dp/main/0", ranks=(0, 1, 2), number=1, text="all_gather, 16 bytes")
        for watch in watches[1:]:
            let_wait(watch, call, time.monotonic() - call_watch.LOOK_AFTER)
        end = time.monotonic() + 30
        texts = [""]
        while not all("waits for rank 0," in text for text in texts) and time.monotonic() < end:
            assert all(watch.tick() for watch in watches[1:])  # that of rank 0 has ended
            texts = [str(watch.error_of_timeout(call, 10.0)) for watch in watches[1:]]
        assert all("It waits for rank 0, which has entered no call yet." in text for text in texts)
