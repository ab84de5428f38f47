"""``ObservedGroup``: any backend's group, whose calls are compared with those of the other ranks,
noted and watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.protocols import Group, ReduceOp, Work, is_completed
from bmt_watch.call_check import GroupCalls
from bmt_watch.call_log import RECORDS
from bmt_watch.rank_states import Call

_Parts = Sequence[tuple[torch.Tensor, int]]


class ObservedGroup(LazyGroup):
    """The group ``inner`` of any backend; ``calls`` compares and notes its operations."""

    def __init__(self, inner: Group, calls: GroupCalls) -> None:
        connect = inner.connected if isinstance(inner, LazyGroup) else lambda: inner
        super().__init__(inner.ranks, inner.rank, connect)
        self._calls = calls
        self._is_lazy = isinstance(inner, LazyGroup)
        self._interrupt: Callable[[], None] | None = None

    def connected(self) -> Group:
        """Return the group that communicates. The first call is collective over the members."""
        if self._connected is None:
            if self._is_lazy:
                self._calls.connect()
            self._connected = group = self._connect()
            self._interrupt = group.interrupt if group.is_interruptible else None
        return self._connected

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._started(("all_gather", input.dtype), input, "all_gather", output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        wider = () if output.dtype == input.dtype else (output.dtype,)
        operation = "reduce_scatter", op, input.dtype, *wider
        return self._started(operation, input, "reduce_scatter", output, input, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self._started(("all_reduce", op, tensor.dtype), tensor, "all_reduce", tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        operation = "broadcast from rank", self.ranks[root], tensor.dtype
        return self._started(operation, tensor, "broadcast", tensor, root)

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        send = self.connected().send
        return self._transfer("a send to", [(tensor, dst)], send, tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        recv = self.connected().recv
        return self._transfer("a receive from", [(tensor, src)], recv, tensor, src)

    def exchange(self, sends: _Parts, recvs: _Parts) -> Work:
        parts, exchange = [*sends, *recvs], self.connected().exchange
        return self._transfer("an exchange with", parts, exchange, sends, recvs)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        parts = [(tensor, peer) for peer, tensor in enumerate(inputs) if peer != self.rank]
        all_to_all = self.connected().all_to_all
        return self._transfer("an all-to-all with", parts, all_to_all, outputs, inputs)

    def _started(
        self, operation: tuple[object, ...], tensor: torch.Tensor, name: str, *arguments: Any
    ) -> Work:
        group, calls = self._connected or self.connected(), self._calls
        start, call = getattr(group, name), None
        if calls.end.has_left:
            work: Work = start(*arguments)
            return work
        if tensor.is_cuda:
            calls.enter_on_device(operation, tensor)
        else:
            call = calls.enter(operation, tensor, meets=self._interrupt is None)
        try:
            work = start(*arguments)
        except RuntimeError as error:
            calls.raise_cause(error)
            raise
        return work if call is None else _UnderWay(calls, call, work, self._interrupt)

    def _transfer(
        self, what: str, parts: _Parts, start: Callable[..., Work], *arguments: Any
    ) -> Work:
        calls = self._calls
        if calls.end.has_left or not parts:
            return start(*arguments)
        call = calls.enter_transfer(what, [peer for _, peer in parts])
        if not parts[0][0].is_cuda:
            work = calls.guard(call, start, arguments, self._interrupt)
            return _UnderWay(calls, call, work, self._interrupt)
        try:
            return start(*arguments)
        except RuntimeError as error:
            calls.raise_cause(error)
            raise


class _UnderWay:
    """The :class:`Work` of a call on the CPU, whose errors say which rank is gone."""

    def __init__(
        self, calls: GroupCalls, call: Call, work: Work, interrupt: Callable[[], None] | None
    ) -> None:
        self._calls, self._call, self._interrupt = calls, call, interrupt
        self._work: Work | None = work  # None after wait(): it would keep the tensors
        if call.number:
            calls.log.under_way[call.record] = ref(self)
            calls.log.under_way.pop(call.record - RECORDS, None)  # for which nobody has waited

    def wait(self) -> None:
        work = self._work
        if work is not None:
            self._calls.guard(self._call, work.wait, (), self._interrupt)
            self._calls.log.under_way.pop(self._call.record, None)
            self._work = None

    def is_completed(self) -> bool:
        """Whether it is known to have ended well. Another thread may ask."""
        work = self._work
        return work is None or is_completed(work)
