"""``PeerMemory``: lets the ranks of a group on one host read and write memory of each other's GPUs.

[Note: freed while it is shared] A tensor that is shared keeps its memory for as long as its
:class:`SharedTensor` lives. The ranks drop theirs at different moments, so for a moment one may
have memory mapped that its owner has freed. Nobody uses it then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.ops import PeerLink
from bmt_core.peers.peer_counters import PeerCounters, new_counters_file
from bmt_core.run.runtime import Runtime

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SharedTensor(NamedTuple):
    """A ``tensor`` of this rank, and those that the other ranks shared with it: ``addresses[r]`` is
    the address of rank r's. ``opened`` are mappings of the other ranks' memory.
    """

    tensor: torch.Tensor
    addresses: list[int]
    opened: list[int]


class PeerMemory(NamedTuple):
    """The connection of a group's ranks: the ``link`` of this rank's device, and their
    ``counters``.
    """

    group: Group
    link: PeerLink
    counters: PeerCounters

    def shared(self, make: Callable[[], torch.Tensor]) -> SharedTensor | str:
        """Share the tensor that ``make()`` returns on each rank; a text says why one rank
        cannot, the same on every rank. Collective.
        """
        problem, handle, offset = "", b"", 0
        tensor: torch.Tensor | None = None
        own = self.group.ranks[self.group.rank]
        try:
            tensor = make()
            handle, offset = self.link.shared(tensor.data_ptr())
        except RuntimeError as error:  # also if memory is exhausted
            problem = f"rank {own}: {error}"
        offers = all_gather_object((problem, handle, offset), self.group)
        addresses: list[int] = []
        opened: list[int] = []
        if not any(problem for problem, _, _ in offers):
            try:
                for rank, (_, handle, offset) in enumerate(offers):
                    if rank == self.group.rank and tensor is not None:
                        addresses.append(tensor.data_ptr())
                    else:
                        opened.append(self.link.opened(handle))
                        addresses.append(opened[-1] + offset)
            except RuntimeError as error:
                problem = f"rank {own}: {error}"
        problems = [*(problem for problem, _, _ in offers), *all_gather_object(problem, self.group)]
        if any(problems) or tensor is None:
            self.close(opened)
            return str(next(filter(None, problems)))
        return SharedTensor(tensor, addresses, opened)

    def close(self, opened: list[int]) -> None:
        """Close the mappings ``opened``, which nothing uses any more."""
        for address in opened:
            self.link.close(address)
        opened.clear()


def connected(runtime: Runtime, group: Group, count: int) -> PeerMemory | str:
    """Return the :class:`PeerMemory` of ``group`` with ``count`` counters; a text says why its
    ranks cannot share memory, the same on every rank. Collective.
    """
    if not runtime.backend.allows_copies:
        return f"the backend {runtime.backend.name!r} makes all transfers itself"
    link, problem = _link_or_problem(runtime)
    counters: PeerCounters | None = None
    path: Path | None = None
    try:
        if link is not None and group.rank == 0:
            path, problem = _file_or_problem(PeerCounters.count(group.size, count))
        first, *_ = offers = all_gather_object((problem, path, _host()), group)
        if len({host for _, _, host in offers}) > 1:
            problem = problem or "they are on several hosts"
        elif not any(problem for problem, _, _ in offers) and link is not None:
            try:
                counters = PeerCounters(first[1], group.size, count)
                counters.map(link)
            except (OSError, RuntimeError) as error:
                problem = (
                    f"rank {runtime.rank} cannot share memory with rank {group.ranks[0]}: {error}"
                )
        problems = [*(problem for problem, _, _ in offers), *all_gather_object(problem, group)]
    finally:
        if path is not None:
            path.unlink()
    if any(problems) or link is None or counters is None:
        if counters is not None:
            counters.unmap()
        return str(next(filter(None, problems)))
    return PeerMemory(group, link, counters)


def _link_or_problem(runtime: Runtime) -> tuple[PeerLink | None, str]:
    try:
        link = runtime.kernels.peer_link()
    except RuntimeError as error:
        return None, str(error)
    return (
        link,
        "" if link is not None else f"the kernels {runtime.kernels.name!r} have no peer_link()",
    )


def _file_or_problem(count: int) -> tuple[Path | None, str]:
    try:
        return new_counters_file(count), ""
    except OSError as error:
        return None, str(error)


def _host() -> str:
    """Return what differs between hosts."""
    try:
        return _BOOT.read_text()
    except OSError:
        return ""
