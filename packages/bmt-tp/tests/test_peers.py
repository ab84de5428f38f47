"""The counters that ranks of one host share, and what the thread that watches them says. Copies
between devices are tested on GPUs.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from bmt_core.comm import CommContext, SingleGroup, TorchBackend, all_gather_object
from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.observer import RunObserver
from bmt_core.errors import CallError
from bmt_core.run.runtime import Runtime, current
from bmt_testing import run_ranks
from bmt_tp.peers import (
    WRAP,
    Awaited,
    NoCopies,
    PeerCounters,
    PeerWatch,
    connected,
    new_counters_file,
    peer_memory,
    peer_watch,
)

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


def watch(made: PeerCounters, awaited: dict[int, int], observer: Any = None) -> PeerWatch:
    """Return the watch of rank 0 of two, whose thread has ended: the test calls what it does.
    ``awaited`` are counters of the other rank.
    """
    settings = SimpleNamespace(timeout=TIMEOUT)
    observer = observer or RunObserver()
    runtime = cast(Runtime, SimpleNamespace(observer=observer, settings=settings, rank=4))
    group = LazyGroup((4, 5), 0, lambda: SingleGroup(0))

    def waits() -> list[Awaited]:
        return [Awaited(1, counter, value) for counter, value in awaited.items()]

    found = PeerWatch(runtime, group, made, waits)
    found.leave()
    made[made.left(0)] = 0
    return found


def test_copies_fail_when_nothing_moves_for_the_timeout_or_the_other_rank_has_left(
    path: Path,
) -> None:
    made, awaited = PeerCounters(path, 2, COUNT), {3: 0, 5: 0}
    found = watch(made, awaited)
    assert not found._missing()
    assert found._reason(TIMEOUT + 1) == ""
    found.wait_until_ended()
    awaited[5] = 1
    assert found._missing() == [5]
    assert found._reason(TIMEOUT - 1) == ""
    assert "Rank 4 has waited 60 s for rank 5, to copy rows between ranks (4, 5)." in found._reason(
        TIMEOUT + 1
    )
    made[made.left(1)] = 1
    assert found._reason(1) == ""
    assert "Rank 5 has ended its run" in found._reason(TIMEOUT - 1)
    made[5] = 1
    assert not found._missing()
    assert found._has_moved()
    assert not found._has_moved()
    made[5] = 2  # the other rank is ahead
    assert not found._missing()
    # The counter begins again at 0.
    awaited[5], made[5] = WRAP + 2, WRAP
    assert found._missing() == [5]


def test_a_rank_that_leaves_waits_a_minute_for_others_that_are_late(path: Path) -> None:
    found = watch(PeerCounters(path, 2, COUNT), {3: 1})
    found._timeout = 30 * TIMEOUT
    found.shorten_timeout()
    assert found._reason(59) == ""
    assert "Rank 4 has waited 60 s for rank 5" in found._reason(61)


def test_a_failure_lifts_all_counters_and_is_raised_on_every_rank(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (watch(PeerCounters(path, 2, COUNT), {3: 1}) for _ in range(2))
    shared = PeerCounters(path, 2, COUNT)
    shared[4] = 7
    assert one._has_moved()
    assert other._has_moved()
    one._failure = one._reason(TIMEOUT + 1)
    one._counters[one._counters.failed] = 1
    one._tell()
    assert "what rank 4 computes now is wrong. Rank 4 has waited 60 s" in caplog.text
    one.wait_until_ended()
    for lifts in (one, other, one):
        shared[3] = 1  # a stream that went on
        lifts._lift()
        lifts._has_moved()
        assert all(1 << 30 <= value < 3 << 29 for value in shared.values()[3:])
    with pytest.raises(CallError, match="has waited 60 s"):
        one.raise_failure()
    with pytest.raises(CallError, match="failed on another rank"):
        other.raise_failure()


class OfFailedRun(RunObserver):
    failure = "Rank 5 is elsewhere."


def test_copies_fail_with_the_calls_of_the_run(path: Path) -> None:
    made = PeerCounters(path, 2, COUNT)
    found = watch(made, {3: 1}, OfFailedRun())
    assert found._reason(0) == "Rank 5 is elsewhere."
    found.raise_failure()
    made[PeerCounters.failed] = 1  # by another rank, which knows why
    with pytest.raises(CallError, match=r"^Rank 5 is elsewhere\.$"):
        found.raise_failure()


def test_copies_that_a_gpu_waits_for_are_told_to_the_watch_of_calls(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watch, "_PATIENCE", 0.0)
    asked: list[Any] = []
    observer = RunObserver()
    monkeypatch.setattr(observer, "waits", asked.append)
    made = PeerCounters(path, 2, COUNT)
    found = watch(made, {3: 1, 5: 1}, observer)
    (waits,) = asked
    looks = iter([False, False, False, True])
    found._is_stopping = cast(Any, SimpleNamespace(wait=lambda _: next(looks)))
    found._run()
    assert waits() == ("copies of rows from rank 5", (5,))
    made[3] = made[5] = 1
    looks = iter([False, True])
    found._run()
    assert waits() is None


class HostLink:
    """A link of one process: where host and device see memory at one address. ``wrong`` raises."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong
        self.closed: list[int] = []

    def _try(self, name: str) -> None:
        if name == self.wrong:
            raise RuntimeError(f"no {name}")

    def shared(self, address: int) -> tuple[bytes, int]:
        self._try("shared")
        return address.to_bytes(8, "little"), 3

    def opened(self, handle: bytes) -> int:
        self._try("opened")
        return int.from_bytes(handle, "little") + 1000

    def close(self, address: int) -> None:
        self.closed.append(address)

    def mapped(self, address: int, bytes: int) -> int:
        self._try("mapped")
        return address

    def unmap(self, address: int) -> None: ...

    def wait(self, flag: int, value: int, stream: int) -> None:
        self._try("wait")

    def write(self, flag: int, value: int, after: int, stream: int) -> None: ...


