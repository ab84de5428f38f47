"""``LazyGroup``: a group whose members are known from the start, and which connects them at its first operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bmt_core.comm.protocols import Group, ReduceOp, Work


class LazyGroup(Group):
    """The group ``ranks``, in which this process is ``ranks[rank]``; ``connect`` makes the group that communicates.

    Making it communicates nothing, so ranks that never use the group need not take part in anything. The first operation
    of a member, whichever it is, waits until all other members have come to theirs.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, connect: Callable[[], Group]) -> None:
        self.ranks = ranks
        self.rank = rank
        self._connect = connect
        self._connected: Group | None = None

    def connected(self) -> Group:
        """Return the group that communicates. Collective over the members when it is called for the first time."""
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """See :meth:`Group.all_gather`."""
        return self.connected().all_gather(output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Group.reduce_scatter`."""
        return self.connected().reduce_scatter(output, input, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Group.all_reduce`."""
        return self.connected().all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """See :meth:`Group.broadcast`."""
        return self.connected().broadcast(tensor, root)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Group.send`."""
        return self.connected().send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Group.recv`."""
        return self.connected().recv(tensor, src)

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]) -> Work:
        """See :meth:`Group.exchange`."""
        return self.connected().exchange(sends, recvs)
