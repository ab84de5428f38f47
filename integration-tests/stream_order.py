"""What CUDA's streams would do with the memory of a run, found out on the CPU.

On CUDA the computation and each lane is a stream: what they are given runs later, in an order of
its own, and only marks that are waited for order one stream after another. The allocator hands
freed memory out again at once, to the stream that allocated it. Mistakes in that show on some GPUs,
in some runs. Here every operation on memory is noted with its stream, and each mark with how far
all streams are known to have come (vector clocks). It is a mistake

- to read what another stream writes, or to write what another stream reads or writes, without
  waiting for it;
- to free memory before the stream that allocated it was told to wait for all others that use it.

A lane that reads what is overwritten or freed meanwhile makes garbage, which is a mistake when
somebody reads that: a gather that was started ahead and dropped does no harm. To write what is
there already is no harm either. What runs is right in any case: a lane does at once what it
is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmt_core.comm import Finished, Group, TorchBackend, Work
from bmt_core.comm.protocols import ReduceOp
from bmt_core.run import lanes
from bmt_core.run.runtime import current


class Stream:
    """``seen`` says up to which of its operations each stream is known to be done, where this one
    goes on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[Stream, int] = {self: 0}

    def learn(self, seen: dict[Stream, int]) -> None:
        """Go on after what ``seen`` says."""
        for stream, time in seen.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))


@dataclass
class Run:
    """One collective in a lane, and what it wrote: each memory with the number of that write."""

    made: list[tuple[Memory, int]] = field(default_factory=list)


@dataclass
class Memory:
    """One storage. ``reads`` and ``writes`` are the last ones of each stream; reads with the
    collective that they were part of.
    """

    home: Stream  # which allocated it
    storage: StorageWeakRef
    text: str
    reads: dict[Stream, tuple[int, Run | None]] = field(default_factory=dict)
    writes: dict[Stream, int] = field(default_factory=dict)
    number_of_writes: int = 0
    garbage: str | None = None  # what is wrong with its contents


class Mark:
    """A point in the order of a stream."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.seen = dict(order.stream.seen)

    def wait(self) -> None:
        self._order.look()
        self._order.stream.learn(self.seen)


class Order:
    """Which stream did what with which memory; ``mistakes`` are texts."""

    def __init__(self) -> None:
        self.computation = self.stream = Stream("computation")
        self.run: Run | None = None  # the collective under way
        self.mistakes: list[str] = []
        self.is_looking = True
        self.uses = 0  # of memory by another stream than the one that allocated it
        self._memories: dict[int, Memory] = {}
        self._shared: dict[int, Memory] = {}  # those that several streams use

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Inside, what runs is given to ``stream``."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def look(self) -> None:
        """Look which memory was freed since the last look; called before anything changes what
        is ordered.
        """
        for key, memory in list(self._shared.items()):
            if memory.storage.expired():
                self.free(memory)
                del self._shared[key]

    def use(self, tensor: torch.Tensor, what: str, *, writes: bool, is_new: bool = False) -> None:
        """Note that the present stream reads or writes ``tensor``."""
        if (
            tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or not tensor.untyped_storage().nbytes()
        ):
            return
        memory = self._memory(tensor, what, is_new=is_new)
        stream = self.stream
        if stream is not memory.home:
            self.uses += 1
            self._shared[memory.storage.cdata] = memory
        stream.seen[stream] += 1
        if not writes:
            self._compare(memory.writes, stream, f"the {stream.name} reads {memory.text} in {what}")
            if memory.garbage is not None:
                self.mistakes.append(
                    f"{what} of the {stream.name} reads what was made while {memory.garbage}"
                )
            memory.reads[stream] = stream.seen[stream], self.run
            return
        self._end(memory, stream, f"the {stream.name} writes {memory.text} in {what}")
        memory.writes[stream] = stream.seen[stream]
        memory.number_of_writes += 1
        memory.garbage = None
        if self.run is not None:
            self.run.made.append((memory, memory.number_of_writes))

    def free(self, memory: Memory) -> None:
        """Note that the memory goes back to the stream that allocated it."""
        self._end(memory, memory.home, f"{memory.text} of the {memory.home.name} is freed")

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Note that ``storage`` is freed and given new memory of ``size`` bytes."""
        self.look()
        memory = self._memories.pop(storage._cdata, None)
        self._shared.pop(storage._cdata, None)
        if memory is not None and storage.nbytes():
            self.free(memory)
        if size:
            made = Memory(
                self.stream, StorageWeakRef(storage), f"{size} bytes of a storage that was empty"
            )
            self._memories[storage._cdata] = made
            self.stream.seen[self.stream] += 1
            made.writes[self.stream] = self.stream.seen[self.stream]

    def _compare(self, times: dict[Stream, int], stream: Stream, text: str) -> None:
        for other, time in times.items():
            if stream.seen.get(other, 0) < time:
                self.mistakes.append(f"{text}, which does not wait for the {other.name}")

    def _end(self, memory: Memory, stream: Stream, text: str) -> None:
        """Note that ``stream`` ends the present contents of ``memory``."""
        self._compare(memory.writes, stream, text)
        for other, (time, run) in memory.reads.items():
            if stream.seen.get(other, 0) >= time:
                continue
            if run is None:
                self.mistakes.append(f"{text}, which does not wait for the {other.name}")
                continue
            for made, number in run.made:
                if made.number_of_writes == number:
                    made.garbage = f"{text}, which does not wait for the {other.name}"

    def _memory(self, tensor: torch.Tensor, what: str, *, is_new: bool) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memories:
            if len(self._memories) > 5000:
                self._memories = {
                    key: m for key, m in self._memories.items() if not m.storage.expired()
                }
            # What is seen for the first time as an input was made before, or out of sight, by
            # the computation.
            home = self.stream if is_new else self.computation
            text = f"{tuple(tensor.shape)} {tensor.dtype} made by {what}"
            self._memories[storage._cdata] = Memory(home, StorageWeakRef(storage), text)
        return self._memories[storage._cdata]


