"""The communication backend that calls NCCL itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import DistError, Store

from bmt_core.comm.protocols import CommBackend, CommContext, Group
from bmt_core.comm.torch_backend import TorchBackend
from bmt_core.run.start_section import start_section
from bmt_kernels.nccl.errors import NcclError
from bmt_kernels.nccl.group import NcclGroup
from bmt_kernels.nccl.herald import Herald
from bmt_kernels.nccl.library import make_engine

if TYPE_CHECKING:
    from bmt_kernels._nccl import Library

logger = logging.getLogger("bmt_kernels")
# Seconds that the device has at the end to finish collectives, in which other ranks may never
# take part.
_PATIENCE_AT_THE_END = 60.0
_PATIENCE_WITH_STORE = 5.0


class NcclBackend(CommBackend):
    """One communicator of NCCL for each group, on the caller's current stream; gloo for tensors on
    the CPU.

    A collective that fails, or does not finish within the run's timeout, ends the communication of
    all ranks with a :class:`NcclError` that names it. Raises :class:`ConfigError` on every rank
    when one has no GPU or no usable NCCL.
    """

    name = "nccl-native"
    allows_copies = True

    def __init__(self, context: CommContext) -> None:
        super().__init__(context)
        # Before anything waits for the other ranks: a rank without NCCL would never come.
        with start_section(
            self.name,
            context.store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=context.timeout,
        ):
            self._library, self._engine = make_engine(context.device, context.timeout)
        self._herald = (
            None if context.store is None else Herald(self._engine, context.store, context.rank)
        )
        # Groups of the same ranks share a host group: on the host, collectives run side by side
        # without communicators of their own.
        self._host_groups: dict[tuple[int, ...], Group] = {}
        try:
            self._host = TorchBackend(replace(context, device=torch.device("cpu")))
        except BaseException:
            self._engine.close(0.0)
            raise
        if self._herald is not None:
            self._herald.start()

    def new_group(self, ranks: tuple[int, ...], name: str) -> Group:
        """See :meth:`CommBackend.new_group`; raises :class:`NcclError` when not all members join
        within the timeout.
        """
        rank = ranks.index(self.context.rank)
        assert self.context.store is not None
        store_key = f"{self.name}/{name}"
        try:
            unique_id = shared_unique_id(
                self._library, self.context.store, store_key, ranks, rank, self.context.timeout
            )
        except NcclError as error:
            self._engine.fail(str(error))  # for the other ranks too
            self._engine.check()
            raise
        with torch.cuda.device(self.context.device):
            communicator = self._engine.communicator(unique_id, list(ranks), rank)
        host = self._host_group(ranks)
        return NcclGroup(ranks, rank, communicator, host, self.context.device)

    def _host_group(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self._host_groups:
            # Connected here, where all members are known to come.
            name = f"host/{'-'.join(map(str, ranks))}"
            self._host_groups[ranks] = self._host.new_group(ranks, name)
        return self._host_groups[ranks]

    def abort(self, failure: str) -> None:
        """See :meth:`CommBackend.abort`."""
        self._engine.fail(failure)

    def close(self) -> None:
        """Free all resources, also after a failure. Collectives that other ranks do not join are
        aborted after a minute.
        """
        try:
            has_failed = self._engine.wait_for_failure(0.0) is not None
            if (
                not self._engine.close(min(self.context.timeout, _PATIENCE_AT_THE_END))
                and not has_failed
            ):
                logger.warning(
                    "bmt: rank %d leaves, and collectives that it started have not finished.",
                    self.context.rank,
                )
            if self._herald is not None and self._herald.is_alive():
                self._herald.join(_PATIENCE_WITH_STORE)
        finally:
            self._host.close()


def shared_unique_id(
    library: Library, store: Store, key: str, ranks: tuple[int, ...], rank: int, timeout: float
) -> bytes:
    """Return the id of a new communicator, made by the first of ``ranks`` and read by the others
    under ``key``.
    """
    if rank == 0:
        unique_id = library.unique_id()
        store.set(key, unique_id.hex())
        return unique_id
    try:
        store.wait([key], timedelta(seconds=timeout))
    except DistError:
        raise NcclError(
            f"Rank {ranks[rank]} waited {timeout:g} s for rank {ranks[0]} to make the group of"
            f" ranks {ranks}. Look at the output of rank {ranks[0]}."
        ) from None
    return bytes.fromhex(store.get(key).decode())
