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
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from bmt_core.comm.protocols import Group
from bmt_core.run.lanes import CudaLane
from bmt_core.run.runtime import Runtime
from bmt_core.torch_internals import stream_address
from bmt_tp.peers import (
    WRAP,
    Awaited,
    NoCopies,
    PeerCounters,
    PeerMemory,
    PeerWatch,
    SharedTensor,
    connected,
)

logger = logging.getLogger("bmt_tp")

INBOXES = 3
_ALIGNMENT = 512  # bytes
_MOST_VIEWS = 1024


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

    def __init__(self, runtime: Runtime, memory: PeerMemory, lane: CudaLane) -> None:
        self.lane = lane
        self._group = group = memory.group
        self._lane_stream = lane.stream.cuda_stream
        self._memory = memory
        self._link = memory.link
        self._device = runtime.device
        self._inboxes: SharedTensor | None = None
        self._length = 0  # of an inbox, in bytes
        self._too_much = WRAP**2  # the size in bytes at which making inboxes last failed
        self._is_closed = False
        ranks = range(group.size)
        self._counters = counters = _Counters(memory.counters, group.size)
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
        self._watch = PeerWatch(runtime, group, memory.counters, self._awaited)

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
        if self._inboxes is not None:
            self._memory.close(self._inboxes.opened)
        self._views.clear()
        self._kept.clear()
        self._inboxes = None
        self._memory.counters.unmap()

    def _awaited(self) -> Iterator[Awaited]:
        for number, of_ranks in enumerate(self._received):
            for source, pieces in enumerate(of_ranks):
                index = self._counters.full_index(self._group.rank, source, number)
                yield Awaited(source, index, pieces)

    def _new_view(
        self, number: int, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> View | None:
        length = shape[0] * shape[1] * shape[2] * dtype.itemsize
        with torch.inference_mode(False):  # a training may use what an evaluation makes
            if not length or (length > self._length and not self._has_grown(length)):
                return None
            return self._viewed(number, shape, dtype, length)

    def _viewed(
        self, number: int, shape: tuple[int, int, int], dtype: torch.dtype, length: int
    ) -> View:
        assert self._inboxes is not None
        start = number * self._length
        all_rows = self._inboxes.tensor[start : start + length].view(dtype).view(shape)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        row_bytes = shape[2] * dtype.itemsize
        offset = start + self._group.rank * shape[1] * row_bytes
        targets = [first + offset for first in self._inboxes.addresses]
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
        aligned = -(-length // _ALIGNMENT) * _ALIGNMENT
        inboxes = self._memory.shared(
            lambda: torch.empty(INBOXES * aligned, dtype=torch.uint8, device=self._device)
        )
        if isinstance(inboxes, NoCopies):
            self._too_much = length
            _warn(self._group, f"there is no memory for rows of {length} bytes: {inboxes.reason}")
            return False
        if self._inboxes is not None:
            # Nobody writes to the old memory any more, and a transfer that has not ended keeps its
            # own view of it.
            self._memory.close(self._inboxes.opened)
        self._inboxes, self._length = inboxes, aligned
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


class _Counters(NamedTuple):
    """Where the counters of [Note: inboxes] are among those of the group."""

    shared: PeerCounters
    size: int

    @staticmethod
    def count(size: int) -> int:
        """Return how many counters order the copies of a group of ``size`` ranks."""
        return size * INBOXES * (1 + size)

    def free_index(self, receiver: int, number: int) -> int:
        """Return the index of ``free``."""
        return self.shared.first + receiver * INBOXES + number

    def full_index(self, receiver: int, sender: int, number: int) -> int:
        """Return the index of ``full``."""
        pairs = receiver * self.size + sender
        return self.shared.first + self.size * INBOXES + pairs * INBOXES + number

    def full(self, receiver: int, sender: int, number: int) -> int:
        """Return the device address of ``full``."""
        return self.shared.address(self.full_index(receiver, sender, number))

    def free(self, receiver: int, number: int) -> int:
        """Return the device address of ``free``."""
        return self.shared.address(self.free_index(receiver, number))


def peer_rows(runtime: Runtime, group: Group, lane: CudaLane) -> PeerRows | None:
    """Return the :class:`PeerRows` of ``group``, or warn and return None if its ranks cannot share
    GPU memory. Collective.
    """
    memory = connected(runtime, group, _Counters.count(group.size))
    if isinstance(memory, NoCopies):
        if memory.kind != "unwanted":
            _warn(group, memory.reason)
        return None
    return PeerRows(runtime, memory, lane)


def _warn(group: Group, reason: str) -> None:
    if group.rank == 0:
        logger.warning(
            "bmt: tensor-parallel ranks %s exchange rows by collectives, which takes longer than"
            " copies between their devices: %s.",
            group.ranks,
            reason,
        )
