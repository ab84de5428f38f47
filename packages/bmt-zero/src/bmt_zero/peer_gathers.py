"""Gathers between GPUs of one host by their copy engines, which need no multiprocessor: products
beside them slow down by a quarter of what they do beside the kernels of a collective.

Each rank reads the shards of the others from their memory. Two counters of each rank order this:
how many gathers of these ranks it has come to, so that its shard holds what it will hold, and how
many it has ended, so that it reads no shard any more. A rank's gather ends when all ranks have
ended theirs, as that of a collective does; so whoever has waited for it may write to the shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakSet

import torch

from bmt_core.comm.call_check import GroupCalls
from bmt_core.comm.protocols import Finished, Group, Work
from bmt_core.peers import WRAP, PeerMemory, PeerWatch, connected
from bmt_core.run.runtime import Runtime, current
from bmt_core.torch_internals import stream_address

logger = logging.getLogger("bmt_zero")
_DONE = Finished()

Gather = Callable[[torch.Tensor], Work]
"""Fills a flat tensor with the shards of all ranks, on the current stream. Collective."""


def gather_of(shard: torch.Tensor, group: Group) -> Gather:
    """Return the gather of ``shard``, 1-D and of one size on all ranks: by copies if the ranks
    can share its memory, which must stay where it is, else by the group's collective. Collective.
    """
    runtime = current()
    smallest = runtime.settings.copied_gathers
    by_collective = partial(_by_collective, group, shard)
    if not shard.is_cuda or smallest is None or shard.nbytes * group.size < max(1, smallest):
        return by_collective
    gathers = runtime.state(_AllPeerGathers).between(group)
    copied = None if gathers is None else gathers.of(shard)
    return by_collective if copied is None else copied


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
            if isinstance(memory, str):
                logger.info("bmt: ranks %s gather by collectives: %s.", group.ranks, memory)
            self._made[group.ranks] = (
                None if isinstance(memory, str) else PeerGathers(self._runtime, memory)
            )
        return self._made[group.ranks]

    def _close(self) -> None:
        for gathers in self._made.values():
            if gathers is not None:
                gathers.close()


class PeerGathers:
    """The gathers between the ranks of one group, all in the gathering lane, in the same order on
    every rank.
    """

    def __init__(self, runtime: Runtime, memory: PeerMemory) -> None:
        self.group = group = memory.group
        self.device = runtime.device
        self.memory = memory
        self.number = 0
        """How many gathers this rank has queued."""
        ranks, counters = range(group.size), memory.counters
        self.written = [counters.address(counters.first + rank) for rank in ranks]
        self.copied = [counters.address(counters.first + group.size + rank) for rank in ranks]
        self.calls: GroupCalls | None = None
        if runtime.calls is not None:
            name = f"copies/{'-'.join(map(str, group.ranks))}"
            self.calls = runtime.calls.group(name, group.ranks)
        self.unused: list[int] = []
        """Mappings of shards that are gone."""
        self.is_closed = False
        self._made: WeakSet[_PeerGather] = WeakSet()
        self.watch = PeerWatch(runtime, group, counters, "parameters", self._awaited)
        self._is_possible = True

    @staticmethod
    def count(size: int) -> int:
        """Return how many counters order the gathers of a group of ``size`` ranks."""
        return 2 * size

    def of(self, shard: torch.Tensor) -> Gather | None:
        """Return the gather of ``shard``; None if its memory cannot be shared. Collective."""
        if not self._is_possible:
            return None
        self._close_unused()
        shared = self.memory.shared(lambda: shard)
        if isinstance(shared, str):
            self._is_possible = False
            if self.group.rank == 0:
                logger.warning(
                    "bmt: ranks %s gather by collectives, which slow down the computation beside"
                    " them more than copies between their devices do: %s.",
                    self.group.ranks,
                    shared,
                )
            return None
        gather = _PeerGather(self, shard, shared.addresses, shared.opened)
        self._made.add(gather)
        return gather

    def close(self) -> None:
        """End all gathers. Those under way are waited for as long as a counter changes."""
        self.watch.shorten_timeout()
        torch.cuda.synchronize(self.device)
        self.watch.leave()
        self.is_closed = True
        for gather in list(self._made):
            gather.give_back()
        self._close_unused()
        self.memory.counters.unmap()

    def _close_unused(self) -> None:
        if self.unused:
            torch.cuda.synchronize(self.device)
            self.memory.close(self.unused)

    def _awaited(self) -> Iterator[tuple[int, int]]:
        first = self.memory.counters.first + self.group.size
        for rank in range(self.group.size):
            yield first + rank, self.number


class _PeerGather:
    """The gather of one ``shard``, which is at ``addresses[r]`` for rank r."""

    def __init__(
        self, gathers: PeerGathers, shard: torch.Tensor, addresses: list[int], opened: list[int]
    ) -> None:
        self._gathers = gathers
        self._shard = shard
        self._addresses = addresses
        self._opened = opened

    def __call__(self, output: torch.Tensor) -> Work:
        gathers = self._gathers
        if gathers.is_closed or torch.cuda.is_current_stream_capturing():
            # The group says that the run is over. A replay would write the same numbers again.
            return gathers.group.all_gather(output, self._shard)
        gathers.watch.raise_failure()
        if gathers.calls is not None:
            gathers.calls.enter_on_device(("copied all_gather",), self._shard)
        gathers.number += 1
        gathers.memory.link.gather(
            self._addresses,
            self._shard.nbytes,
            output.data_ptr(),
            gathers.written,
            gathers.copied,
            gathers.group.rank,
            gathers.number & WRAP,
            stream_address(gathers.device.index),
        )
        return _DONE

    def give_back(self) -> None:
        """Let the mappings of the other ranks' shards be closed when the device is idle: a copy may
        be under way.
        """
        opened, self._opened = self._opened, []
        self._gathers.unused += opened

    def __del__(self) -> None:
        self.give_back()
