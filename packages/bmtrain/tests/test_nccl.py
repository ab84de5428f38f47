"""The low-level collectives of BMTrain."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import bmt_core
from bmt_testing import gpu_ranks, run_ranks
from bmtrain import nccl


def old_names() -> None:
    comm = bmt_core.current().world
    rank, size = nccl.commRank(comm), nccl.commCount(comm)
    assert (rank, size) == (bmt_core.rank(), bmt_core.world_size())
    x = torch.arange(4.0) + rank
    total = torch.arange(4.0) * size + sum(range(size))
    out = torch.zeros(4)
    nccl.allReduce(x, out, "sum", comm)
    assert torch.equal(out, total) and torch.equal(x, torch.arange(4.0) + rank)
    columns = torch.zeros(4, 2)
    nccl.allReduce(x, columns[:, 0], "avg", comm)
    assert torch.equal(columns[:, 0], total / size) and columns[:, 1].sum() == 0
    with warnings.catch_warnings():
        # torch warns of typed storages, which old scripts pass.
        warnings.simplefilter("ignore", UserWarning)
        out = torch.zeros(4 * size)
        nccl.allGather(x.storage(), out.storage(), comm)
        assert torch.equal(out.view(size, 4)[rank], x)
        nccl.broadcast(x.untyped_storage(), out[:4].clone().untyped_storage(), 0, comm)
        in_place = x.clone()
        nccl.allReduce(in_place.storage(), in_place.storage(), "max", comm)
        assert torch.equal(in_place, torch.arange(4.0) + size - 1)
    part = torch.zeros(4 // size)
    nccl.reduceScatter(x, part, "sum", comm)
    assert torch.equal(part, total.chunk(size)[rank])
    sent = torch.zeros(4) if rank else x.clone()
    nccl.broadcast(sent, sent, 0, comm)
    assert torch.equal(sent, torch.arange(4.0))
    result = torch.full((4,), -1.0)
    nccl.reduce(x, result, "sum", size - 1, comm)
    assert torch.equal(result, total if rank == size - 1 else torch.full((4,), -1.0))
    with pytest.raises(TypeError, match="untyped storage is bytes"):
        nccl.allReduce(x.untyped_storage(), out, "sum", comm)
    with pytest.raises(ValueError, match="dst has 2 elements"):
        nccl.allReduce(x, torch.zeros(2), "sum", comm)
    with pytest.raises(RuntimeError, match="without groupStart"):
        nccl.groupEnd()
    if size > 1:
        ring(rank, size, comm)


def ring(rank: int, size: int, comm: Any) -> None:
    """All send first: only a group of operations that wait for nothing gets through."""
    x, out = torch.full((100_000,), float(rank)), torch.zeros(100_000)
    nccl.groupStart()
    nccl.groupStart()
    nccl.recv(out, (rank - 1) % size, comm)
    nccl.send(x, (rank + 1) % size, comm)
    nccl.groupEnd()
    nccl.groupEnd()
    assert out.eq((rank - 1) % size).all()
    if rank == 0:
        nccl.send(x, 1, comm)
    elif rank == 1:
        nccl.recv(out, 0, comm)
        assert out.eq(0).all()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_old_names_work_on_tensors_and_storages(world_size: int) -> None:
    run_ranks(old_names, world_size)


def old_names_on_the_device() -> None:
    with torch.device("cuda"):
        old_names()


@pytest.mark.gpu
def test_old_names_work_on_devices() -> None:
    run_ranks(old_names_on_the_device, min(2, gpu_ranks()), init={"device": "cuda"})


def test_before_init_it_says_to_call_init() -> None:
    with pytest.raises(bmt_core.NotInitializedError, match=r"init_distributed\(\)"):
        nccl.groupStart()
