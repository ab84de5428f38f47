"""Gathers between GPUs of one host by their copy engines, which need no multiprocessor and so slow
down the computation beside them less than a collective's kernels do.

Each rank copies the shards of the others out of their memory. Two counters of each rank order this:
``written``, how many gathers the rank has come to, so that the others may copy its shard; and
``copied``, for how many gathers it has copied all shards. A rank's gather ends when all ranks have
copied. So whoever has waited for it may write to the shard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from weakref import WeakSet

import torch

from bmt_core.comm.protocols import Finished, Group, Work
from bmt_core.peers import WRAP, Awaited, NoCopies, PeerMemory, PeerWatch, SharedTensor, connected
from bmt_core.run.lanes import CudaLane, Lane
from bmt_core.run.runtime import Runtime, current
from bmt_core.torch_internals import stream_address

logger = logging.getLogger("bmt_zero")
_DONE = Finished()
_PATIENCE = 3.0  # seconds for which the end of a run waits for other work in the lane
_left_mapped: list[PeerGathers] = []
"""Those of runs at whose end the device was still at work, which may use their memory until the
process ends.
"""

Gather = Callable[[torch.Tensor], Work]
"""Fills a flat tensor with the shards of all ranks, on the current stream. Collective."""


def gather_of(shard: torch.Tensor, group: Group) -> Gather:
    """Return the gather of ``shard``, 1-D and of one size on all ranks: by copies if the ranks
    can share its memory, which must stay where it is, else by the group's collective. Collective.
    """
    by_collective = gather_by_collective(shard, group)
    if not may_be_copied(shard, shard.dtype, group):
        return by_collective
    gathers = current().state(_AllPeerGathers).between(group)
    copied = None if gathers is None else gathers.of(shard, by_collective)
    return by_collective if copied is None else copied


def may_be_copied(shard: torch.Tensor, dtype: torch.dtype, group: Group) -> bool:
    """Whether a gather of ``shard``, in ``dtype``, is large enough for copies, and the ranks can
    make them. Collective.
    """
    runtime = current()
    smallest = runtime.settings.copied_gathers
    if (
        not shard.is_cuda
        or group.size == 1
        or smallest is None
        or shard.numel() * dtype.itemsize * group.size < max(1, smallest)
        or torch.cuda.is_current_stream_capturing()
    ):
        return False
    return runtime.state(_AllPeerGathers).between(group) is not None


def is_by_copies(gather: Gather) -> bool:
    """Whether other ranks copy the shard from its memory."""
    return isinstance(gather, _PeerGather)


def gather_by_collective(shard: torch.Tensor, group: Group) -> Gather:
    """Return the gather of ``shard`` by the group's collective."""
    return partial(_by_collective, group, shard)


def _by_collective(group: Group, shard: torch.Tensor, output: torch.Tensor) -> Work:
    return group.all_gather(output, shard)


