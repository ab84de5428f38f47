"""Training over the native NCCL backend is training over torch's process groups, in every bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_core.run.runtime import current
from bmt_testing import run_ranks


def losses(level: int) -> list[float]:
    """Of a model of bf16 blocks and of parameters outside of them, clipped, over several steps."""
    device = current().device
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 96)) for _ in range(4)]
    blocks = bmt.TransformerBlockList(
        [bmt.Block(module.to(device, torch.bfloat16), True, level) for module in modules]
    )
    embedding = bmt.BMTrainModelWrapper(nn.Embedding(50, 96, device=device, dtype=torch.bfloat16))
    optimizer = bmt.optim.AdamOptimizer([*blocks.parameters(), *embedding.parameters()], lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    torch.manual_seed(1 + current().rank)
    tokens = torch.randint(0, 50, (8, 16), device=device)
    found = []
    for _ in range(8):
        loss = (blocks(embedding(tokens)).float() - 1).square().mean()
        found.append(float(bmt.sum_loss(loss.detach())))
        manager.zero_grad()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("level", "reduce_dtype"), [(0, "param"), (2, "param"), (3, "fp32-sum")])
def test_losses_are_those_of_torchs_process_groups(level: int, reduce_dtype: str) -> None:
    native, torchs = (
        run_ranks(
            losses,
            2,
            level,
            init={"device": "cuda", "comm_backend": backend, "reduce_dtype": reduce_dtype},
            timeout=120,
        )
        for backend in ("nccl-native", "torch")
    )
    assert native == torchs
    assert native[0] == native[1] and native[0][-1] < native[0][0]
