"""Rows that travel between the ranks of the tensor-parallel group while they compute.

[Note: memory of a transfer] Where the rows of others arrive is there until :meth:`RowTransfer.end`, which is called when the
computation has been given all that reads them, also when an exception passes. What a rank sends is kept until it has been read.
Where it ``lends`` memory of its caller, who may write to it, the computation waits for that.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import torch

from bmt_core.run.lanes import CudaLane, Mark
from bmt_core.run.runtime import current
from bmt_tp.peer_rows import Inbox, PeerRows, connected
from bmt_tp.tensor_group import TensorRanks


class Piece(NamedTuple):
    """One exchange: which rows go to which rank, and which rows come from which; ``part`` None is all rows of a rank."""

    to: int
    source: int
    part: slice | None


class RowTransfer(ABC):
    """Rows of other ranks on their way to this one, and of this rank to them. All ranks of the group make it together."""

    all_rows: torch.Tensor
    """(W, rows, features), where the rows of the others arrive. Those of this rank are for the caller to write."""
    of_ranks: tuple[torch.Tensor, ...]
    """The W parts of it."""

    @abstractmethod
    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        """Send ``rows``, which the computation has been given by now, and receive those of ``piece``."""

    @abstractmethod
    def wait_for_next(self) -> None:
        """Let the computation wait for the first piece that it has not waited for."""

    @abstractmethod
    def wait(self) -> None:
        """Let the computation wait for the rest."""

    @abstractmethod
    def end(self) -> None:
        """See [Note: memory of a transfer]."""


class UnderWay:
    """What the lane has been given, in order, with the memory that it reads and writes.

    The memory is kept until the computation has waited, also when an exception passes.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[Mark, tuple[torch.Tensor, ...]]] = deque()

    def add(self, mark: Mark, *memory: torch.Tensor) -> None:
        """Keep ``memory`` until the computation has waited for ``mark``."""
        self._marks.append((mark, memory))

    def wait_for_next(self) -> None:
        """Wait for the first that nobody has waited for."""
        self._marks[0][0].wait()
        self._marks.popleft()

    def wait(self) -> None:
        """Wait for the rest."""
        while self._marks:
            self.wait_for_next()

    def __del__(self) -> None:
        # On the CPU memory belongs to no stream, and the peer of a rank that failed may never come.
        if self._marks and self._marks[0][1][0].is_cuda:
            self.wait()


class LaneTransfer(RowTransfer):
    """A transfer by exchanges of the group in the lane: works everywhere."""

    def __init__(self, ranks: TensorRanks, like: torch.Tensor, shape: tuple[int, int, int]) -> None:
        self._ranks = ranks
        self.all_rows = like.new_empty(shape)
        self.of_ranks = self.all_rows.unbind()
        self._under_way = UnderWay()

    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        lane, incoming = self._ranks.lane, part_of(self.of_ranks[piece.source], piece.part)
        lane.after(lane.here())
        start = functools.partial(self._ranks.in_lane.exchange, [(rows, piece.to)], [(incoming, piece.source)])
        self._under_way.add(lane.run(start), rows, self.all_rows)

    def wait_for_next(self) -> None:
        self._under_way.wait_for_next()

    def wait(self) -> None:
        self._under_way.wait()

    def end(self) -> None:
        self.wait()


class PeerTransfer(RowTransfer):
    """A transfer by copies into the other ranks' memory: see :mod:`bmt_tp.peer_rows`."""

    def __init__(self, peers: PeerRows, inbox: Inbox, *, lends: bool) -> None:
        self._peers = peers
        self._lends = lends
        self._inbox: Inbox | None = inbox
        self._expected: deque[tuple[int, int]] = deque()
        self._kept: list[torch.Tensor] = []
        self.all_rows, self.of_ranks = inbox.view.all_rows, inbox.view.of_ranks

    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        assert self._inbox is not None
        to, source, part = piece
        self._peers.send(self._inbox, rows, to, 0 if part is None else part.start)
        self._expected.append((source, self._peers.next_from(source)))
        self._kept.append(rows)

    def wait_for_next(self) -> None:
        assert self._inbox is not None
        source, piece = self._expected.popleft()
        self._peers.wait(source, piece, self._inbox.computation)

    def wait(self) -> None:
        while self._expected:
            self.wait_for_next()

    def end(self) -> None:
        if self._inbox is not None:
            self.wait()
            self._peers.end(self._inbox, self._kept, waits=self._lends)
            self._inbox = None

    def __del__(self) -> None:
        self.end()


def begin_transfer(
    ranks: TensorRanks, like: torch.Tensor, shape: tuple[int, int, int], *, lends: bool = False
) -> RowTransfer:
    """Return a transfer of (W, rows, features), in the dtype and on the device of ``like``. Collective.

    ``lends``: see [Note: memory of a transfer].
    """
    peers = _peers(ranks) if like.is_cuda else None
    inbox = None if peers is None else peers.inbox(shape, like.dtype)
    return (
        LaneTransfer(ranks, like, shape) if peers is None or inbox is None else PeerTransfer(peers, inbox, lends=lends)
    )


def part_of(rows: torch.Tensor, part: slice | None) -> torch.Tensor:
    """Return the ``part`` of ``rows``; all of them for None."""
    return rows if part is None else rows[part]


def _peers(ranks: TensorRanks) -> PeerRows | None:
    """Return the way into the other ranks' memory, looked for at the first transfer of the run; None: there is none."""
    if not _found:
        runtime, lane = current(), ranks.lane
        assert isinstance(lane, CudaLane)
        peers = connected(runtime, ranks.group, lane)
        _found.append(peers)
        runtime.at_shutdown.append(_found.clear)
        if peers is not None:
            runtime.at_shutdown.append(peers.close)
    return _found[0]


_found: list[PeerRows | None] = []
