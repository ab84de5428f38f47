"""The number of ranks of a test that can have a GPU, and the GPU of each.

Every rank has a GPU of its own, unless :data:`RANKS_PER_GPU` says how many share one. NCCL refuses
two ranks of one host on one GPU. So ranks that share GPUs seem to be on different hosts: NCCL then
sends through sockets, which is slow, but streams, events and memory behave as they do with a GPU
for every rank.
"""

from __future__ import annotations

import os

import torch

RANKS_PER_GPU = "BMT_TEST_RANKS_PER_GPU"


def gpu_ranks() -> int:
    """Return how many ranks can compute on this machine's GPUs in one test."""
    return torch.cuda.device_count() * _ranks_per_gpu()


def place_on_host(rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables that tell a rank its place on its host, and so its GPU."""
    gpus = torch.cuda.device_count()
    if _ranks_per_gpu() == 1 or gpus == 0:
        return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    host, local_rank = divmod(rank, gpus)
    on_host = min(gpus, world_size - host * gpus)
    return {
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(on_host),
        "NCCL_HOSTID": f"bmt-{host}",
    }


def _ranks_per_gpu() -> int:
    value = os.environ.get(RANKS_PER_GPU, "1")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{RANKS_PER_GPU} must be a number of ranks, at least 1, not {value!r}.")
    return int(value)
