"""The groups of the backend: arguments are checked here, then addresses go to the
compiled module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from bmt_core.comm.protocols import AllOf, Finished, Group, ReduceOp, Work
from bmt_core.comm.torch_backend import ReduceScatterByAllToAll
from bmt_kernels.nccl.arguments import (
    check_apart,
    check_member,
    check_same_dtype,
    check_tensor,
    check_whole_and_part,
    check_widening,
    reduction,
)

if TYPE_CHECKING:
    from bmt_kernels._nccl import Communicator

# Operations are queued on the caller's stream, so later work on it follows them without a wait.
_STARTED = Finished()
_Parts = Sequence[tuple[torch.Tensor, int]]


class NcclGroup(Group):
    """A group over one communicator of NCCL. ``host`` is the group of the same ranks for tensors on
    the CPU.
    """

    is_interruptible = True

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        communicator: Communicator,
        host: Group,
        device: torch.device,
    ) -> None:
        self.ranks = ranks
        self.rank = rank
        self.host = host
        self._communicator = communicator
        self._device = device

    def interrupt(self) -> None:
        """Interrupt the group on the CPU."""
        self.host.interrupt()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """See :meth:`Group.all_gather`; sends bytes, so that every dtype works."""
        if _is_on_host(output, input):
            return self.host.all_gather(output, input)
        check_tensor("all_gather: output", output, self._device)
        check_tensor("all_gather: input", input, self._device)
        check_same_dtype("all_gather", output, input)
        check_whole_and_part("all_gather", "output", output, "input", input, self.size)
        check_apart("all_gather", output, input, self.rank)
        if input.numel():
            self._communicator.all_gather(
                input.data_ptr(), output.data_ptr(), input.nbytes, self._stream()
            )
        return _STARTED

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        if _is_on_host(output, input):
            return self.host.reduce_scatter(output, input, op)
        check_tensor("reduce_scatter: output", output, self._device)
        check_tensor("reduce_scatter: input", input, self._device)
        check_whole_and_part("reduce_scatter", "input", input, "output", output, self.size)
        if output.dtype != input.dtype:
            check_widening(output, input, op)
            return self._sum_of_parts(output, input, op)
        element, number, count = reduction("reduce_scatter", output, op)
        check_apart("reduce_scatter", input, output, self.rank)
        if count:
            addresses = input.data_ptr(), output.data_ptr()
            self._communicator.reduce_scatter(*addresses, count, element, number, self._stream())
        return _STARTED

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        if _is_on_host(tensor):
            return self.host.all_reduce(tensor, op)
        check_tensor("all_reduce: tensor", tensor, self._device)
        element, number, count = reduction("all_reduce", tensor, op)
        if count:
            self._communicator.all_reduce(tensor.data_ptr(), count, element, number, self._stream())
        return _STARTED

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        if _is_on_host(tensor):
            return self.host.broadcast(tensor, root)
        check_tensor("broadcast: tensor", tensor, self._device)
        check_member("broadcast", "root", root, self.ranks)
        if tensor.numel():
            self._communicator.broadcast(tensor.data_ptr(), tensor.nbytes, root, self._stream())
        return _STARTED

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        return (
            self.host.send(tensor, dst)
            if _is_on_host(tensor)
            else self.exchange([(tensor, dst)], [])
        )

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        return (
            self.host.recv(tensor, src)
            if _is_on_host(tensor)
            else self.exchange([], [(tensor, src)])
        )

    def exchange(self, sends: _Parts, recvs: _Parts) -> Work:
        """See :meth:`Group.exchange`; all transfers of the device are started as one operation."""
        to_send = [self._part("send", "dst", *part) for part in sends if not _is_on_host(part[0])]
        to_receive = [
            self._part("recv", "src", *part) for part in recvs if not _is_on_host(part[0])
        ]
        works: list[Work] = [_STARTED]
        if len(to_send) < len(sends) or len(to_receive) < len(recvs):
            on_host = [[part for part in parts if _is_on_host(part[0])] for parts in (sends, recvs)]
            works.append(self.host.exchange(*on_host))
        if to_send or to_receive:
            outgoing, incoming = (
                [part for part in parts if part[1]] for parts in (to_send, to_receive)
            )
            self._communicator.exchange(outgoing, incoming, self._stream())
        return AllOf(works) if len(works) > 1 else _STARTED

    def _part(
        self, operation: str, name: str, tensor: torch.Tensor, peer: int
    ) -> tuple[int, int, int]:
        check_tensor(f"{operation}: tensor", tensor, self._device)
        check_member(operation, name, peer, self.ranks, other_than=self.rank)
        return tensor.data_ptr(), tensor.nbytes, peer

    def _sum_of_parts(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        parts = torch.empty_like(input)
        if output.numel():
            bytes_each = input.nbytes // self.size
            self._communicator.all_to_all(
                input.data_ptr(), parts.data_ptr(), bytes_each, self._stream()
            )
        rows = parts.view(self.size, -1)
        return ReduceScatterByAllToAll(_STARTED, rows, output, self.size if op == "avg" else 1)

    def _stream(self) -> int:
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream


def _is_on_host(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)
