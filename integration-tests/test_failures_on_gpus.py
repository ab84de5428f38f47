"""A rank that fails alone ends all others within seconds, whatever their GPUs wait for."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_pipeline_failures import interrupt, train_with_calls

import bmtrain as bmt
from bmt_testing import rank_pool
from bmt_tp import overlapped_products
from bmt_watch import call_check
from bmt_zero import Block

pytestmark = pytest.mark.gpu(2)
_models: list[torch.nn.Module] = []  # else one is gone when its rank tells where it has failed
SECONDS = 20.0
"""After the first failure all ranks must have ended in this time, or are killed. The timeout of the
run is half an hour.
"""


def start(**settings: Any) -> None:
    """Begin a run on GPUs that checks no calls before they begin, as after the first ones."""
    with patch.object(call_check, "FIRST_CALLS", 0):
        bmt.init_distributed(device="cuda", **settings)


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(64))
        self.number = number
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if (bmt.rank(), self.number, self.calls) == (1, 1, 3):
            interrupt()
        return x @ self.weight


def train(settings: dict[str, Any], where: str) -> None:
    """Train two layers. Rank 1 fails in the third step, in the forward of the second one, or beside
    the model.
    """
    start(**settings)
    layers = bmt.TransformerBlockList([Block(Layer(0)), Block(Layer(1 if where == "layer" else 2))])
    _models.append(layers)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(layers.parameters()))
    for step in range(6):
        loss = layers(torch.ones(8, 64, device="cuda")).sum()
        if where == "beside" and step == 2 and bmt.rank() == 1:
            interrupt()
        loss.item()
        manager.zero_grad()
        manager.backward(loss)
        manager.step()


@pytest.mark.parametrize("where", ["layer", "beside"])
@pytest.mark.parametrize("backend", ["torch", "nccl-native"])
def test_a_rank_that_raises_ends_the_others(backend: str, where: str) -> None:
    other, failed = rank_pool(2).outcomes(
        train, {"comm_backend": backend}, where, init=None, timeout=120, grace=SECONDS
    )
    assert failed.error_type == "Interrupt", failed
    assert other.error_type in ("CallError", "NcclError"), other  # who notices first
    place = ", in the forward of weight" if where == "layer" else ""
    assert f"Rank 1 has failed (Interrupt: no luck){place}." in other.error_message


def train_in_pipelines(grid: dict[str, int], at: int, reads: bool, rows: int) -> None:
    start(num_micro_batches=4, **grid)
    with patch.object(overlapped_products, "MIN_ROWS", rows):
        train_with_calls(at, reads=reads)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("grid", "rows"),
    [
        ({"pipe_size": 2, "tp_size": 2}, 1),
        ({"pipe_size": 2, "tp_size": 2}, 1 << 20),
        ({"pipe_size": 2}, 1),
    ],
    ids=["tp, copied rows", "tp", "dp"],
)
def test_a_rank_whose_partners_wait_for_it_in_their_layers_ends_all(
    grid: dict[str, int], rows: int, reads: bool
) -> None:
    outcomes = rank_pool(4).outcomes(
        train_in_pipelines, grid, 3, reads, rows, init=None, timeout=120, grace=SECONDS
    )
    for outcome in outcomes:
        assert "no luck" in outcome.error_message, outcomes
        if outcome.error_type != "Interrupt":  # rank 3 itself, if it waits for nobody
            assert outcome.error_type in ("RemoteError", "CallError"), outcome
            assert "Stage 1 of the pipeline (rank 3) failed in the c" in outcome.error_message


def die_with_the_store(init_method: str, backend: str) -> None:
    """Rank 0 serves the store and dies while the GPU of rank 1 waits for it."""
    start(init_method=init_method, comm_backend=backend)
    tensor = torch.ones(1, device="cuda")
    bmt.distributed.all_reduce(tensor).item()
    if bmt.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        bmt.distributed.all_reduce(tensor)
        torch.cuda.synchronize()


@pytest.mark.parametrize("backend", ["torch", "nccl-native"])
def test_the_end_of_the_rank_that_serves_the_store_ends_the_others(backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    killed, other = rank_pool(2).outcomes(
        die_with_the_store,
        address,
        backend,
        init=None,
        timeout=120,
        grace=SECONDS,
        env={"TORCHELASTIC_USE_AGENT_STORE": "False"},
    )
    assert killed.error_type == "Died"
    assert other.error_type in ("CallError", "NcclError"), other
    assert (
        "The process of rank 0 was killed or has crashed, or cannot be reached"
        in other.error_message
    )
