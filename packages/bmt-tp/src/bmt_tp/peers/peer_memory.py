"""``PeerMemory``: lets the ranks of a group on one host use memory of each other's GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import CommBackend, Group
from bmt_core.ops import PeerLink
from bmt_core.run.runtime import Runtime
from bmt_core.torch_internals import stream_address
from bmt_tp.peers.peer_counters import PeerCounters, new_counters_file

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class NoCopies(NamedTuple):
    """Why ranks cannot share memory; the same on every rank.

    ``kind`` is "unwanted" if the backend makes all transfers itself, "unavailable" between hosts
    and without kernels that copy, and "failed" if it was tried.
    """

    reason: str
    kind: Literal["unwanted", "unavailable", "failed"]


class SharedTensor(NamedTuple):
    """A ``tensor`` of this rank, and those that the other ranks shared with it: ``addresses[r]`` is
    the address of rank r's. ``opened`` are the addresses of mappings, which keep the other ranks'
    memory until :meth:`PeerMemory.close`.
    """

    tensor: torch.Tensor
    addresses: list[int]
    opened: list[int]


class PeerMemory(NamedTuple):
    """The connection of a group's ranks: the ``link`` of this rank's ``device``, and their
    ``counters``.
    """

    group: Group
    link: PeerLink
    counters: PeerCounters
    device: torch.device

    def shared(self, make: Callable[[], torch.Tensor]) -> SharedTensor | NoCopies:
        """Share the tensor that ``make()`` returns on each rank. Collective."""
        with torch.cuda.device(self.device):
            return self._shared(make)

    def _shared(self, make: Callable[[], torch.Tensor]) -> SharedTensor | NoCopies:
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
            return NoCopies(next(filter(None, problems)), "failed")
        return SharedTensor(tensor, addresses, opened)

    def close(self, opened: list[int]) -> None:
        """Close the mappings ``opened``, which nothing uses any more."""
        with torch.cuda.device(self.device):
            while opened:
                self.link.close(opened.pop())


def connected(runtime: Runtime, group: Group, count: int) -> PeerMemory | NoCopies:
    """Return the :class:`PeerMemory` of ``group`` with ``count`` counters for copies.
    Collective.
    """
    if not _allows_copies(runtime.backend):
        reason = f"the backend {runtime.backend.name!r} makes all transfers itself"
        return NoCopies(reason, "unwanted")
    with torch.cuda.device(runtime.device):
        return _connected(runtime, group, count)


def _connected(runtime: Runtime, group: Group, count: int) -> PeerMemory | NoCopies:
    link, problem = _link_or_problem(runtime)
    counters: PeerCounters | None = None
    path: Path | None = None
    try:
        if link is not None and group.rank == 0:
            path, problem = _file_or_problem(PeerCounters.count(group.size, count))
        lacks = f"the kernels {runtime.kernels.name!r} have no peer_link()"
        lacks = "" if link is not None or problem else lacks
        offers = all_gather_object((problem, lacks, _host(), path), group)
        if len({host for _, _, host, _ in offers}) > 1:
            return NoCopies("they are on several hosts", "unavailable")
        if any(lacks for _, lacks, _, _ in offers):
            return NoCopies(next(lacks for _, lacks, _, _ in offers if lacks), "unavailable")
        problems = [problem for problem, *_ in offers]
        if not any(problems) and link is not None:
            try:
                counters = PeerCounters(offers[0][3], group.size, count)
                counters.map(link)
                _try_counters(link, counters, runtime.device)
            except (OSError, RuntimeError, ValueError) as error:
                problem = (
                    f"rank {runtime.rank} cannot share memory with rank {group.ranks[0]}: {error}"
                )
        problems += all_gather_object(problem, group)
    finally:
        if path is not None:
            path.unlink()
    if any(problems) or link is None or counters is None:
        if counters is not None:
            counters.unmap()
        return NoCopies(next(filter(None, problems)), "failed")
    return PeerMemory(group, link, counters, runtime.device)


def _allows_copies(backend: CommBackend) -> bool:
    # Not inherited: a class that changes how another one gathers would not be asked.
    return bool(vars(type(backend)).get("allows_copies", False))


def _link_or_problem(runtime: Runtime) -> tuple[PeerLink | None, str]:
    try:
        return runtime.kernels.peer_link(), ""
    except RuntimeError as error:
        return None, str(error)


def _file_or_problem(count: int) -> tuple[Path | None, str]:
    try:
        return new_counters_file(count), ""
    except OSError as error:
        return None, str(error)


def _try_counters(link: PeerLink, counters: PeerCounters, device: torch.device) -> None:
    """Raise ``RuntimeError`` if streams of this device cannot write counters and wait for them."""
    stream, any_of_them = stream_address(device.index), counters.address(counters.failed)
    link.write(any_of_them, 0, stream, stream)
    link.wait(any_of_them, 0, stream)
    torch.cuda.current_stream(device).synchronize()


def _host() -> str:
    """Return what differs between hosts."""
    try:
        return _BOOT.read_text()
    except OSError:
        return ""
