"""Lanes, in which collectives run beside the computation.

A run has two lanes, one that gathers parameters and one that reduces gradients; packages ask for
more by name. On CUDA a lane is a stream. Collectives on one communicator wait for each other, so
every lane but the gathering one has communicators of its own (:meth:`Lane.group`). On the CPU a
started collective proceeds by itself. One thread issues everything, in one order, on every
rank alike.

[Note: buffer lifetime] Memory belongs to the stream on which it was allocated: the allocator hands
it out again, to that stream, as soon as it is freed, whatever other streams still do with it. So
memory that a lane fills is allocated *in* the lane (:meth:`Lane.memory`), and is freed after
:meth:`Lane.after` has made the lane wait for the reader. Memory that the computation fills and a
lane reads is kept until the computation has waited for the lane.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from bmt_core.comm.protocols import Group, Work
from bmt_core.run.topology import Topology
from bmt_core.torch_internals import stream_address

PRIORITY = -2
"""The priority of the lanes' streams. At a low one a collective might queue behind a large product,
and all ranks wait for it.
"""
_NOTHING = nullcontext()


class Mark(Protocol):
    """A point in the order of work of the computation or of a lane."""

    def wait(self) -> None:
        """Wait until this point is reached: the current stream waits on CUDA, the caller on
        the CPU.
        """


class Lane:
    """The interface of every lane, and the lane on the CPU."""

    def __init__(self, name: str, topology: Topology) -> None:
        self.name = name
        self._topology = topology

    def group(self, group: Group) -> Group:
        """Return the lane's own group over the ranks of ``group``; it connects at its
        first operation.
        """
        return self._topology.twin(group, self.name)

    def here(self) -> Mark:
        """Return the point that the computation has reached."""
        return _Once(None, None)

    def after(self, mark: Mark) -> None:
        """Make all later work of the lane start after ``mark``."""
        mark.wait()

    def follow(self) -> None:
        """Make all later work of the lane start after the present work of the computation, which on
        the CPU is done.
        """

    def memory(self) -> AbstractContextManager[object]:
        """Inside, memory is allocated for the lane: see [Note: buffer lifetime]."""
        return _NOTHING

    def run(self, start: Callable[[], Work], then: Callable[[], None] | None = None) -> Mark:
        """Run the collective that ``start`` starts and, after it, ``then``; return the point at
        which both are done.

        They start after the lane's earlier work, but after the computation only if :meth:`after`
        was called for that.
        """
        return _Once(start(), then)

    def run_after(
        self, mark: Mark, start: Callable[[], Work], then: Callable[[], None] | None = None
    ) -> Mark:
        """Like :meth:`run`, but after ``mark``, the end of other work; the CPU waits for it.

        Starting the collective at the first wait for its end would not do: ranks wait in different
        orders, and would start their collectives in different orders.
        """
        mark.wait()
        return self.run(start, then)


class CudaLane(Lane):
    """A lane on a stream of its own."""

    def __init__(self, name: str, topology: Topology, device: torch.device) -> None:
        super().__init__(name, topology)
        # torch does not annotate it.
        self.stream = torch.cuda.Stream(device, PRIORITY)  # type: ignore[no-untyped-call]
        self._device = device.index

    def here(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self._device), self._device)

    def after(self, mark: Mark) -> None:
        if isinstance(mark, CudaMark):
            self.stream.wait_event(mark.event)
        else:  # a mark of another class, whose wait() makes the current stream wait
            with _On(self.stream, self._device):
                mark.wait()

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def memory(self) -> AbstractContextManager[object]:
        return _On(self.stream, self._device)

    def run(self, start: Callable[[], Work], then: Callable[[], None] | None = None) -> Mark:
        before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self.stream)
        try:
            start().wait()
            if then is not None:
                then()
            return CudaMark(self.stream, self._device)
        finally:
            torch.cuda.set_stream(before)

    def run_after(
        self, mark: Mark, start: Callable[[], Work], then: Callable[[], None] | None = None
    ) -> Mark:
        self.after(mark)
        return self.run(start, then)


class CudaMark:
    """The present end of the work of ``stream``, of CUDA device number ``device``.

    ``Event.wait()`` of torch asks which device and stream are current, which takes the host longer
    than all else here; and it waits in the stream itself, too, whose order is kept without.
    """

    def __init__(self, stream: torch.cuda.Stream, device: int) -> None:
        self.event = stream.record_event()
        self._address, self._device = stream.cuda_stream, device

    def wait(self) -> None:
        if stream_address(self._device) != self._address:
            torch.cuda.current_stream(self._device).wait_event(self.event)

    def is_reached(self) -> bool:
        """Whether the work before the mark is done."""
        return bool(self.event.query())


class _On:
    """``torch.cuda.stream`` for one known device; takes a third of its host time."""

    def __init__(self, stream: torch.cuda.Stream, device: int) -> None:
        self._stream = stream
        self._device = device

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_stream(self._before)


class _Once:
    """A mark on the CPU: the first ``wait()`` waits for the collective and calls ``then``; later
    ones do nothing.

    Waiting again for a collective of gloo would write its result again, over what was added since.
    """

    def __init__(self, work: Work | None, then: Callable[[], None] | None) -> None:
        self._work = work
        self._then = then

    def wait(self) -> None:
        work, self._work = self._work, None
        then, self._then = self._then, None
        if work is not None:
            work.wait()
        if then is not None:
            then()


class Lanes:
    """The lanes of a run."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology = topology
        self._device = device
        self._named: dict[str, Lane] = {}
        self.gather = self.named("gather")
        self.reduce = self.named("reduce")

    def named(self, name: str) -> Lane:
        """Return the lane called ``name``, made when it is first asked for."""
        if name not in self._named:
            is_cuda = self._device.type == "cuda"
            lane = (
                CudaLane(name, self._topology, self._device)
                if is_cuda
                else Lane(name, self._topology)
            )
            self._named[name] = lane
        return self._named[name]
