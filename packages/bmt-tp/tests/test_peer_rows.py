"""Where the counters of peer_rows.py are. Copies between devices are tested on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from bmt_tp import peer_rows
from bmt_tp.peer_rows import INBOXES
from bmt_tp.peers import PeerCounters, new_counters_file


@pytest.fixture
def path() -> Any:
    made = new_counters_file(PeerCounters.count(8, peer_rows._Counters.count(8)))
    yield made
    made.unlink()


@pytest.mark.parametrize("size", range(2, 9))
def test_every_counter_has_a_place_of_its_own(path: Any, size: int) -> None:
    count = peer_rows._Counters.count(size)
    made = peer_rows._Counters(PeerCounters(path, size, count), size)
    ranks = range(size)
    found = [made.free_index(a, i) for a in ranks for i in range(INBOXES)]
    found += [made.full_index(a, b, i) for a in ranks for b in ranks for i in range(INBOXES)]
    assert sorted(found) == list(range(made.shared.first, made.shared.first + count))
    assert made.free(1, 2) == made.shared.address(made.free_index(1, 2))