class _AllPeerGathers:
    """The :class:`PeerGathers` of a run, by the ranks of their groups."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._made: dict[tuple[int, ...], PeerGathers | None] = {}
        runtime.at_shutdown.append(self._close)

    def between(self, group: Group) -> PeerGathers | None:
        """Return those of ``group``, made at the first call; None if its ranks cannot share memory.
        Collective.
        """
        if group.ranks not in self._made:
            memory = connected(self._runtime, group, PeerGathers.count(group.size))
            if isinstance(memory, NoCopies):
                _say(group, memory)
                self._made[group.ranks] = None
            else:
                self._made[group.ranks] = PeerGathers(self._runtime, memory)
        return self._made[group.ranks]

    @property
    def number(self) -> int:
        """How many gathers this rank has made by copies."""
        return sum(gathers.number for gathers in self._made.values() if gathers is not None)

    def _close(self) -> None:
        made = [gathers for gathers in self._made.values() if gathers is not None]
        for gathers in made:
            gathers.watch.shorten_timeout()
        with ExitStack() as each:
            for gathers in made:
                each.callback(gathers.close)


class PeerGathers:
    """The gathers between the ranks of one group, all in the gathering lane, in the same order on
    every rank.
    """

    def __init__(self, runtime: Runtime, memory: PeerMemory) -> None:
        self.group = group = memory.group
        self.memory = memory
        self.number = 0
        """How many gathers this rank has queued."""
        ranks, counters = range(group.size), memory.counters
        self.written = [counters.address(counters.first + rank) for rank in ranks]
        self.copied = [counters.address(counters.first + group.size + rank) for rank in ranks]
        name = f"copies/{'-'.join(map(str, group.ranks))}"
        self.note_call = runtime.observer.calls(name, group.ranks)
        self.unused: list[tuple[int, list[int]]] = []
        """Mappings of shards that are gone, each with the number of its last gather."""
        self.is_closed = False
        self._lane = runtime.lanes.gather
        self._made: WeakSet[_PeerGather] = WeakSet()
        self._is_possible = True
        self.watch = PeerWatch(runtime, group, counters, "parameters", self._awaited)

    @staticmethod
    def count(size: int) -> int:
        """Return how many counters order the gathers of a group of ``size`` ranks."""
        return 2 * size

    def of(self, shard: torch.Tensor, otherwise: Gather) -> Gather | None:
        """Return the gather of ``shard``, which is made ``otherwise`` where copies are not
        possible; None if they never are, because its memory cannot be shared. Collective.
        """
        if not self._is_possible:
            return None
        shared = self.memory.shared(lambda: shard)
        if isinstance(shared, NoCopies):
            self._is_possible = False
            _say(self.group, shared)
            return None
        gather = _PeerGather(self, shared, otherwise)
        self._made.add(gather)
        return gather

    def close_unused(self) -> None:
        """Close the mappings from which this rank has copied for the last time."""
        counters = self.memory.counters
        number = counters[counters.first + self.group.size + self.group.rank]
        # While this runs the garbage collector may add to the list.
        for _ in range(len(self.unused)):
            last, opened = self.unused.pop(0)
            if (number - last) & WRAP < WRAP // 2:
                self.memory.close(opened)
            else:
                self.unused.append((last, opened))

    def close(self) -> None:
        """Wait until the gathers under way have ended, or fail; then no more can be made."""
        self.is_closed = True
        self.watch.wait_until_ended()
        has_passed = _has_passed(self._lane)
        self.watch.leave()
        if not has_passed:
            _left_mapped.append(self)
            return
        for gather in list(self._made):
            gather.give_back()
        self.close_unused()
        self.memory.counters.unmap()

    def _awaited(self) -> Iterator[Awaited]:
        first, size = self.memory.counters.first, self.group.size
        for begin in (first, first + size):
            for rank in range(size):
                yield Awaited(rank, begin + rank, self.number)


class _PeerGather:
    """The gather of one shard; ``otherwise`` is the same by a collective."""

    def __init__(self, gathers: PeerGathers, shared: SharedTensor, otherwise: Gather) -> None:
        self._gathers = gathers
        self._shared = shared
        self._otherwise = otherwise
        self._last = 0

    def __call__(self, output: torch.Tensor) -> Work:
        gathers, shared = self._gathers, self._shared
        if gathers.is_closed or torch.cuda.is_current_stream_capturing():
            # After the run the group raises. A replay of a graph would write the same numbers.
            return self._otherwise(output)
        gathers.watch.raise_failure()
        if gathers.unused:
            gathers.close_unused()
        gathers.note_call(("copied all_gather",), shared.tensor)
        gathers.number += 1
        self._last = gathers.number
        gathers.memory.link.gather(
            shared.addresses,
            shared.tensor.nbytes,
            output.data_ptr(),
            gathers.written,
            gathers.copied,
            gathers.group.rank,
            gathers.number & WRAP,
            stream_address(output.device.index),
        )
        return _DONE

    def give_back(self) -> None:
        """Let the mappings of the other ranks' shards be closed after the last gather."""
        if self._shared.opened:
            self._gathers.unused.append((self._last & WRAP, list(self._shared.opened)))
            self._shared.opened.clear()

    def __del__(self) -> None:
        self.give_back()


def _say(group: Group, without: NoCopies) -> None:
    """Warn, on the first rank, if copies have failed that should be possible."""
    if group.rank == 0 and without.kind == "failed":
        logger.warning(
            "bmt: ranks %s gather parameters by collectives from now on, because they cannot copy"
            " from each other's GPUs: %s. Collectives slow down the computation beside them more;"
            " BMT_COPIED_GATHERS=never says that they are wanted.",
            group.ranks,
            without.reason,
        )


def _has_passed(lane: Lane) -> bool:
    """Wait a moment, and return whether the device has done all that is queued in the lane."""
    assert isinstance(lane, CudaLane)
    deadline = time.monotonic() + _PATIENCE
    try:
        while not lane.stream.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
    except RuntimeError:  # the device has failed
        return False
    return True
