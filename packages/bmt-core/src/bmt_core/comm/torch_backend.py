"""The default communication backend: process groups of ``torch.distributed`` (gloo for CPU tensors,
NCCL for CUDA).

[Note: the end of a group]
Gloo runs collectives in its own threads, which release a tensor a moment after the caller has
waited for the collective. If that happens while the interpreter exits, the process aborts, so the
threads must end earlier. They end when torch's process group is freed. Models keep a reference to
their :class:`TorchGroup`, so :meth:`TorchBackend.close` removes the process group from it. But
freeing a process group waits for its unfinished collectives, perhaps for ranks that never come. So
a process group with unfinished collectives is leaked on purpose, with their tensors, so that a rank
that failed can exit.

[Note: groups are made by their members]
A group is made when it is first used, by its members alone. So groups are found by name and not by
counting (:func:`make_process_group`), and the group of all ranks is not bound to a device: NCCL
would then split every later group off it, which takes all ranks.

[Note: gloo beside NCCL]
A group has a process group of gloo for CPU tensors, on a GPU another one of NCCL. Gloo's learns the
members' addresses in a few requests (:class:`GlooAddresses`), and connects at once, so that the end
of any rank's process is an error on every other one. Torch's own group of all ranks is for the
program's calls of ``torch.distributed``; its gloo connects two ranks when they first talk.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from bmt_core.comm.gloo_addresses import GlooAddresses, gloo_connects, use_short_addresses
from bmt_core.comm.protocols import (
    AllOf,
    CommBackend,
    CommContext,
    Finished,
    Group,
    ReduceOp,
    Work,
    is_completed,
)
from bmt_core.errors import CallError, ConfigError, NotInitializedError, RemoteError
from bmt_core.threads import start_thread_that_may_stay
from bmt_core.torch_internals import abort_on_device, make_process_group

# torch 2.13 renamed these two and deprecates the names that torch 2.11 has.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_to_all_single: Any = (
    getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base
)

_is_own_call: ContextVar[bool] = ContextVar("is_own_call", default=False)
_KNOWN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_REDUCED_BY_GLOO = {
    *(*_KNOWN_DTYPES, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}
_ON_CURRENT_STREAM = dist.AllToAllOptions()
_ON_CURRENT_STREAM.asyncOp = False

_NEVER_SENT = 0x6D74  # a tag
_PIECE = timedelta(seconds=1)
_CHECKS_OF_MONITORS = 100  # a second
_INTERVAL_OF_MONITORS = "TORCH_NCCL_COORD_CHECK_MILSEC"
_PATIENCE = 10.0  # seconds until the calls that are to end have ended
_CLOSED = "This group was given back by shutdown(). Call init_distributed() to start another run."
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
is_own_call: Callable[[], bool] = _is_own_call.get
"""Whether a function of ``torch.distributed`` is called by bmt, and not by the program."""


class TorchGroup(Group):
    """A group over process groups of ``torch.distributed``: ``on_host`` takes CPU tensors, and
    ``on_device`` CUDA tensors.
    """

    is_interruptible = True

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        on_host: dist.ProcessGroup,
        on_device: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks = ranks
        self.rank = rank
        # By whether a tensor is on a GPU. Empty after the run.
        self._process_groups = {False: on_host}
        if on_device is not None:
            self._process_groups[True] = on_device
        self._under_way: list[_UnderWay] = []

    def process_group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Return torch's process group for ``tensor``; :class:`NotInitializedError` after
        the run.
        """
        try:
            return self._process_groups[tensor.is_cuda]
        except KeyError:
            if self._process_groups:
                raise ConfigError(
                    f"A run on the CPU has no group for a tensor on {tensor.device}. Move it to the"
                    ' CPU, or start with init_distributed(device="cuda").'
                ) from None
            raise NotInitializedError(_CLOSED) from None

    def close(self) -> None:
        """Drop torch's process groups: see [Note: the end of a group]."""
        unfinished = [work.tensors for work in self._under_way if not work.is_over()]
        if unfinished:
            # Leaked: never decremented.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((unfinished, self._process_groups)))
        self._process_groups = {}

    def interrupt(self) -> None:
        """See :meth:`Group.interrupt`. Gloo closes all connections of a group in which a receive
        takes longer than it may.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in self.ranks[: self.rank] + self.ranks[self.rank + 1 :]:
            with suppress(Exception):  # each way to fail closes connections; some peers are gone
                group = self._process_groups[False]
                received = dist.irecv(nothing, peer, group=group, tag=_NEVER_SENT)
                cast(Any, received).wait(timedelta(milliseconds=1))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """See :meth:`Group.all_gather`; sends bytes, so that every dtype works."""
        return self._started(_all_gather_single, _bytes(output), _bytes(input))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        if output.dtype == input.dtype:
            if input.is_cuda:
                return self._started(_reduce_scatter_single, output, input, op=_REDUCE_OPS[op])
            # Gloo's own reduce-scatter does the same, but one cannot wait for it in short pieces
            # of time.
            whole = input.clone()
            if input.dtype not in _REDUCED_BY_GLOO:
                raise _not_reduced(input.dtype)
            work = self._started(dist.all_reduce, whole, op=_REDUCE_OPS[op])
            return ReduceScatterByAllReduce(
                work, whole[self.rank * output.numel() :][: output.numel()], output
            )
        if op not in ("sum", "avg"):
            raise ValueError(f"reduce_scatter into a wider dtype knows sum and avg, not {op}.")
        parts = torch.empty_like(input)
        work = self._started(dist.all_to_all_single, _bytes(parts), _bytes(input))
        rows = parts.view(self.size, -1)
        return ReduceScatterByAllToAll(work, rows, output, self.size if op == "avg" else 1)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        if not tensor.is_cuda and tensor.dtype not in _REDUCED_BY_GLOO:
            raise _not_reduced(tensor.dtype)
        return self._started(dist.all_reduce, tensor, op=_REDUCE_OPS[op])

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        return self._started(dist.broadcast, _bytes(tensor), src=self.ranks[root])

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        with _own_call():
            group = self.process_group_of(tensor)
            return cast(Work, dist.isend(_bytes(tensor), self.ranks[dst], group=group))

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        with _own_call():
            group = self.process_group_of(tensor)
            return cast(Work, dist.irecv(_bytes(tensor), self.ranks[src], group=group))

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]]
    ) -> Work:
        """See :meth:`Group.exchange`; NCCL starts the batch as one group."""
        both = [*sends, *recvs]
        if not both:
            return Finished()
        if not all(0 <= peer < self.size and peer != self.rank for _, peer in both):
            raise ValueError(
                f"The peers of an exchange must be indices of the group's ranks {self.ranks}, and"
                f" not {self.rank}, which is this rank's own. They are"
                f" {[peer for _, peer in both]}."
            )
        if self.size == 2 and len(sends) < 2 and len(recvs) < 2 and both[0][0].is_cuda:
            self._swap(sends[0][0] if sends else None, recvs[0][0] if recvs else None)
            return Finished()
        batch = [(dist.irecv, *recv) for recv in recvs] + [(dist.isend, *send) for send in sends]
        found = [(kind, _bytes(tensor), self.ranks[peer]) for kind, tensor, peer in batch]
        process_group = self.process_group_of(both[0][0])
        with _own_call():
            operations = [dist.P2POp(*each, process_group) for each in found]
            return AllOf(cast(Any, dist.batch_isend_irecv(operations)))

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Group.all_to_all`; on CUDA on the current stream.

        A batch of sends and receives would run on a stream of torch's own. Memory that is freed
        after it is not used again until the GPU is done with it, and the host may be far ahead.
        """
        if not inputs[self.rank].is_cuda:
            return super().all_to_all(outputs, inputs)
        outputs[self.rank].copy_(inputs[self.rank])
        received, sent = ([_bytes(x) for x in tensors] for tensors in (outputs, inputs))
        received[self.rank], sent[self.rank] = received[self.rank][:0], sent[self.rank][:0]
        process_group: Any = self.process_group_of(inputs[0])
        work = process_group.alltoall(received, sent, _ON_CURRENT_STREAM)
        if work is not None:
            work.wait()
        return Finished()

    def _swap(self, outgoing: torch.Tensor | None, incoming: torch.Tensor | None) -> None:
        """Send to the other rank of a group of two, receive from it, or both, on the current
        stream: an all-to-all.

        Torch's batches of sends and receives take several times as much host time for the same NCCL
        call. In a larger group an all-to-all would wait for ranks that do not take part: torch
        sends empty parts, too. This calls the process group directly, because torch's function
        around it would double the host time.
        """
        sent = None if outgoing is None else _sendable(outgoing)
        received = None if incoming is None else _sendable(incoming)
        if sent is None or received is None:
            some = received if sent is None else sent
            assert some is not None
            sent, received = (
                some[:0] if sent is None else sent,
                some[:0] if received is None else received,
            )
        elif sent.dtype != received.dtype:
            sent, received = _bytes(sent), _bytes(received)
        sizes_sent, sizes_received = [0, 0], [0, 0]
        sizes_sent[1 - self.rank], sizes_received[1 - self.rank] = sent.shape[0], received.shape[0]
        work = _all_to_all_single(
            self.process_group_of(sent),
            received,
            sent,
            sizes_received,
            sizes_sent,
            _ON_CURRENT_STREAM,
        )
        if work is not None:
            work.wait()

    def _started(
        self, operation: Callable[..., Any], *tensors: torch.Tensor, **options: Any
    ) -> Work:
        """Start a collective: in gloo's threads on the CPU, on the current stream on CUDA.

        With ``async_op`` torch would run NCCL's kernels on another stream, at the cost of two
        events per call. That is not needed: a collective that is to overlap with computation is
        issued on the stream of a lane already.
        """
        process_group, is_cuda = self.process_group_of(tensors[0]), tensors[0].is_cuda
        token = _is_own_call.set(True)
        try:
            work = operation(*tensors, group=process_group, async_op=not is_cuda, **options)
        finally:
            _is_own_call.reset(token)
        if work is None:
            return Finished()
        started = _UnderWay(work, tensors)
        self._under_way = [*(other for other in self._under_way if not other.is_over()), started]
        return started


