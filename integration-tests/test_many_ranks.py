"""What a run costs the rendezvous store grows with the number of ranks, not with its square; a rank
that cannot start, or does not come, is named on all of them.
"""

from __future__ import annotations

import time

import pytest
from many_ranks import (
    MemoryStore,
    cost_of_a_checked_call,
    cost_of_start,
    cost_of_watching,
    watch_of,
)

from bmt_core.comm import call_watch
from bmt_core.comm.rank_states import Call


@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_a_start_takes_so_many_requests_of_each_rank_and_reads_so_many_keys(ranks: int) -> None:
    cost = cost_of_start(ranks, latency=0.0)
    assert not cost.texts
    # Three sections, of five requests at most; plugins and settings; two questions about hosts.
    assert cost.requests <= 25 * ranks
    assert cost.keys <= 25 * ranks


@pytest.mark.parametrize("fails", [0, 11, 15])
def test_a_rank_that_cannot_start_is_named_on_all(fails: int) -> None:
    texts = cost_of_start(16, latency=0.0, fails=fails).texts
    assert texts.pop(fails) == "cannot start"
    assert set(texts.values()) == {f"Rank {fails} failed to start: ValueError: cannot start"}
    assert len(texts) == 15


@pytest.mark.parametrize("ranks", [2, 64])
def test_a_checked_call_takes_four_requests_of_each_rank(ranks: int) -> None:
    cost = cost_of_a_checked_call(ranks, latency=0.0)
    assert not cost.texts
    assert cost.requests <= 4 * ranks + 2  # two more forget the call before


@pytest.mark.parametrize("ranks", [8, 600])
def test_ranks_that_wait_leave_the_store_room_and_name_the_one_that_is_missing(ranks: int) -> None:
    cost = cost_of_watching(ranks)
    assert cost.requests_in_training <= 2 * min(ranks, 400) + 1
    assert cost.requests <= 4 * min(ranks, 400) + 3 <= 2000
    assert cost.keys <= 5 * min(ranks, 400)
    assert len(cost.texts) == ranks - 1
    for rank, text in enumerate(cost.texts):
        assert text.startswith(f"Rank {rank} has waited 10 s in call 7 of group dp/main/0 (ranks 0")
        assert f"It waits for rank {ranks - 1}, which has entered no call yet." in text


def test_when_rank_0_has_stopped_the_next_rank_looks_and_the_others_hear_of_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_watch, "PERIOD", 0.01)
        store = MemoryStore(latency=0.0)
        watches = [watch_of(store, rank, ranks=3) for rank in range(3)]
        call = Call(group="dp/main/0", ranks=(0, 1, 2), number=1, text="all_gather, 16 bytes")
        for watch in watches[1:]:
            watch.entered["dp/main/0"], watch.last = 1, call
            watch.waiting = call, time.monotonic() - call_watch.LOOK_AFTER
        end = time.monotonic() + 30
        texts = [""]
        while not all("waits for rank 0," in text for text in texts) and time.monotonic() < end:
            assert all(watch.tick() for watch in watches[1:])  # that of rank 0 has ended
            texts = [str(watch.error_of_timeout(call, 10.0)) for watch in watches[1:]]
        assert all("It waits for rank 0, which has entered no call yet." in text for text in texts)
