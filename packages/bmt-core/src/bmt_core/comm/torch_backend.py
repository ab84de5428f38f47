"""The default communication backend: process groups of ``torch.distributed`` (gloo for CPU tensors, NCCL for CUDA).

[Note: the end of a group]
Gloo runs collectives in threads of its own, which let go of a tensor a moment after the caller has waited for it. A thread that
does so while the interpreter ends aborts the process, so the threads must end before. They end with torch's group, when nobody
keeps it: :meth:`TorchBackend.close` takes it from the groups, which models keep. But torch's group waits for what is under way,
perhaps for ranks that never come. Such a group is kept for ever, with its tensors, and a rank that failed can leave.

[Note: groups of their members]
Only the members of a group make it, when they first use it. So groups have names, not numbers (:func:`make_process_group`), and
the group of all ranks is not bound to a device: NCCL would then split every later group off it, which needs all ranks.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bmt_core.comm.protocols import AllOf, CommBackend, CommContext, Finished, Group, ReduceOp, Work
from bmt_core.errors import ConfigError, NotInitializedError, RemoteError
from bmt_core.torch_internals import make_process_group

# torch 2.13 renamed these two and deprecates the names that torch 2.11 has.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_GIVEN_BACK = "This group was given back by shutdown(). Call init_distributed() to start another run."
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


class TorchGroup(Group):
    """A group over one ``torch.distributed`` process group."""

    def __init__(self, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup) -> None:
        self.ranks = ranks
        self.rank = rank
        self._process_group: dist.ProcessGroup | None = process_group
        self._under_way: list[_UnderWay] = []

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group, until the run ends."""
        if self._process_group is None:
            raise NotInitializedError(_GIVEN_BACK)
        return self._process_group

    def close(self) -> None:
        """Let go of torch's group: see [Note: the end of a group]."""
        left = [work.tensors for work in self._under_way if not work.is_over()]
        if left:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((left, self._process_group)))  # nobody ever undoes this
        self._process_group = None

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """See :meth:`Group.all_gather`; moves bytes, so every dtype travels."""
        return self._started(_all_gather_single, _bytes(output), _bytes(input))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Group.reduce_scatter`."""
        if output.dtype == input.dtype:
            return self._started(_reduce_scatter_single, output, input, op=_REDUCE_OPS[op])
        if op not in ("sum", "avg"):
            raise ValueError(f"reduce_scatter into a wider dtype knows sum and avg, not {op}.")
        parts = torch.empty_like(input)
        work = self._started(dist.all_to_all_single, _bytes(parts), _bytes(input))
        return SumOfParts(work, parts, output, self.size if op == "avg" else 1)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Group.all_reduce`."""
        return self._started(dist.all_reduce, tensor, op=_REDUCE_OPS[op])

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """See :meth:`Group.broadcast`."""
        return self._started(dist.broadcast, _bytes(tensor), src=self.ranks[root])

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """See :meth:`Group.send`."""
        return dist.isend(_bytes(tensor), self.ranks[dst], group=self.process_group)  # type: ignore[return-value]

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """See :meth:`Group.recv`."""
        return dist.irecv(_bytes(tensor), self.ranks[src], group=self.process_group)  # type: ignore[return-value]

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]) -> Work:
        """See :meth:`Group.exchange`; one batch, which NCCL starts as one group."""
        batch = [(dist.irecv, *recv) for recv in recvs] + [(dist.isend, *send) for send in sends]
        operations = [
            dist.P2POp(start, _bytes(tensor), self.ranks[peer], self.process_group) for start, tensor, peer in batch
        ]
        works: Any = dist.batch_isend_irecv(operations) if operations else []
        return AllOf(works)

    def _started(self, operation: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> Work:
        """Start a collective: on the CPU beside the caller, on CUDA in the order of the current stream.

        Told to be asynchronous, torch would put NCCL's kernels on a stream of its own, with two events and the host's time for
        them at each call. What is to run beside the computation is issued in a lane, which is a stream already.
        """
        work = operation(*tensors, group=self.process_group, async_op=not tensors[0].is_cuda, **options)
        if work is None:
            return Finished()
        started = _UnderWay(work, tensors)
        self._under_way = [*(other for other in self._under_way if not other.is_over()), started]
        return started


class SingleGroup(Group):
    """The group of one rank: every collective is the identity and nothing leaves the process."""

    def __init__(self, rank: int) -> None:
        self.ranks = (rank,)
        self.rank = 0

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Copy ``input`` to ``output`` unless they are one memory already."""
        return _copied(output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Copy ``input`` to ``output``: one summand."""
        return _copied(output, input)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Leave ``tensor`` as it is: one summand."""
        return Finished()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Leave ``tensor`` as it is: the root is this rank."""
        return Finished()

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Refuse: there is nobody to send to."""
        raise ConfigError("send needs a second rank, and this group has one. Start more ranks.")

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Refuse: there is nobody to receive from."""
        raise ConfigError("recv needs a second rank, and this group has one. Start more ranks.")


class TorchBackend(CommBackend):
    """Groups over ``torch.distributed``; a run of one rank makes no process group and opens no port."""

    name = "torch"

    def __init__(self, context: CommContext) -> None:
        super().__init__(context)
        self._engines = "cpu:gloo,cuda:nccl" if context.device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=context.timeout)
        self._groups: list[TorchGroup] = []
        self._is_closed = False
        if context.world_size == 1:
            return
        # Its functions have the group of all ranks as a default: if they are defined later, they keep it.
        importlib.import_module("torch.distributed.nn")
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is initialised already. Let init_distributed() do it: remove your init_process_group() call."
            )
        dist.init_process_group(
            self._engines, store=context.store, rank=context.rank, world_size=context.world_size, timeout=self._timeout
        )
        try:
            self._connect_devices(dist.group.WORLD)
        except BaseException:
            self.close()
            raise

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        """See :meth:`CommBackend.new_group`; the first group, of all ranks, is the one that torch made at start.

        Raises :class:`RemoteError` when the other members do not come within the run's timeout.
        """
        if self._is_closed:
            raise NotInitializedError(_GIVEN_BACK)
        process_group: Any = self._new_process_group(ranks, name) if self._groups else dist.group.WORLD
        group = TorchGroup(ranks, ranks.index(self.context.rank), process_group)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Destroy the process groups. No barrier: a rank that failed must be able to leave."""
        self._is_closed = True
        if self.context.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        for group in self._groups:
            group.close()

    def _new_process_group(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        rank = self.context.rank
        assert self.context.store is not None
        store = dist.PrefixStore("bmt-groups", self.context.store)
        try:
            process_group = make_process_group(
                ranks, rank, backend=self._engines, store=store, name=name, timeout=self._timeout
            )
            self._connect_devices(process_group)
        except dist.DistError as error:
            raise RemoteError(
                f"Rank {rank} waited {self.context.timeout:g} s for the other members of the group of ranks {ranks} to use it:"
                f" {error}. Look at their output; all members of a group must take part in what is done on it."
            ) from error
        return process_group

    def _connect_devices(self, process_group: Any) -> None:
        """Let NCCL connect now, with all members, and not in the first operation, which may concern two of them only."""
        if self.context.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.context.device), group=process_group)


