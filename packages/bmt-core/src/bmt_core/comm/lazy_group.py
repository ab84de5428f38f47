"""``LazyGroup``: a group that is connected when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bmt_core.comm.protocols import Group, ReduceOp, Work


class LazyGroup(Group):
    """The group ``ranks``, in which this process is ``ranks[rank]``; ``connect`` makes the group
    that communicates.

    Constructing it communicates nothing, so that ranks which never use the group need not do
    anything. Each member's first operation, whichever it is, waits until every other member has
    started its first one.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, connect: Callable[[], Group]) -> None:
        self.ranks = ranks
        self.rank = rank
        self._connect = connect
        self._connected: Group | None = None

    def connected(self) -> Group:
        """Return the group that communicates. The first call is collective over the members."""
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def interrupt(self) -> None:
        if self._connected is not None:
            self._connected.interrupt()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self.connected().all_gather(output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        return self.connected().reduce_scatter(output, input, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self.connected().all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        return self.connected().broadcast(tensor, root)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        return self.connected().send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        return self.connected().recv(tensor, src)

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> Work:
        return self.connected().exchange(sends, recvs)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        return self.connected().all_to_all(outputs, inputs)
