"""The counters of peer_rows.py, and what its thread says of them. Copies between devices are tested
on GPUs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import CallError
from bmt_core.ops import PeerLink
from bmt_core.run.runtime import Runtime
from bmt_tp import peer_rows
from bmt_tp.peer_rows import INBOXES
from bmt_tp.shared_counters import WRAP, SharedCounters, new_counters_file

TIMEOUT = 60.0


class HostLink:
    """Where host and device see memory at one address."""

    def mapped(self, address: int, bytes: int) -> int:
        return address

    def unmap(self, address: int) -> None: ...


def counters(path: Path, size: int = 2) -> peer_rows._Counters:
    return peer_rows._Counters(path, size, cast(PeerLink, HostLink()))


@pytest.fixture
def path() -> Any:
    made = new_counters_file(peer_rows._Counters.count(8))
    yield made
    made.unlink()


def test_processes_see_the_same_counters_which_wrap(path: Path) -> None:
    one, other = SharedCounters(path, 5), SharedCounters(path, 5)
    one[0], one[4] = WRAP + 3, 7
    assert other.values() == one.values() == [2, 0, 0, 0, 7]
    assert other[4] == 7


@pytest.mark.parametrize("size", range(2, 9))
def test_every_counter_has_a_place_of_its_own(path: Path, size: int) -> None:
    made = counters(path, size)
    ranks = range(size)
    device = [made.free(a, i) for a in ranks for i in range(INBOXES)]
    device += [made.full(a, b, i) for a in ranks for b in ranks for i in range(INBOXES)]
    host = [made.shared.address(made.left(rank)) for rank in ranks] + [
        made.shared.address(made.failed)
    ]
    assert len({*device, *host}) == len(device) + len(host) == made.count(size)
    assert made.free(1, 2) == made.shared.address(made.free_index(1, 2))


def watch(
    made: peer_rows._Counters, expected: list[list[int]], calls: Any = None
) -> peer_rows._Watch:
    """Return the watch of rank 0 of two, whose thread has ended: the test calls what it does."""
    settings = SimpleNamespace(timeout=TIMEOUT)
    runtime = cast(Runtime, SimpleNamespace(calls=calls, settings=settings))
    found = peer_rows._Watch(runtime, made, LazyGroup((4, 5), 0, lambda: SingleGroup(0)), expected)
    found.leave()
    made.shared[made.left(0)] = 0
    return found


def test_transfers_fail_when_nothing_moves_for_the_timeout_or_the_other_rank_has_left(
    path: Path,
) -> None:
    made, expected = counters(path), [[0, 0] for _ in range(INBOXES)]
    found = watch(made, expected)
    assert not found._is_missing()
    expected[2][1] = 1
    assert found._is_missing()
    assert found._reason(TIMEOUT - 1) == ""
    assert "Rank 4 has waited 60 s for rows of the tensor-parallel ranks (4, 5)." in found._reason(
        TIMEOUT + 1
    )
    made.shared[made.left(1)] = 1
    assert found._reason(1) == ""
    assert "Rank 5 has ended its run" in found._reason(TIMEOUT - 1)
    made.shared[made.full_index(0, 1, 2)] = 1
    assert not found._is_missing()
    assert found._has_moved()
    assert not found._has_moved()
    made.shared[made.full_index(0, 1, 2)] = 2  # the other rank is ahead
    assert not found._is_missing()
    # The counter begins again at 0.
    expected[2][1], made.shared[made.full_index(0, 1, 2)] = WRAP + 2, WRAP
    assert found._is_missing()


def test_a_rank_that_leaves_waits_as_long_as_something_moves(path: Path) -> None:
    found = watch(counters(path), [[0, 1]])
    found.shorten_timeout()
    assert found._reason(1) == ""
    assert "Rank 4 has ended its run" in found._reason(TIMEOUT - 1)


def test_a_failure_lifts_all_counters_and_is_raised_on_every_rank(path: Path) -> None:
    one, other = watch(counters(path), [[0, 1]]), watch(counters(path), [[0, 1]])
    shared = counters(path).shared
    shared[4] = 7
    assert one._has_moved()
    assert other._has_moved()
    one._failure = one._reason(TIMEOUT + 1)
    one._tell()
    for lifts in (one, other, one):
        shared[3] = 1  # a stream that went on
        lifts._lift()
        lifts._has_moved()
        assert all(1 << 30 <= value < 3 << 29 for value in shared.values()[3:])
    with pytest.raises(CallError, match="has waited 60 s"):
        one.raise_failure()
    with pytest.raises(CallError, match="failed on another rank"):
        other.raise_failure()


def test_transfers_fail_with_the_calls_of_the_run(path: Path) -> None:
    calls = SimpleNamespace(watch=SimpleNamespace(failure="Rank 5 is elsewhere."))
    assert watch(counters(path), [[0, 1]], calls)._reason(0) == "Rank 5 is elsewhere."
