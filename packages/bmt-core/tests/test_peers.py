"""The counters that ranks of one host share, and what the thread that watches them says. Copies
between devices are tested on GPUs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import CallError
from bmt_core.peers import WRAP, PeerCounters, PeerWatch, new_counters_file
from bmt_core.run.runtime import Runtime

TIMEOUT = 60.0
COUNT = 4


@pytest.fixture
def path() -> Any:
    made = new_counters_file(PeerCounters.count(2, COUNT))
    yield made
    made.unlink()


def test_processes_see_the_same_counters_which_wrap(path: Path) -> None:
    one, other = PeerCounters(path, 2, COUNT), PeerCounters(path, 2, COUNT)
    one[0], one[4] = WRAP + 3, 7
    assert other.values() == one.values() == [2, 0, 0, 0, 7, 0, 0]
    assert other[4] == 7


def test_every_counter_has_a_place_of_its_own(path: Path) -> None:
    made = PeerCounters(path, 2, COUNT)
    indices = [made.failed, made.left(0), made.left(1), *range(made.first, made.first + COUNT)]
    assert indices == list(range(len(made.values())))
    assert len({made.address(index) for index in indices}) == len(indices)


def watch(made: PeerCounters, awaited: dict[int, int], calls: Any = None) -> PeerWatch:
    """Return the watch of rank 0 of two, whose thread has ended: the test calls what it does."""
    settings = SimpleNamespace(timeout=TIMEOUT)
    runtime = cast(Runtime, SimpleNamespace(calls=calls, settings=settings))
    group = LazyGroup((4, 5), 0, lambda: SingleGroup(0))
    found = PeerWatch(runtime, group, made, "rows", awaited.items)
    found.leave()
    made[made.left(0)] = 0
    return found


def test_copies_fail_when_nothing_moves_for_the_timeout_or_the_other_rank_has_left(
    path: Path,
) -> None:
    made, awaited = PeerCounters(path, 2, COUNT), {3: 0, 5: 0}
    found = watch(made, awaited)
    assert not found._is_missing()
    awaited[5] = 1
    assert found._is_missing()
    assert found._reason(TIMEOUT - 1) == ""
    assert "Rank 4 has waited 60 s for rows of ranks (4, 5)." in found._reason(TIMEOUT + 1)
    made[made.left(1)] = 1
    assert found._reason(1) == ""
    assert "Rank 5 has ended its run" in found._reason(TIMEOUT - 1)
    made[5] = 1
    assert not found._is_missing()
    assert found._has_moved()
    assert not found._has_moved()
    made[5] = 2  # the other rank is ahead
    assert not found._is_missing()
    # The counter begins again at 0.
    awaited[5], made[5] = WRAP + 2, WRAP
    assert found._is_missing()


def test_a_rank_that_leaves_waits_as_long_as_something_moves(path: Path) -> None:
    found = watch(PeerCounters(path, 2, COUNT), {3: 1})
    found.shorten_timeout()
    assert found._reason(1) == ""
    assert "Rank 4 has ended its run" in found._reason(TIMEOUT - 1)


def test_a_failure_lifts_all_counters_and_is_raised_on_every_rank(path: Path) -> None:
    one, other = (watch(PeerCounters(path, 2, COUNT), {3: 1}) for _ in range(2))
    shared = PeerCounters(path, 2, COUNT)
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


def test_copies_fail_with_the_calls_of_the_run(path: Path) -> None:
    calls = SimpleNamespace(watch=SimpleNamespace(failure="Rank 5 is elsewhere."))
    found = watch(PeerCounters(path, 2, COUNT), {3: 1}, calls)
    assert found._reason(0) == "Rank 5 is elsewhere."