class Synchronized:
    def synchronize(self) -> None: ...


WRONG = ("shared", "opened", "mapped", "wait", "link", "", "no link", "host", "backend")


def offers() -> list[tuple[Any, bool]]:
    """For each thing that is wrong on rank 1 alone: what ranks get, and whether it is right."""
    run, found = current(), []
    for wrong in WRONG:
        link = HostLink(wrong if run.rank == 1 else "")

        def peer_link(wrong: str = wrong, link: HostLink = link) -> HostLink | None:
            if wrong == "link" and run.rank == 1:
                raise RuntimeError("no link")
            return None if wrong == "no link" and run.rank == 1 else link

        host = f"host {run.rank}" if wrong == "host" else "host"
        backend = SimpleNamespace(name="mine") if wrong == "backend" else run.backend
        fake: Any = SimpleNamespace(
            kernels=SimpleNamespace(name="fake", peer_link=peer_link),
            device=run.device,
            rank=run.rank,
            backend=backend,
        )
        with (
            patch.object(torch.cuda, "device", lambda device: nullcontext()),
            patch.object(torch.cuda, "current_stream", lambda device: Synchronized()),
            patch.object(peer_memory, "stream_address", lambda index: 0),
            patch.object(peer_memory, "_host", lambda host=host: host),
        ):
            memory = connected(fake, run.world, COUNT)
            if isinstance(memory, NoCopies):
                found.append((memory, True))
                continue
            tensor = torch.zeros(4)
            shared = memory.shared(lambda tensor=tensor: tensor)  # type: ignore[misc]
            memory.counters.unmap()
        if isinstance(shared, NoCopies):
            found.append((shared, run.rank == 1 or len(link.closed) == run.world_size - 1))
            continue
        addresses = all_gather_object(tensor.data_ptr(), run.world)
        expected = [
            address if rank == run.rank else address + 1003
            for rank, address in enumerate(addresses)
        ]
        found.append(("", shared.addresses == expected and len(shared.opened) == 2))
    return found


def test_what_one_rank_cannot_do_all_ranks_do_without() -> None:
    everywhere = run_ranks(offers, 3)
    for each in zip(WRONG, *everywhere, strict=True):
        wrong, ranks = each[0], each[1:]
        assert all(is_right for _, is_right in ranks if wrong != "shared"), wrong
        reasons = {reason for reason, _ in ranks}
        assert len(reasons) == 1, wrong
        (reason,) = reasons
        if not wrong:
            assert reason == ""
            continue
        kind = {"no link": "unavailable", "host": "unavailable", "backend": "unwanted"}
        assert reason.kind == kind.get(wrong, "failed"), (wrong, reason)
        text = {
            "host": "they are on several hosts",
            "backend": "the backend 'mine' makes all transfers itself",
            "no link": "the kernels 'fake' have no peer_link()",
        }
        assert text.get(wrong, f"no {wrong}") in reason.reason
        if reason.kind == "failed" and wrong != "link":
            assert "rank 1" in reason.reason


def test_a_subclass_of_a_backend_that_allows_copies_gets_all_transfers() -> None:
    class Counting(TorchBackend):
        pass

    context = CommContext(
        rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), store=None, timeout=1.0
    )
    assert peer_memory._allows_copies(TorchBackend(context))
    assert not peer_memory._allows_copies(Counting(context))
