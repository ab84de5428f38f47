"""Rows copied directly into the memory of the other ranks' GPUs. All ranks of the group are
processes of one host.

NCCL's kernels need multiprocessors. A product may occupy all of them, and then a collective queued
beside it runs after it. Copies by the GPU's copy engine run beside any product, and cost the host
less time.

[Note: inboxes] Each rank has :data:`INBOXES` inboxes: equal parts of one allocation on its GPU, to
which the other ranks can write. All ranks make the same transfers in the same order, and each
transfer uses the next inbox, the same on every rank. Counters order the copies. They are in host
memory that all ranks share. Streams write them and wait for them, and a thread of each rank
watches them:

- ``full(receiver, sender, i)``: how many pieces the sender has copied into the receiver's
  i-th inbox;
- ``free(receiver, i)``: how many transfers have ended in the receiver's i-th inbox. The copies of
  its n-th transfer wait until the counter is n - 1.

Transfers copy in different streams, but all pieces of one transfer are copied in one stream, and
those of the next one in the same inbox wait for its end. So ``full`` is written in order. So is
``free``: a transfer ends after it has received pieces, which are sent only when the transfer before
it in that inbox has ended.

A transfer goes through the lane instead if the next inbox is still used by a transfer that has not
ended, and while a CUDA graph is captured, because a replay would write the same counter
values again.

[Note: what was sent] When a transfer ends, copies may still read the rows that this rank sent. If
the caller may write to them, the computation waits until they are copied. Other rows are only kept
in memory, until a later transfer proves that they are copied: a rank sends the pieces of a later
transfer after it has waited for all pieces of this one.

[Note: when a rank fails] A stream that waits for a counter waits for ever if the other rank does
not come. So the thread ends the transfers when pieces are missing and no counter has changed for
the run's timeout. It waits only :data:`_PATIENCE` seconds if a rank has left or this rank is
shutting down, and not at all if the run has failed already. To end them it raises all counters
above every value that a stream waits for, so that all streams go on. From then on every transfer
raises, on every rank.
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
_PERIOD = 0.25  # seconds between two checks of the thread
_PATIENCE = 3.0  # seconds without a change of a counter until transfers fail, once a rank has left


class Inbox(NamedTuple):
    """The memory of one transfer, and its numbers for the counters."""

    view: View
    number: int
    use: int
    position: int
    """The number of the transfer in the run, from 1."""
    computation: int
    """The address of the stream that computes what is sent and reads what arrives."""
    copies: int
    """The address of the stream that copies: the lane's, or the computation's."""


class PeerRows:
    """The inboxes of this rank, and copies into those of the other ranks."""

    def __init__(
        self, runtime: Runtime, group: Group, lane: CudaLane, link: PeerLink, counters: _Counters
    ) -> None:
        self.lane = lane
        self._group = group
        self._lane_stream = lane.stream.cuda_stream
        self._link = link
        self._counters = counters
        self._device = runtime.device
        self._memory: _Memory | None = None
        self._too_much = WRAP**2  # the size in bytes at which making inboxes last failed
        self._is_closed = False
        ranks = range(group.size)
        # By inbox and rank: the number of pieces so far, and the addresses of the counters.
        self._sent = [[0] * group.size for _ in range(INBOXES)]
        self._received = [[0] * group.size for _ in range(INBOXES)]
        self._full_of_others = [
            [counters.full(rank, group.rank, number) for rank in ranks] for number in range(INBOXES)
        ]
        self._full = [
            [counters.full(group.rank, rank, number) for rank in ranks] for number in range(INBOXES)
        ]
        self._free = [[counters.free(rank, number) for rank in ranks] for number in range(INBOXES)]
        self._uses = [0] * INBOXES
        self._is_in_use = [False] * INBOXES
        self._next = 0
        self._begun = 0
        # (number of the last transfer that had begun when the rows were put here, rows): see
        # [Note: what was sent]
        self._kept: deque[tuple[int, Sequence[torch.Tensor]]] = deque()
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], View] = {}
        self._watch = _Watch(runtime, counters, group, self._received)

    def inbox(
        self, shape: tuple[int, int, int], dtype: torch.dtype, *, beside: bool
    ) -> Inbox | None:
        """Return the next inbox, for (W, rows, features); None if this transfer must go through the
        lane. Collective.

        With ``beside`` copies are queued in the lane, otherwise on the computation's stream. Waits
        for the other ranks only if the inboxes must grow. Raises :class:`CallError` if transfers
        have failed.
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
        computation = stream_address(self._device.index)
        copies = self._lane_stream if beside else computation
        return Inbox(view, number, self._uses[number], self._begun, computation, copies)

    def send(self, inbox: Inbox, rows: torch.Tensor, to: int, first: int) -> None:
        """Copy contiguous ``rows``, whose computation is queued, to rank ``to``, as this rank's
        rows from ``first`` on.
        """
        number = inbox.number
        sent = self._sent[number]
        sent[to] += 1
        self._link.copy(
            rows.data_ptr(),
            rows.nbytes,
            inbox.view.targets[to] + first * inbox.view.row_bytes,
            self._free[number][to],
            (inbox.use - 1) & WRAP,
            self._full_of_others[number][to],
            sent[to] & WRAP,
            inbox.computation,
            inbox.copies,
        )

    def next_from(self, source: int, inbox: Inbox) -> int:
        """Return the number of the next piece that rank ``source`` sends into ``inbox``."""
        received = self._received[inbox.number]
        received[source] += 1
        return received[source]

    def wait(self, source: int, piece: int, inbox: Inbox) -> None:
        """Make the computation wait for the piece of this number from ``source`` in ``inbox``."""
        self._link.wait(self._full[inbox.number][source], piece & WRAP, inbox.computation)

    def end(self, inbox: Inbox, sent: Sequence[torch.Tensor], *, waits: bool) -> None:
        """Give the inbox back to the other ranks, after all work that is queued on the
        computation's stream.

        The computation has waited for all pieces. ``sent`` are the rows that were sent. With
        ``waits`` the computation waits until they are copied; otherwise they are kept: see
        [Note: what was sent].
        """
        if self._is_closed:
            return
        streams = inbox.computation, inbox.copies
        after, stream = reversed(streams) if waits else streams
        self._link.write(
            self._free[inbox.number][self._group.rank], inbox.use & WRAP, after, stream
        )
        self._is_in_use[inbox.number] = False
        if sent:
            while self._kept and self._kept[0][0] < inbox.position:
                self._kept.popleft()
            if not waits:
                self._kept.append((self._begun, sent))

    def close(self) -> None:
        """End all transfers. Those under way are waited for as long as a counter changes."""
        self._watch.shorten_timeout()
        torch.cuda.synchronize(self._device)
        self._watch.leave()
        self._is_closed = True
        if self._memory is not None:
            self._memory.close(self._link)
        self._views.clear()
        self._kept.clear()
        self._memory = None
        self._counters.shared.unmap()

    def _new_view(
        self, number: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> View | None:
        length = shape[0] * shape[1] * shape[2] * dtype.itemsize
        with torch.inference_mode(False):  # a training may use what an evaluation makes
            if (self._memory is None or length > self._memory.length) and not self._has_grown(
                length
            ):
                return None
            return self._viewed(number, shape, dtype, length)

    def _viewed(
        self, number: int, shape: tuple[int, int, int], dtype: torch.dtype, length: int
    ) -> View:
        assert self._memory is not None
        start = number * self._memory.length
        all_rows = self._memory.bytes[start : start + length].view(dtype).view(shape)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        row_bytes = shape[2] * dtype.itemsize
        offset = start + self._group.rank * shape[1] * row_bytes
        targets = [first + offset for first in self._memory.starts]
        view = self._views[number, shape, dtype] = View(
            all_rows, all_rows.flatten(0, 1), all_rows.unbind(), targets, row_bytes
        )
        return view

    def _has_grown(self, length: int) -> bool:
        """Make inboxes of ``length`` bytes on all ranks. Return False if some rank cannot.
        Collective; synchronises the device.
        """
        if length >= self._too_much:
            return False
        torch.cuda.synchronize(self._device)
        memory = _shared_memory(
            self._link, self._group, -(-length // _ALIGNMENT) * _ALIGNMENT, self._device
        )
        if isinstance(memory, str):
            self._too_much = length
            _warn(self._group, f"there is no memory for rows of {length} bytes: {memory}")
            return False
        if self._memory is not None:
            # Nobody writes to the old memory any more, and a transfer that has not ended keeps its
            # own view of it.
            self._memory.close(self._link)
        self._memory = memory
        self._views.clear()
        return True


class View(NamedTuple):
    """An inbox as rows of ``row_bytes`` bytes: the tensors of
    :class:`bmt_tp.row_transfers.RowTransfer`.

    ``targets[r]`` is the address at which rank r's inbox takes this rank's rows.
    """

    all_rows: torch.Tensor
    joined_rows: torch.Tensor
    of_ranks: tuple[torch.Tensor, ...]
    targets: list[int]
    row_bytes: int


class _Memory(NamedTuple):
    """The inboxes of this rank, of ``length`` bytes each.

    ``starts[r]`` is the address of rank r's inboxes; ``opened`` are the mappings of the other
    ranks' memory, to be closed.
    """

    bytes: torch.Tensor
    length: int
    starts: list[int]
    opened: list[int]

    def close(self, link: PeerLink) -> None:
        for address in self.opened:
            link.close(address)


class _Counters:
    """The shared counters: one for a failure of the transfers, one per rank for its leaving, and
    those of [Note: inboxes].
    """

    failed = 0
    """Index of the counter that is not 0 once the transfers have failed."""

    def __init__(self, path: Path, size: int, link: PeerLink) -> None:
        self._size = size
        self.shared = SharedCounters(path, self.count(size))
        self.shared.map(link)

    @staticmethod
    def count(size: int) -> int:
        """Return the number of counters of a group of ``size`` ranks."""
        return 1 + size * (1 + INBOXES + size * INBOXES)

    def left(self, rank: int) -> int:
        """Return the index of the counter that is not 0 once this rank has left."""
        return 1 + rank

    def free_index(self, receiver: int, number: int) -> int:
        """Return the index of ``free``."""
        return 1 + self._size + receiver * INBOXES + number

    def full_index(self, receiver: int, sender: int, number: int) -> int:
        """Return the index of ``full``."""
        return 1 + self._size * (1 + INBOXES) + (receiver * self._size + sender) * INBOXES + number

    def full(self, receiver: int, sender: int, number: int) -> int:
        """Return the device address of ``full``."""
        return self.shared.address(self.full_index(receiver, sender, number))

    def free(self, receiver: int, number: int) -> int:
        """Return the device address of ``free``."""
        return self.shared.address(self.free_index(receiver, number))


class _Watch:
    """The thread of [Note: when a rank fails].

    ``expected``: how many pieces this rank has expected so far, by the number of the inbox and
    by rank.
    """

    def __init__(
        self, runtime: Runtime, counters: _Counters, group: Group, expected: list[list[int]]
    ) -> None:
        self._calls = runtime.calls
        self._timeout = runtime.settings.timeout
        self._counters = counters
        self._group = group
        self._expected = expected
        self._failure = ""
        # The last values before a failure raised the counters.
        self._seen = counters.shared.values()
        self._is_leaving = False
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bmt-tp-rows", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise :class:`CallError` if the transfers have failed."""
        if self._failure or self._counters.shared[_Counters.failed]:
            raise CallError(self._failure or _FAILED_ELSEWHERE)

    def shorten_timeout(self) -> None:
        """Note that this rank is shutting down: from now on transfers fail after ``_PATIENCE``
        seconds without a change.
        """
        self._is_leaving = True

    def leave(self) -> None:
        """End the thread, and tell the other ranks that this rank has left. No transfer may be
        under way.
        """
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
        """Whether a piece that this rank expects has not arrived. A sender may also be ahead, with
        more pieces than expected.
        """
        rank, shared = self._group.rank, self._counters.shared
        missing = [
            (expected - shared[self._counters.full_index(rank, source, number)]) & WRAP
            for number, of_ranks in enumerate(self._expected)
            for source, expected in enumerate(of_ranks)
        ]
        return any(0 < pieces < _LIFT for pieces in missing)

    def _reason(self, still: float) -> str:
        """Return why the transfers have failed, or an empty text; no counter has changed for
        ``still`` seconds.
        """
        if self._counters.shared[_Counters.failed]:
            return _FAILED_ELSEWHERE
        if self._calls is not None and self._calls.watch.failure is not None:
            return self._calls.watch.failure
        ranks, own = self._group.ranks, self._group.rank
        left = [
            rank for i, rank in enumerate(ranks) if self._counters.shared[self._counters.left(i)]
        ]
        if still > _PATIENCE and (left or self._is_leaving):
            rank = left[0] if left else ranks[own]
            return (
                f"Rank {rank} has ended its run in the middle of an exchange of rows with ranks"
                f" {ranks}. Look at its output."
            )
        if still > self._timeout:
            return (
                f"Rank {ranks[own]} has waited {self._timeout:g} s for rows of the tensor-parallel"
                f" ranks {ranks}. All of them must run the same layers: look at the output of"
                " the others."
            )
        return ""

    def _tell(self) -> None:
        self._counters.shared[_Counters.failed] = 1
        if self._calls is not None and self._calls.watch.failure is None:
            self._calls.watch.fail(self._failure, self._calls.store.clone())

    def _lift(self) -> None:
        """Raise the counters so that no stream waits. Repeated, because a stream that goes on
        writes its counters again.
        """
        for index in range(1 + self._group.size, len(self._seen)):
            self._counters.shared[index] = self._seen[index] + _LIFT


_FAILED_ELSEWHERE = (
    "The exchange of rows between tensor-parallel ranks has failed on another rank. Look at"
    " its output."
)


def connected(runtime: Runtime, group: Group, lane: CudaLane) -> PeerRows | None:
    """Return the :class:`PeerRows` of ``group``, or warn and return None if its ranks cannot share
    GPU memory. Collective.
    """
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
                problem = (
                    f"rank {runtime.rank} cannot share memory with rank {group.ranks[0]}: {error}"
                )
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
    return (
        link,
        "" if link is not None else f"the kernels {runtime.kernels.name!r} have no peer_link()",
    )


def _file_or_problem(count: int) -> tuple[Path | None, str]:
    try:
        return new_counters_file(count), ""
    except OSError as error:
        return None, str(error)


def _shared_memory(
    link: PeerLink, group: Group, length: int, device: torch.device
) -> _Memory | str:
    """Return inboxes of ``length`` bytes, or, on every rank, a text that says why one rank could
    not make them. Collective.
    """
    problem, handle, offset = "", b"", 0
    memory: torch.Tensor | None = None
    try:
        memory = torch.empty(INBOXES * length, dtype=torch.uint8, device=device)
        handle, offset = link.shared(memory.data_ptr())
    except RuntimeError as error:  # also if memory is exhausted
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
            "bmt: tensor-parallel ranks %s exchange rows by collectives, which takes longer than"
            " copies between their devices: %s.",
            group.ranks,
            reason,
        )
