"""Transfers of rows between the ranks of the tensor-parallel group during computation.

"The computation" is the stream on which the products run; "queued" means handed to a stream.

[Note: memory of a transfer] The memory in which rows arrive is valid until :meth:`RowTransfer.end`.
The caller ends a transfer when all work that reads the rows is queued; a transfer dropped by an
exception ends itself. Memory that a rank sends from is kept until it has been read. With
``waits_for_readers`` a transfer sends from memory of its caller, who may write to it after the
transfer's end: there the computation waits until that memory has been read.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import torch

from bmt_core.run.lanes import CudaLane, Mark
from bmt_core.run.runtime import Runtime, current
from bmt_tp.peer_rows import Inbox, PeerRows, peer_rows
from bmt_tp.tensor_group import TensorRanks, tensor_ranks


class Piece(NamedTuple):
    """One exchange: rows go to rank ``to``, and rows of rank ``source`` arrive; ``part`` None is
    all rows of a rank.
    """

    to: int
    source: int
    part: slice | None


class RowTransfer(ABC):
    """One transfer of rows between this rank and the others. All ranks of the group make the same
    transfers in the same order.
    """

    all_rows: torch.Tensor
    """The memory (W, rows, features) in which the other ranks' rows arrive. The caller writes this
    rank's rows.
    """
    joined_rows: torch.Tensor
    """``all_rows`` as one matrix (W * rows, features)."""
    of_ranks: tuple[torch.Tensor, ...]
    """``all_rows`` as W matrices (rows, features)."""

    @abstractmethod
    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        """Send ``rows``, whose computation is queued, and receive the rows of ``piece``."""

    @abstractmethod
    def wait_for_next(self) -> None:
        """Make the computation wait for the next piece, in the order in which pieces
        were started.
        """

    @abstractmethod
    def wait(self) -> None:
        """Make the computation wait for all remaining pieces."""

    @abstractmethod
    def end(self) -> None:
        """See [Note: memory of a transfer]."""


class UnderWay:
    """The operations queued in the lane, in order, each with the memory that it reads and writes.

    The memory is kept until the computation has waited for the operation, even if an exception
    drops this object.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Mark, tuple[torch.Tensor, ...]]] = deque()

    def add(self, mark: Mark, *memory: torch.Tensor) -> None:
        """Keep ``memory`` until the computation has waited for ``mark``."""
        self._marks.append((mark, memory))

    def wait_for_next(self) -> None:
        """Wait for the first operation that has not been waited for."""
        self._marks[0][0].wait()
        self._marks.popleft()

    def wait(self) -> None:
        """Wait for all remaining operations."""
        while self._marks:
            self.wait_for_next()

    def __del__(self) -> None:
        # Not on the CPU: memory belongs to no stream there, and the wait would block for a rank
        # that has failed.
        if self._marks and self._marks[0][1][0].is_cuda:
            self.wait()


class LaneTransfer(RowTransfer):
    """A transfer by sends and receives of the backend, queued in the lane. Works on every device
    and backend.
    """

    def __init__(self, ranks: TensorRanks, like: torch.Tensor, shape: tuple[int, int, int]) -> None:
        self._ranks = ranks
        self.all_rows = like.new_empty(shape)
        self.joined_rows = self.all_rows.flatten(0, 1)
        self.of_ranks = self.all_rows.unbind()
        self._under_way = UnderWay()

    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        lane, incoming = self._ranks.lane, part_of(self.of_ranks[piece.source], piece.part)
        lane.follow()
        start = functools.partial(
            self._ranks.in_lane.exchange, [(rows, piece.to)], [(incoming, piece.source)]
        )
        self._under_way.add(lane.run(start), rows, self.all_rows)

    def wait_for_next(self) -> None:
        self._under_way.wait_for_next()

    def wait(self) -> None:
        self._under_way.wait()

    def end(self) -> None:
        self.wait()


class PeerTransfer(RowTransfer):
    """A transfer by copies into the memory of the other ranks' GPUs: see
    :mod:`bmt_tp.peer_rows`.
    """

    def __init__(self, peers: PeerRows, inbox: Inbox, *, waits_for_readers: bool) -> None:
        self._peers = peers
        self._waits_for_readers = waits_for_readers
        self._inbox: Inbox | None = inbox
        self._expected: deque[tuple[int, int]] = deque()
        self._kept: list[torch.Tensor] = []
        self.all_rows, self.joined_rows, self.of_ranks, *_ = inbox.view

    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        assert self._inbox is not None
        to, source, part = piece
        self._peers.send(self._inbox, rows, to, 0 if part is None else part.start)
        self._expected.append((source, self._peers.next_from(source, self._inbox)))
        self._kept.append(rows)

    def wait_for_next(self) -> None:
        assert self._inbox is not None
        source, piece = self._expected.popleft()
        self._peers.wait(source, piece, self._inbox)

    def wait(self) -> None:
        while self._expected:
            self.wait_for_next()

    def end(self) -> None:
        if self._inbox is not None:
            self.wait()
            self._peers.end(self._inbox, self._kept, waits=self._waits_for_readers)
            self._inbox = None

    def __del__(self) -> None:
        self.end()


def begin_transfer(
    ranks: TensorRanks,
    like: torch.Tensor,
    shape: tuple[int, int, int],
    *,
    waits_for_readers: bool = False,
    beside: bool = True,
) -> RowTransfer:
    """Return a transfer of ``shape`` (W, rows, features), in the dtype and on the device of
    ``like``. Collective.

    ``waits_for_readers``: see [Note: memory of a transfer]. With ``beside`` False the caller
    computes nothing until the rows have arrived; copies between devices are then queued on the
    computation's stream, which takes less host time than the lane.
    """
    peers = current().state(_peers) if like.is_cuda else None
    inbox = None if peers is None else peers.inbox(shape, like.dtype, beside=beside)
    return (
        LaneTransfer(ranks, like, shape)
        if peers is None or inbox is None
        else PeerTransfer(peers, inbox, waits_for_readers=waits_for_readers)
    )


def part_of(rows: torch.Tensor, part: slice | None) -> torch.Tensor:
    """Return the ``part`` of ``rows``; all of them for None."""
    return rows if part is None else rows[part]


def _peers(runtime: Runtime) -> PeerRows | None:
    """Return the connection to the other ranks' GPU memory, made at the run's first transfer; None
    if it cannot be made.
    """
    ranks = tensor_ranks()
    assert isinstance(ranks.lane, CudaLane)
    peers = peer_rows(runtime, ranks.group, ranks.lane)
    if peers is not None:
        runtime.at_shutdown.append(peers.close)
    return peers