class Operations(TorchDispatchMode):
    """Tells ``order`` of every operation."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._order.is_looking or func.is_view or func.overloadpacket.__name__ == "set_":
            return func(*args, **kwargs)
        self._order.look()
        name = func.overloadpacket.__name__
        schema = {argument.name: argument.alias_info for argument in func._schema.arguments}
        given = {**dict(zip(schema, args, strict=False)), **kwargs}
        tensors = [
            (alias, leaf) for key, alias in schema.items() for leaf in _tensors_in(given.get(key))
        ]
        inputs = {tensor.untyped_storage()._cdata for _, tensor in tensors}
        if name != "copy_" or not _is_equal(*args[:2]):
            is_factory = name.startswith(("empty", "new_")) or name.endswith("_like")
            for alias, tensor in tensors:
                writes = alias is not None and alias.is_write
                if writes or not is_factory:
                    self._order.use(tensor, name, writes=writes)
        del given, tensors
        result = func(*args, **kwargs)
        for tensor in _tensors_in(result):
            if tensor.untyped_storage()._cdata not in inputs:
                self._order.use(tensor, name, writes=True, is_new=True)
        return result


def _tensors_in(value: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in leaves if tensor.layout is torch.strided]


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


class OrderLane(lanes.Lane):
    """A lane that notes what a stream would."""

    def __init__(self, name: str, order: Order) -> None:
        super().__init__(name, current().topology)
        self._order = order
        self.stream = Stream(f"{name} lane")

    def here(self) -> lanes.Mark:
        return Mark(self._order)

    def after(self, mark: lanes.Mark) -> None:
        self._order.look()
        with self._order.on(self.stream):
            mark.wait()

    def follow(self) -> None:
        self.after(self.here())

    def memory(self) -> AbstractContextManager[object]:
        return self._order.on(self.stream)

    def run(self, start: Callable[[], Work], then: Callable[[], None] | None = None) -> lanes.Mark:
        self._order.look()
        self._order.run = Run()
        try:
            with self._order.on(self.stream):
                start().wait()
                if then is not None:
                    then()
                return Mark(self._order)
        finally:
            self._order.run = None

    def run_after(
        self, mark: lanes.Mark, start: Callable[[], Work], then: Callable[[], None] | None = None
    ) -> lanes.Mark:
        self.after(mark)  # as on CUDA: the lane waits, and not the computation
        return self.run(start, then)


class PrivateGroup(Group):
    """Runs collectives on copies, so that nobody but the caller keeps what it is given."""

    def __init__(self, group: Group) -> None:
        self.ranks, self.rank, self._group = group.ranks, group.rank, group

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._run(output, input, self._group.all_gather)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = "sum"
    ) -> Work:
        return self._run(
            output, input, lambda to, source: self._group.reduce_scatter(to, source, op)
        )

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        return self._run(
            tensor, tensor, lambda to, source: self._group.all_reduce(to.copy_(source), op)
        )

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        return self._run(
            tensor, tensor, lambda to, source: self._group.broadcast(to.copy_(source), root)
        )

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        return self._group.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        return self._group.recv(tensor, src)

    def _run(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        start: Callable[[torch.Tensor, torch.Tensor], Work],
    ) -> Work:
        copy, result = input.clone(), torch.empty_like(output)  # is seen to read the input
        with unseen():
            start(result, copy).wait()
        output.copy_(result)  # is seen to write the output
        return Finished()


class PrivateBackend(TorchBackend):
    """The default backend, with :class:`PrivateGroup`."""

    name = "private"

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        return PrivateGroup(super().new_group(ranks, name))


_orders: list[Order] = []


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, nothing is noted."""
    for order in _orders:
        order.is_looking = False
    try:
        yield
    finally:
        for order in _orders:
            order.is_looking = True


@contextmanager
def ordered() -> Iterator[Order]:
    """Inside, all that this process does is noted. The run must have been started with
    :class:`PrivateBackend`.
    """
    order = Order()
    of_run = current().lanes
    before = of_run.gather, of_run.reduce, of_run.named("replicas")
    of_run.gather, of_run.reduce = OrderLane("gather", order), OrderLane("reduce", order)
    of_run._named["replicas"] = OrderLane("replicas", order)

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        order.resize(storage, size)
        torch._C.StorageBase.resize_(storage, size)
        # NaN: new memory never happens to hold what belongs there.
        return storage.fill_(255) if size else storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    _orders.append(order)
    try:
        with Operations(order):
            yield order
            order.look()
    finally:
        _orders.clear()
        del torch.UntypedStorage.resize_
        of_run.gather, of_run.reduce, of_run._named["replicas"] = before
