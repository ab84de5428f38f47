"""Rows copied into the memory of the other ranks' devices, where all ranks of the group are processes of one host.

NCCL's kernel needs multiprocessors, and a product may hold all of them: what was queued beside it then runs after it. Copies by
the copy engine run beside any product, and cost the host less.

[Note: inboxes] Each rank has memory on its device, of :data:`INBOXES` equal parts, that the others can write to. A transfer uses
the next part on every rank, as all ranks make the same transfers in the same order. Counters order the copies. They lie in
memory of the host that all ranks share; streams write them and wait for them, and a thread of each rank watches them:

- ``full(receiver, sender)``: how many pieces the sender has copied into the receiver's memory;
- ``free(receiver, i)``: how many transfers the receiver's i-th inbox has served to the end. A copy for the n-th waits until that
  is n - 1.

If the next inbox is in use by a transfer that has not ended, the transfer goes through the lane; so does one that is captured for
a CUDA graph, whose counters would not count.

[Note: what was sent] When a transfer ends, the computation either waits until this rank's rows have been copied, or they are kept
until a later transfer shows that they have been: a rank sends its pieces of that after it has waited for all pieces of the
first. So rows that somebody may write to are waited for, and others are kept.

[Note: when a rank fails] A stream that waits for a counter would wait for ever when the other rank does not come. So the thread
ends the transfers when pieces are missing and no counter has moved for the run's timeout; soon, when a rank has left or this one
is about to; and at once when the run has failed already. It lifts all counters, which lets all streams go on, and from then on
every transfer raises, on every rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CallError
from bmt_core.ops import PeerLink
from bmt_core.run.lanes import CudaLane
from bmt_core.run.runtime import Runtime
from bmt_core.torch_internals import stream_address
from bmt_tp.shared_counters import WRAP, SharedCounters, new_counters_file

logger = logging.getLogger("bmt_tp")

INBOXES = 3
_ALIGNMENT = 512  # bytes
_MOST_VIEWS = 1024
_LIFT = 1 << 30
_PERIOD = 0.25  # seconds between two looks of the thread
_PATIENCE = 3.0  # seconds for which what is under way may stand still when a rank has left


class Inbox(NamedTuple):
    """The memory of one transfer, and where it is among the counters."""

    view: View
    number: int
    use: int
    position: int
    """The transfer is the run's so many-th."""
    computation: int
    """The address of the stream that fills, awaits and reads it."""