class SumOfParts:
    """The :class:`Work` that waits for the parts of all ranks, then adds them in the output's dtype, once."""

    def __init__(self, work: Work, parts: torch.Tensor, output: torch.Tensor, divisor: int) -> None:
        self._work = work
        self._parts: torch.Tensor | None = parts
        self._output = output
        self._divisor = divisor

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        self._work.wait()
        torch.sum(parts.view(-1, self._output.numel()), dim=0, dtype=self._output.dtype, out=self._output)
        if self._divisor > 1:
            self._output.div_(self._divisor)


class _UnderWay:
    """The :class:`Work` of a collective on ``tensors`` that another thread runs."""

    def __init__(self, work: dist.Work, tensors: tuple[torch.Tensor, ...]) -> None:
        self._work: dist.Work | None = work  # until it was waited for: it keeps the tensors, too
        self.tensors = tensors

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        if self._work is not None:
            self._work.wait()
            self._work, self.tensors = None, ()

    def is_over(self) -> bool:
        """Whether the thread is done with the tensors, or about to be."""
        return self._work is None or self._work.is_completed()  # gloo's reduce-scatter never says so


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A complex or float8 tensor is unknown to the engines, bytes are not; a 0-dim tensor has no byte view.
    if not tensor.is_contiguous():
        _refuse_strided(tensor)
    # Not reshape: a tensor of one element is contiguous with any stride, which reshape keeps and the view of bytes refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _refuse_strided(tensor: torch.Tensor) -> None:
    raise ValueError(
        f"A collective needs contiguous tensors, and this one has shape {tuple(tensor.shape)} and strides {tensor.stride()}."
        " Call .contiguous() first."
    )


def _copied(output: torch.Tensor, input: torch.Tensor) -> Work:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
    return Finished()