class SingleGroup(Group):
    """The group of one rank: every collective is the identity."""

    def __init__(self, rank: int) -> None:
        self.ranks = (rank,)
        self.rank = 0

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Copy ``input`` to ``output``, unless they are the same memory."""
        return _copied(output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        """Do the same as :meth:`all_gather`."""
        return _copied(output, input)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Leave ``tensor`` as it is."""
        return Finished()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        """Leave ``tensor`` as it is."""
        return Finished()

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        """Refuse: there is nobody to send to."""
        raise ConfigError("send needs a second rank, and this group has one. Start more ranks.")

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        """Refuse: there is nobody to receive from."""
        raise ConfigError("recv needs a second rank, and this group has one. Start more ranks.")


class TorchBackend(CommBackend):
    """Makes groups of ``torch.distributed``. A run of one rank initialises nothing and opens
    no port.
    """

    name = "torch"
    allows_copies = True

    def __init__(self, context: CommContext) -> None:
        super().__init__(context)
        self._is_on_device = context.device.type == "cuda"
        self._timeout = timedelta(seconds=context.timeout)
        self._groups: list[TorchGroup] = []
        self._on_device: list[dist.ProcessGroup] = []  # also those that connect
        self._is_closed = False
        self._failure: str | None = None  # for which the calls on devices were aborted
        if context.world_size == 1:
            return
        # Imported first, because its functions keep the group of all ranks as a default argument if
        # there is one.
        importlib.import_module("torch.distributed.nn")
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is initialised already. Let init_distributed() do it: call it"
                " before TrainingArguments or an Accelerator is made, because they do it too, and"
                " remove your init_process_group() call."
            )
        assert context.store is not None
        if context.hosts is not None:
            context.hosts.check_addresses()
        use_short_addresses()
        with gloo_connects(when_used=True), limited_checks_of_nccl(context.world_size):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._is_on_device else "gloo",
                store=context.store,
                rank=context.rank,
                world_size=context.world_size,
                timeout=self._timeout,
            )

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        """See :meth:`CommBackend.new_group`.

        Raises :class:`RemoteError` when the other members do not come within the run's timeout.
        """
        if self._is_closed:
            raise NotInitializedError(_CLOSED)
        on_device: dist.ProcessGroup | None = None
        try:
            on_host = self._process_group(ranks, name, "gloo")
            if self._is_on_device:
                of_all = cast(dist.ProcessGroup, dist.group.WORLD)
                is_first = not self._groups
                on_device = of_all if is_first else self._process_group(ranks, name, "nccl")
                self._connect_devices(on_device)
        except dist.DistError as error:
            raise RemoteError(
                f"Rank {self.context.rank} has not connected with the other members of the group of"
                f" ranks {ranks}, for which it waits at most {self.context.timeout:g} s: {error}."
                " Look at their output; all members of a group must take part in what is done"
                " on it."
            ) from None
        group = TorchGroup(ranks, ranks.index(self.context.rank), on_host, on_device)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Destroy the process groups, without a barrier: a rank that failed must be able
        to exit.
        """
        self._is_closed = True
        if self.context.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        self._on_device.clear()
        for group in self._groups:
            group.close()

    def abort(self, failure: str) -> None:
        """See :meth:`CommBackend.abort`.

        In a thread for each group, since one waits for the stream of its group, in which calls of
        other groups may come first.
        """
        self._failure = failure
        threads = [
            start_thread_that_may_stay(partial(abort_on_device, each), name="bmt-abort")
            for each in self._on_device
        ]
        end = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _process_group(self, ranks: tuple[int, ...], name: str, engine: str) -> dist.ProcessGroup:
        store, rank = self.context.store, self.context.rank
        assert store is not None
        if engine == "gloo":
            store = GlooAddresses(store, name, rank=ranks.index(rank), size=len(ranks))
        prefixed, name = dist.PrefixStore("bmt-groups", store), f"{name} {engine}"
        with gloo_connects(when_used=False):
            return make_process_group(
                ranks, rank, backend=engine, store=prefixed, name=name, timeout=self._timeout
            )

    def _connect_devices(self, process_group: dist.ProcessGroup) -> None:
        """Make NCCL connect all members now, not in the first operation, which may be a send
        between only two of them.
        """
        self._on_device.append(process_group)
        if self._failure is not None:  # after this line the process group is aborted, too
            raise CallError(self._failure)
        dist.all_reduce(torch.zeros(1, device=self.context.device), group=process_group)


class ReduceScatterByAllToAll:
    """The :class:`Work` of a reduce-scatter that receives all ranks' parts, a row of ``parts`` from
    each, and adds them in :meth:`wait`, in the output's dtype.
    """

    def __init__(self, work: Work, parts: torch.Tensor, output: torch.Tensor, divisor: int) -> None:
        self._work = work
        self._parts: torch.Tensor | None = parts
        self._output = output
        self._divisor = divisor

    def wait(self) -> None:
        parts, self._parts = self._parts, None  # a second wait() does nothing
        if parts is None:
            return
        self._work.wait()
        torch.sum(parts, dim=0, dtype=self._output.dtype, out=self._output)
        if self._divisor > 1:
            self._output.div_(self._divisor)

    def is_completed(self) -> bool:
        return is_completed(self._work)


class ReduceScatterByAllReduce:
    """The :class:`Work` of a reduce-scatter: it sums whole tensors and copies ``part`` of the sum
    to ``output`` in :meth:`wait`.
    """

    def __init__(self, work: Work, part: torch.Tensor, output: torch.Tensor) -> None:
        self._work = work
        self._part: torch.Tensor | None = part
        self._output = output

    def wait(self) -> None:
        part, self._part = self._part, None  # a second wait() does nothing
        if part is not None:
            self._work.wait()
            self._output.copy_(part)

    def is_completed(self) -> bool:
        return is_completed(self._work)


class _UnderWay:
    """The :class:`Work` of a collective on ``tensors`` that gloo runs in another thread."""

    def __init__(self, work: dist.Work, tensors: tuple[torch.Tensor, ...]) -> None:
        self._work: dist.Work | None = work  # None after wait(): it would keep the tensors
        self._has_failed = False
        self.tensors = tensors

    def wait(self) -> None:
        work = self._work
        if work is None:
            return
        while True:
            try:
                work.wait(_PIECE)  # in pieces: between them Python looks for Ctrl-C
                break
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises, unless it has ended well just now
                    break
        self._work, self.tensors = None, ()

    def is_completed(self) -> bool:
        return self.is_over() and not self._has_failed

    def is_over(self) -> bool:
        """Whether the thread has used the tensors for the last time. Another thread than that of
        :meth:`wait` may ask.
        """
        work = self._work
        if work is None or not work.is_completed():
            return work is None
        try:
            work.wait()
        except RuntimeError:
            self._has_failed = True
        return True


@contextmanager
def _own_call() -> Iterator[None]:
    token = _is_own_call.set(True)
    try:
        yield
    finally:
        _is_own_call.reset(token)


@contextmanager
def limited_checks_of_nccl(world_size: int) -> Iterator[None]:
    """Let torch's monitors of NCCL together ask the store at most :data:`_CHECKS_OF_MONITORS` times
    a second whether another rank has failed, unless the user has set an interval. By default the
    one of each rank asks once a second.

    torch reads this setting when it makes a process group of NCCL. Only the monitor of the first
    one in a process asks, so that one is made in the ``with`` statement, and no later one.
    """
    if _INTERVAL_OF_MONITORS in os.environ:
        yield
        return
    milliseconds = 1000 * max(_CHECKS_OF_MONITORS, world_size) // _CHECKS_OF_MONITORS
    os.environ[_INTERVAL_OF_MONITORS] = str(milliseconds)
    try:
        yield
    finally:
        del os.environ[_INTERVAL_OF_MONITORS]


def _not_reduced(dtype: torch.dtype) -> TypeError:
    return TypeError(f"{dtype} cannot be reduced on the CPU. Convert it first.")


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as it is, if NCCL and gloo know its dtype and it has rows to count, and
    else its bytes.
    """
    return tensor if tensor.dtype in _KNOWN_DTYPES and tensor.dim() > 0 else _bytes(tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"A collective needs contiguous tensors, and this one has shape {tuple(tensor.shape)}"
            f" and strides {tensor.stride()}. Call .contiguous() first."
        )
    # gloo and NCCL do not know every dtype (complex, float8), but they know bytes. A tensor of one
    # element cannot be viewed as bytes if it is 0-D, or if its stride, which is arbitrary,
    # is not 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _copied(output: torch.Tensor, input: torch.Tensor) -> Work:
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
    return Finished()
