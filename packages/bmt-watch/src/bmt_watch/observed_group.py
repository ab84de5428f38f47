"""``ObservedGroup``: any backend's group, whose calls are compared with those of the other ranks,
noted and watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.protocols import Group, ReduceOp, Work, is_completed
from bmt_watch.call_check import GroupCalls
from bmt_watch.rank_states import Call

_Parts = Sequence[tuple[torch.Tensor, int]]


class ObservedGroup(LazyGroup):
    """The group ``inner`` of any backend; ``calls`` compares and notes its operations."""

    def __init__(self, inner: Group, calls: GroupCalls) -> None:
        connect = inner.connected if isinstance(inner, LazyGroup) else lambda: inner
        super().__init__(inner.ranks, inner.rank, connect)
        self._calls = calls
        self._is_lazy = isinstance(inner, LazyGroup)

    def connected(self) -> Group:
        """Return the group that communicates. The first call is collective over the members."""
        if self._connected is None:
            if self._is_lazy:
                self._calls.connect()
            self._connected = self._connect()
        return self._connected

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        operation = "all_gather", input.dtype
        return self._started(operation, input, self.connected().all_gather, output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        wider = () if output.dtype == input.dtype else (output.dtype,)
        operation = "reduce_scatter", op, input.dtype, *wider
        return self._started(operation, input, self.connected().reduce_scatter, output, input, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        operation = "all_reduce", op, tensor.dtype
        return self._started(operation, tensor, self.connected().all_reduce, tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        operation = "broadcast from rank", self.ranks[root], tensor.dtype
        return self._started(operation, tensor, self.connected().broadcast, tensor, root)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        send = self.connected().send
        return self._transfer("a send to", [(tensor, dst)], send, tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        recv = self.connected().recv
        return self._transfer("a receive from", [(tensor, src)], recv, tensor, src)

    def exchange(self, sends: _Parts, recvs: _Parts) -> Work:
        parts, exchange = [*sends, *recvs], self.connected().exchange
        if not parts:
            return exchange(sends, recvs)
        return self._transfer("an exchange with", parts, exchange, sends, recvs)

    def _started(
        self,
        operation: tuple[object, ...],
        tensor: torch.Tensor,
        start: Callable[..., Work],
        *arguments: Any,
    ) -> Work:
        calls = self._calls
        if calls.is_closed:
            return start(*arguments)
        if tensor.is_cuda:
            calls.enter_on_device(operation, tensor)
            return self._queued(start, arguments)
        group = self.connected()
        call = calls.enter(operation, tensor, meets=not group.is_interruptible)
        return _UnderWay(calls, call, self._queued(start, arguments), group)

    def _transfer(
        self, what: str, parts: _Parts, start: Callable[..., Work], *arguments: Any
    ) -> Work:
        if self._calls.is_closed:
            return start(*arguments)
        call = self._calls.enter_transfer(what, [peer for _, peer in parts])
        if parts[0][0].is_cuda:
            return self._queued(start, arguments)
        group = self.connected()
        work = self._calls.guard(call, start, arguments, _interrupt(group))
        return _UnderWay(self._calls, call, work, group)

    def _queued(self, start: Callable[..., Work], arguments: tuple[Any, ...]) -> Work:
        try:
            return start(*arguments)
        except RuntimeError:
            self._calls.raise_failure()  # which has ended the calls of the group
            raise


class _UnderWay:
    """The :class:`Work` of a call on the CPU, whose errors say which rank is gone."""

    def __init__(self, calls: GroupCalls, call: Call, work: Work, group: Group) -> None:
        self._calls = calls
        self._interrupt = _interrupt(group)
        self._call = call
        self._work: Work | None = work  # None after wait(): it would keep the tensors
        calls.has_started(call, self)

    def wait(self) -> None:
        work = self._work
        if work is not None:
            self._calls.guard(self._call, work.wait, (), self._interrupt)
            self._work = None

    def is_completed(self) -> bool:
        """Whether it is known to have ended well. Another thread may ask."""
        work = self._work
        return work is None or is_completed(work)


def _interrupt(group: Group) -> Callable[[], None] | None:
    return group.interrupt if group.is_interruptible else None
