"""Rows that travel between the ranks of the tensor-parallel group while they compute.

[Note: memory of a transfer] What a rank sends is kept by the :class:`RowTransfer` until the computation has waited for its copies;
where the rows of others arrive belongs to the transfer, too. So a transfer is ended by :meth:`RowTransfer.end` when the
computation has been given all that reads either, also when an exception passes.
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
    """(W, rows, features), where the rows of the others arrive. Those of this rank are for the caller, or for :meth:`start`."""
    of_ranks: tuple[torch.Tensor, ...]
    """The W parts of it."""

    @abstractmethod
    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        """Send ``rows``, which the computation has been given by now, and receive those of ``piece``; a rank may send to itself."""

    @abstractmethod
    def wait_for_next(self) -> None:
        """Let the computation wait for the first piece that it has not waited for."""

    @abstractmethod
    def wait(self) -> None:
        """Let the computation wait for the rest."""

    @abstractmethod
    def end(self) -> None:
        """See [Note: memory of a transfer]."""


class LaneTransfer(RowTransfer):
    """A transfer by exchanges of the group in the lane: works everywhere."""

    def __init__(self, ranks: TensorRanks, like: torch.Tensor, shape: tuple[int, int, int]) -> None:
        self._ranks = ranks
        self.all_rows = like.new_empty(shape)
        self.of_ranks = self.all_rows.unbind()
        self._under_way: list[tuple[Mark, torch.Tensor]] = []

    def start(self, rows: torch.Tensor, piece: Piece) -> None:
        lane, incoming = self._ranks.lane, part_of(self.of_ranks[piece.source], piece.part)
        if piece.to == self._ranks.rank:
            incoming.copy_(rows)
            return
        lane.after(lane.here())
        start = functools.partial(self._ranks.in_lane.exchange, [(rows, piece.to)], [(incoming, piece.source)])
        self._under_way.append((lane.run(start), rows))

    def wait_for_next(self) -> None:
        self._under_way[0][0].wait()
        del self._under_way[0]

    def wait(self) -> None:
        while self._under_way:
            self.wait_for_next()

    def end(self) -> None:
        self.wait()

    def __del__(self) -> None:
        # On the CPU memory belongs to no stream, and the peer of a rank that failed may never come.
        if self._under_way and self.all_rows.is_cuda:
            self.wait()


class PeerTransfer(RowTransfer):
    """A transfer by copies into the other ranks' memory: see :mod:`bmt_tp.peer_rows`."""

    def __init__(self, peers: PeerRows, inbox: Inbox) -> None:
        self._peers = peers
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
            self._peers.serve_again(self._inbox)
            self._inbox = None
            self._kept.clear()

    def __del__(self) -> None:
        self.end()


def begin_transfer(ranks: TensorRanks, like: torch.Tensor, shape: tuple[int, int, int]) -> RowTransfer:
    """Return a transfer of (W, rows, features), in the dtype and on the device of ``like``. Collective."""
    peers = _peers(ranks) if like.is_cuda else None
    inbox = None if peers is None else peers.inbox(shape, like.dtype)
    return LaneTransfer(ranks, like, shape) if peers is None or inbox is None else PeerTransfer(peers, inbox)


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
