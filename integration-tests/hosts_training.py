"""A training that several hosts can do, one step per line of output, and the same in plain torch.

``python hosts_training.py whole FOLDER`` trains with each kind of sharding and saves what it found;
``python hosts_training.py until-a-call-fails TIMEOUT`` waits for a line of input, and trains.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bmtrain as bmt

STEPS = 4
LAST_STEP = 6
"""To which a run goes on that has loaded the checkpoint of step :data:`STEPS`."""
SHARD_SIZES = (None, 2)


class Model(nn.Module):
    """An embedding, two layers of sizes that nothing divides, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)
        )
        self.head = nn.Linear(5, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def plain_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(step: int) -> torch.Tensor:
    """Return the batch of all ranks."""
    return torch.randint(13, (8, 6), generator=torch.Generator().manual_seed(step))


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int
) -> Iterator[float]:
    """Train on this rank's parts of the batches; give the mean losses."""
    for step in range(first, end):
        loss = model(batch(step).chunk(bmt.world_size())[bmt.rank()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield bmt.sum_loss(loss).item()


def wrapped_model(
    **settings: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, bmt.optim.OptimManager]:
    """Start a run on the CPU, and return a sharded model, its optimizer and the manager of it."""
    bmt.init_distributed(device="cpu", gradients="mean", **settings)
    model = bmt.BMTrainModelWrapper(plain_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return model, optimizer, manager


def train_whole(folder: Path) -> None:
    """Train :data:`STEPS` steps with each of :data:`SHARD_SIZES`, and save checkpoints, parameters
    and losses.
    """
    for shard_size in SHARD_SIZES:
        model, optimizer, manager = wrapped_model(shard_size=shard_size)
        losses = list(steps(model, optimizer, 0, STEPS))
        bmt.save_checkpoint(folder / f"checkpoints-{shard_size}", model, manager, step=STEPS)
        found = {
            "losses": losses,
            "grid": bmt.current().describe(),
            "model": dict(model.state_dict()),
            "host": socket.gethostname(),
            "shared_by": [p.shard_group.ranks for p in model.parameters()],
        }
        torch.save(found, folder / f"found-{shard_size}-{bmt.rank()}.pt")
        bmt.shutdown()


def train_until_a_call_fails(timeout: float) -> None:
    """Print "ready", and when a line of input has come, train and print a line after each step."""
    print("ready", flush=True)
    input()
    model, optimizer, _ = wrapped_model(timeout=timeout)
    for step, loss in enumerate(steps(model, optimizer, 0, sys.maxsize)):
        print(f"step {step}: {loss:.3f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        train_whole(Path(sys.argv[2]))
    else:
        train_until_a_call_fails(float(sys.argv[2]))
