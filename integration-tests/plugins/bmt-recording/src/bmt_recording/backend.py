"""The backend: it makes another backend's groups and wraps them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from bmt_core.comm import CommBackend, CommContext, Group, ReduceOp, Work
from bmt_core.errors import ConfigError
from bmt_core.plugins import Registry
from bmt_recording.records import Call, calls


class RecordingGroup(Group):
    """A group that records each call before the inner group gets it."""

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.ranks = inner.ranks
        self.rank = inner.rank

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """See ``Group.all_gather``."""
        self._record("all_gather", output)
        return self.inner.all_gather(output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        """See ``Group.reduce_scatter``."""
        self._record("reduce_scatter", input)
        return self.inner.reduce_scatter(output, input, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See ``Group.all_reduce``."""
        self._record("all_reduce", tensor)
        return self.inner.all_reduce(tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """See ``Group.broadcast``."""
        self._record("broadcast", tensor)
        return self.inner.broadcast(tensor, root)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See ``Group.send``."""
        self._record("send", tensor)
        return self.inner.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See ``Group.recv``."""
        self._record("recv", tensor)
        return self.inner.recv(tensor, src)

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> Work:
        """See ``Group.exchange``."""
        for tensor, _ in recvs:
            self._record("recv", tensor)
        for tensor, _ in sends:
            self._record("send", tensor)
        return self.inner.exchange(sends, recvs)

    def _record(self, op: str, tensor: torch.Tensor) -> None:
        calls.append(Call(op, self.ranks, tensor.dtype, tensor.numel(), tensor.nbytes))


class RecordingBackend(CommBackend):
    """Wraps the backend that ``BMT_RECORDING_INNER`` names, by default ``"torch"``."""

    name = "recording"

    def __init__(self, context: CommContext) -> None:
        super().__init__(context)
        inner = os.environ.get("BMT_RECORDING_INNER") or "torch"
        if inner == self.name:
            raise ConfigError(
                f"BMT_RECORDING_INNER={inner} would wrap itself. Name the backend that does"
                " the work."
            )
        self.inner: CommBackend = Registry.load().find("comm backend", inner)(context)

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        """Wrap the group that the inner backend makes."""
        return RecordingGroup(self.inner.new_group(ranks, name))

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()
