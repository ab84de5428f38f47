"""A training that several hosts can do, one step per line of output, and the same in plain torch.

``python hosts_training.py whole FOLDER GRID ...`` trains on each of these grids, and saves what it
found. ``python hosts_training.py until-a-call-fails GRID TIMEOUT [FAULT]`` waits for a line of
input, makes some steps, waits for another line, and trains on; with a fault, the last rank then
raises, or is killed or stopped.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining
from torch import nn

import bmtrain as bmt
from bmt_pipeline import PipelineModel, train_step
from bmt_tp import Column, Plan, Row, Whole, parallelize

# The module that is not used imports what the start of a run does: seconds for which the other
# ranks would wait.
STEPS = 4
LAST_STEP = 6
"""To which a run goes on that has loaded the checkpoint of step :data:`STEPS`."""
GRIDS: dict[str, dict[str, Any]] = {
    "all": {},
    "hybrid": {"shard_size": 2},
    "stages": {"pipe_size": 2, "tp_size": 2},
}
"""What ``init_distributed`` gets: parameters lie on all ranks, on two, or a layer on two ranks."""
FAULTS = ("raises", "killed", "stopped")
FAILS_IN = 3
"""The step before which ranks wait, and in which the last one fails, if it does."""


class Layer(nn.Module):
    """Two products of sizes that no number of ranks divides but those along ``tp``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.down = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """An embedding, two layers, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.head(self.norm(x)), tokens)


PLAN = Plan(
    parameters={
        "embedding": Whole(),
        "layers.*.up": Column(gather="sequence_first"),
        "layers.*.down": Row(input="sequence_first"),
        "head": Whole(),
    },
    layers="layers.*",
    last="norm",
)


class Stages(PipelineModel):
    """The same model, whose layers :data:`PLAN` divides, on the stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        plain = parallelize(plain_model(), PLAN)
        self.embedding, self.norm, self.head = plain.embedding, plain.norm, plain.head
        self.layers = bmt.PipelineTransformerBlockList(list(plain.layers))

    def before_layers(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)

    def after_layers(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def plain_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(step: int) -> torch.Tensor:
    """Return the batch of all ranks."""
    return torch.randint(13, (12, 6), generator=torch.Generator().manual_seed(step))


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, end: int
) -> Iterator[float]:
    """Train on this rank's parts of the batches, or on the batches of its pipeline; give the mean
    losses.
    """
    for step in range(first, end):
        optimizer.zero_grad()
        if isinstance(model, Stages):
            tokens = batch(step)
            loss = train_step(model, loss_of, (tokens, tokens), "1f1b", num_micro_batches=4)
            optimizer.step()
            yield loss.item()
            continue
        loss = model(batch(step).chunk(bmt.world_size())[bmt.rank()])
        loss.backward()
        optimizer.step()
        yield bmt.sum_loss(loss).item()


def wrapped_model(
    **settings: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, bmt.optim.OptimManager]:
    """Start a run on the CPU, and return a sharded model, its optimizer and the manager of it."""
    bmt.init_distributed(device="cpu", gradients="mean", **settings)
    model = bmt.BMTrainModelWrapper(Stages() if "pipe_size" in settings else plain_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return model, optimizer, manager


def train_whole(folder: Path, grids: Sequence[str]) -> None:
    """Train :data:`STEPS` steps on each of ``grids``; save checkpoints, parameters and losses."""
    for grid in grids:
        model, optimizer, manager = wrapped_model(**GRIDS[grid])
        losses = list(steps(model, optimizer, 0, STEPS))
        bmt.save_checkpoint(folder / f"checkpoints-{grid}", model, manager, step=STEPS)
        found = {
            "losses": losses,
            "model": dict(model.state_dict()),
            "host": socket.gethostname(),
            "shared_by": [p.shard_group.ranks for p in model.parameters()],
            "split_over": bmt.current().topology.group(["tp"]).ranks,
        }
        torch.save(found, folder / f"found-{grid}-{bmt.rank()}.pt")
        bmt.shutdown()


def train_until_a_call_fails(grid: str, timeout: float, fault: str | None) -> None:
    """Print "ready", and when a line of input has come, train and print a line after each step.
    Wait for another line of input before step :data:`FAILS_IN`.
    """
    print("ready", flush=True)
    input()
    model, optimizer, _ = wrapped_model(**GRIDS[grid], timeout=timeout)
    for step, loss in enumerate(steps(model, optimizer, 0, sys.maxsize)):
        print(f"step {step}: {loss:.3f}", flush=True)
        if step == FAILS_IN - 1:
            input()
            if fault is not None and bmt.rank() == bmt.world_size() - 1:
                model.get_submodule("layers.1").register_forward_hook(lambda *_: fail(fault))


def fail(fault: str) -> None:
    """Let this rank fail by one of :data:`FAULTS`."""
    if fault == "raises":
        raise RuntimeError("planted") from KeyError("its cause")
    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        train_whole(Path(sys.argv[2]), sys.argv[3:])
    else:
        grid, timeout, *fault = sys.argv[2:]
        train_until_a_call_fails(grid, float(timeout), fault[0] if fault else None)