class PeerRows:
    """The inboxes of this rank, and the way into those of the others."""

    def __init__(self, runtime: Runtime, group: Group, lane: CudaLane, link: PeerLink, counters: _Counters) -> None:
        self.lane = lane
        self._group = group
        self._lane_stream = lane.stream.cuda_stream
        self._link = link
        self._counters = counters
        self._device = runtime.device
        self._memory: _Memory | None = None
        self._too_much = WRAP**2  # bytes of an inbox that could not be made
        self._is_closed = False
        ranks = range(group.size)
        self._sent = [0] * group.size
        self._received = [0] * group.size
        self._full_of_others = [counters.full(rank, group.rank) for rank in ranks]
        self._full = [counters.full(group.rank, rank) for rank in ranks]
        self._free = [[counters.free(rank, number) for number in range(INBOXES)] for rank in ranks]
        self._uses = [0] * INBOXES
        self._is_in_use = [False] * INBOXES
        self._next = 0
        self._begun = 0
        self._kept: deque[tuple[int, Sequence[torch.Tensor]]] = deque()  # by the last transfer that had begun then
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], View] = {}
        self._watch = _Watch(runtime, counters, group, self._received)

    def inbox(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Inbox | None:
        """Return the next inbox, for (W, rows, features); None if this transfer is to go through the lane. Collective.

        It waits for the other ranks only where the inboxes must grow. Raises :class:`CallError` when transfers have failed.
        """
        self._watch.raise_failure()
        number = self._next
        if self._is_in_use[number] or torch.cuda.is_current_stream_capturing():
            return None
        view = self._views.get((number, shape, dtype)) or self._new_view(number, shape, dtype)
        if view is None:
            return None
        self._next = (number + 1) % INBOXES
        self._uses[number] += 1
        self._is_in_use[number] = True
        self._begun += 1
        return Inbox(view, number, self._uses[number], self._begun, stream_address(self._device.index))

    def send(self, inbox: Inbox, rows: torch.Tensor, to: int, first: int) -> None:
        """Copy contiguous ``rows``, which the computation has been given, to rank ``to``: this rank's rows from ``first`` on."""
        self._sent[to] += 1
        self._link.copy(
            rows.data_ptr(),
            rows.nbytes,
            inbox.view.targets[to] + first * inbox.view.row_bytes,
            self._free[to][inbox.number],
            (inbox.use - 1) & WRAP,
            self._full_of_others[to],
            self._sent[to] & WRAP,
            inbox.computation,
            self._lane_stream,
        )

    def next_from(self, source: int) -> int:
        """Return the number of the next piece that rank ``source`` sends."""
        self._received[source] += 1
        return self._received[source]

    def wait(self, source: int, piece: int, computation: int) -> None:
        """Let the computation wait for that piece."""
        self._link.wait(self._full[source], piece & WRAP, computation)

    def end(self, inbox: Inbox, sent: Sequence[torch.Tensor], *, waits: bool) -> None:
        """Let the others write to the inbox after what the computation has been given, which has waited for all pieces.

        ``sent`` is what was sent, if anything. ``waits``: the computation waits until it is copied; else see [Note: what was sent].
        """
        if self._is_closed:
            return
        streams = inbox.computation, self._lane_stream
        after, stream = reversed(streams) if waits else streams
        self._link.write(self._free[self._group.rank][inbox.number], inbox.use & WRAP, after, stream)
        self._is_in_use[inbox.number] = False
        if sent:
            while self._kept and self._kept[0][0] < inbox.position:
                self._kept.popleft()
            if not waits:
                self._kept.append((self._begun, sent))

    def close(self) -> None:
        """End the transfers; what is under way is waited for as long as it moves."""
        self._watch.expect_little()
        torch.cuda.synchronize(self._device)
        self._watch.leave()
        self._is_closed = True
        if self._memory is not None:
            self._memory.close(self._link)
        self._views.clear()
        self._kept.clear()
        self._memory = None
        self._counters.shared.unmap()

    def _new_view(self, number: int, shape: tuple[int, int, int], dtype: torch.dtype) -> View | None:
        length = shape[0] * shape[1] * shape[2] * dtype.itemsize
        if (self._memory is None or length > self._memory.length) and not self._has_grown(length):
            return None
        assert self._memory is not None
        start = number * self._memory.length
        all_rows = self._memory.bytes[start : start + length].view(dtype).view(shape)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        row_bytes = shape[2] * dtype.itemsize
        offset = start + self._group.rank * shape[1] * row_bytes
        targets = [first + offset for first in self._memory.starts]
        view = self._views[number, shape, dtype] = View(all_rows, all_rows.unbind(), targets, row_bytes)
        return view

    def _has_grown(self, length: int) -> bool:
        """Make inboxes of ``length`` bytes, or say that some rank could not. Collective; waits for all that is under way."""
        if length >= self._too_much:
            return False
        torch.cuda.synchronize(self._device)
        memory = _shared_memory(self._link, self._group, -(-length // _ALIGNMENT) * _ALIGNMENT, self._device)
        if isinstance(memory, str):
            self._too_much = length
            _warn(self._group, f"there is no memory for rows of {length} bytes: {memory}")
            return False
        if self._memory is not None:  # where nobody writes any more; a transfer that has not ended keeps what it reads
            self._memory.close(self._link)
        self._memory = memory
        self._views.clear()
        return True


class View(NamedTuple):
    """An inbox as rows, of ``row_bytes``: all, and those of each rank. ``targets``: where each rank has those of this rank."""

    all_rows: torch.Tensor
    of_ranks: tuple[torch.Tensor, ...]
    targets: list[int]
    row_bytes: int


class _Memory(NamedTuple):
    """The inboxes, of ``length`` bytes each; ``starts``: where those of each rank begin, the others' in what was ``opened``."""

    bytes: torch.Tensor
    length: int
    starts: list[int]
    opened: list[int]

    def close(self, link: PeerLink) -> None:
        for address in self.opened:
            link.close(address)


class _Counters:
    """See [Note: inboxes]. ``failed`` is not 0 when the transfers have failed; that of a rank which has left is not 0, either."""

    failed = 0

    def __init__(self, path: Path, size: int, link: PeerLink) -> None:
        self._size = size
        self.shared = SharedCounters(path, self.count(size))
        self.shared.map(link)

    @staticmethod
    def count(size: int) -> int:
        """Return how many a group of ``size`` ranks has."""
        return 1 + size * (1 + size + INBOXES)

    def left(self, rank: int) -> int:
        """Return the index of what is not 0 when that rank has left."""
        return 1 + rank

    def free_index(self, receiver: int, number: int) -> int:
        """Return the index of ``free``."""
        return 1 + self._size * (1 + self._size) + receiver * INBOXES + number

    def full_index(self, receiver: int, sender: int) -> int:
        """Return the index of ``full``."""
        return 1 + self._size * (1 + receiver) + sender

    def full(self, receiver: int, sender: int) -> int:
        """Return where the device finds it."""
        return self.shared.address(self.full_index(receiver, sender))

    def free(self, receiver: int, number: int) -> int:
        """Return where the device finds it."""
        return self.shared.address(self.free_index(receiver, number))


class _Watch:
    """The thread of [Note: when a rank fails]. ``expected``: how many pieces this rank has waited for or will, of each rank."""

    def __init__(self, runtime: Runtime, counters: _Counters, group: Group, expected: list[int]) -> None:
        self._calls = runtime.calls
        self._timeout = runtime.settings.timeout
        self._counters = counters
        self._group = group
        self._expected = expected
        self._failure = ""
        self._seen = counters.shared.values()  # before any rank has lifted them
        self._is_leaving = False
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bmt-tp-rows", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise :class:`CallError` if the transfers have failed."""
        if self._failure or self._counters.shared[_Counters.failed]:
            raise CallError(self._failure or _FAILED_ELSEWHERE)

    def expect_little(self) -> None:
        """Learn that this rank is about to leave: what is under way may go on as long as something moves."""
        self._is_leaving = True

    def leave(self) -> None:
        """Tell the others that this rank has left, with nothing under way, and end the thread."""
        self._is_stopping.set()
        self._thread.join()
        self._counters.shared[self._counters.left(self._group.rank)] = 1

    def _run(self) -> None:
        since = time.monotonic()
        while not self._is_stopping.wait(_PERIOD):
            if self._has_moved() or not self._is_missing():
                since = time.monotonic()
            if not self._failure:
                self._failure = self._reason(time.monotonic() - since)
                if self._failure:
                    self._tell()
            if self._failure:
                self._lift()

    def _has_moved(self) -> bool:
        before, now = self._seen, self._counters.shared.values()
        if not self._counters.shared[_Counters.failed]:
            self._seen = now
        return now != before

    def _is_missing(self) -> bool:
        """Whether a piece that this rank expects has not arrived; pieces that it does not expect yet may have."""
        rank, shared = self._group.rank, self._counters.shared
        arrived = [shared[self._counters.full_index(rank, source)] for source in range(self._group.size)]
        missing = [(expected - count) & WRAP for expected, count in zip(self._expected, arrived, strict=True)]
        return any(0 < number < _LIFT for number in missing)

    def _reason(self, still: float) -> str:
        """Return why the transfers have failed when nothing has moved for ``still`` seconds; empty if they have not."""
        if self._counters.shared[_Counters.failed]:
            return _FAILED_ELSEWHERE
        if self._calls is not None and self._calls.watch.failure is not None:
            return self._calls.watch.failure
        ranks, own = self._group.ranks, self._group.rank
        left = [rank for i, rank in enumerate(ranks) if self._counters.shared[self._counters.left(i)]]
        if still > _PATIENCE and (left or self._is_leaving):
            rank = left[0] if left else ranks[own]
            return f"Rank {rank} has ended its run in the middle of an exchange of rows with ranks {ranks}. Look at its output."
        if still > self._timeout:
            return (
                f"Rank {ranks[own]} has waited {self._timeout:g} s for rows of the tensor-parallel ranks {ranks}."
                " All of them must run the same layers: look at the output of the others."
            )
        return ""

    def _tell(self) -> None:
        self._counters.shared[_Counters.failed] = 1
        if self._calls is not None and self._calls.watch.failure is None:
            self._calls.watch.fail(self._failure, self._calls.store.clone())

    def _lift(self) -> None:
        """Let every stream go on. Again and again, because a stream that goes on writes counters, too."""
        for index in range(1 + self._group.size, len(self._seen)):
            self._counters.shared[index] = self._seen[index] + _LIFT


_FAILED_ELSEWHERE = "The exchange of rows between tensor-parallel ranks has failed on another rank. Look at its output."


def connected(runtime: Runtime, group: Group, lane: CudaLane) -> PeerRows | None:
    """Return the inboxes of ``group``; None, and a warning, if its ranks cannot write to each other's memory. Collective."""
    link, problem = _link_or_problem(runtime)
    counters: _Counters | None = None
    path: Path | None = None
    try:
        if link is not None and group.rank == 0:
            path, problem = _file_or_problem(_Counters.count(group.size))
        first, *_ = offers = all_gather_object((problem, path), group)
        if not any(problem for problem, _ in offers) and link is not None:
            try:
                counters = _Counters(first[1], group.size, link)
            except (OSError, RuntimeError) as error:
                problem = f"rank {runtime.rank} cannot share memory with rank {group.ranks[0]}: {error}"
        problems = [*(problem for problem, _ in offers), *all_gather_object(problem, group)]
    finally:
        if path is not None:
            path.unlink()
    if any(problems):
        _warn(group, next(filter(None, problems)))
        if counters is not None:
            counters.shared.unmap()
        return None
    assert link is not None
    assert counters is not None
    return PeerRows(runtime, group, lane, link, counters)


def _link_or_problem(runtime: Runtime) -> tuple[PeerLink | None, str]:
    try:
        link = runtime.kernels.peer_link()
    except RuntimeError as error:
        return None, str(error)
    return link, "" if link is not None else f"the kernels {runtime.kernels.name!r} have no peer_link()"


def _file_or_problem(count: int) -> tuple[Path | None, str]:
    try:
        return new_counters_file(count), ""
    except OSError as error:
        return None, str(error)


def _shared_memory(link: PeerLink, group: Group, length: int, device: torch.device) -> _Memory | str:
    """Return inboxes of ``length`` bytes on every rank, or on every rank why one could not make them. Collective."""
    problem, handle, offset = "", b"", 0
    memory: torch.Tensor | None = None
    try:
        memory = torch.empty(INBOXES * length, dtype=torch.uint8, device=device)
        handle, offset = link.shared(memory.data_ptr())
    except RuntimeError as error:  # out of memory is one, too
        problem = f"rank {group.ranks[group.rank]}: {error}"
    offers = all_gather_object((problem, handle, offset), group)
    starts: list[int] = []
    opened: list[int] = []
    if not any(problem for problem, _, _ in offers):
        try:
            for rank, (_, handle, offset) in enumerate(offers):
                if rank == group.rank and memory is not None:
                    starts.append(memory.data_ptr())
                else:
                    opened.append(link.opened(handle))
                    starts.append(opened[-1] + offset)
        except RuntimeError as error:
            problem = f"rank {group.ranks[group.rank]}: {error}"
    problems = [*(problem for problem, _, _ in offers), *all_gather_object(problem, group)]
    if any(problems) or memory is None:
        for address in opened:
            link.close(address)
        return str(next(filter(None, problems)))
    return _Memory(memory, length, starts, opened)


def _warn(group: Group, reason: str) -> None:
    if group.rank == 0:
        logger.warning(
            "bmt: tensor-parallel ranks %s exchange rows by collectives, which takes longer than copies between their devices: %s.",
            group.ranks,
            reason,
        )
