"""The loop of a script for DistributedDataParallel, moved as the table in
docs/coming-from-ddp.md says, trains as one process does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bmtrain as bmt
from bmt_testing import run_ranks

WIDTH, ROWS, ACCUMULATE = 6, 32, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0, batch_first=True)
                for _ in range(3)
            ]
        )
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


def made() -> tuple[nn.Module, list[dict[str, Any]], TensorDataset]:
    """Return the model, its groups of parameters made before anything wraps it, and the data."""
    torch.manual_seed(0)
    model = Model().double()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    return model, groups, TensorDataset(torch.randint(16, (ROWS, 5)))


def train(
    model: nn.Module, groups: Any, batches: Iterable[Any], clip: Any, mean: Any
) -> dict[str, Any]:
    # A large eps: Adam divides rounding errors too.
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    found: dict[str, Any] = {"losses": [], "norms": []}
    for number, (ids,) in enumerate(batches):
        loss = model(ids)
        (loss / ACCUMULATE).backward()
        if (number + 1) % ACCUMULATE == 0:
            found["norms"].append(clip(model.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        found["losses"].append(mean(loss.detach()))
    return found | {"model": dict(model.state_dict())}


def mean_by_torch(loss: torch.Tensor) -> float:
    """As scripts for DistributedDataParallel do; works wherever there are two ranks."""
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def moved(with_torch_distributed: bool) -> dict[str, Any]:
    model, groups, data = made()
    model = bmt.BMTrainModelWrapper(model)
    manager = bmt.optim.OptimManager()
    size = 8 // bmt.world_size()
    if with_torch_distributed:
        sampler: Any = DistributedSampler(data, shuffle=False)
        return train(
            model,
            groups,
            DataLoader(data, size, sampler=sampler),
            manager.clip_grad_norm,
            mean_by_torch,
        )
    sampler = DistributedSampler(data, bmt.world_size(), bmt.rank(), shuffle=False)
    batches = DataLoader(data, size, sampler=sampler)
    return train(
        model, groups, batches, manager.clip_grad_norm, lambda loss: bmt.sum_loss(loss).item()
    )


@pytest.mark.parametrize(("ranks", "with_torch_distributed"), [(2, False), (2, True)])
def test_the_loop_of_a_ddp_script_trains_as_in_plain_torch(
    ranks: int, with_torch_distributed: bool
) -> None:
    model, groups, data = made()
    wanted = train(
        model, groups, DataLoader(data, 8), nn.utils.clip_grad_norm_, lambda loss: loss.item()
    )
    for found in run_ranks(moved, ranks, with_torch_distributed, init={"gradients": "mean"}):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-6)  # formed in float32
        torch.testing.assert_close(found["model"], wanted["model"], rtol=1e-6, atol=1e-6)
