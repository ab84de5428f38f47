"""Muon on a GPT of 12 layers: losses beside plain torch's, and bytes sent per step beside
the formula.

``python integration-tests/muon_training.py [--steps 50] [--dtype float64] [--ranks 1 2 4]``
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import nn
from whole_trainings import split

from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import AdamW, OptimManager, whole
from bmt_params import DistributedParameter
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper

LAYERS, WIDTH, HEADS, IDS, LENGTH, BATCH = 12, 32, 4, 64, 16, 8
MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.95}
ADAMW: dict[str, Any] = {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.01}


class Layer(nn.Module):
    """A layer of a transformer, with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.second(x))))
        return x + added


class GPT(nn.Module):
    """Ids to logits, with one matrix for both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(IDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, IDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Sent(NamedTuple):
    """Bytes that a rank has sent for the optimizer over whole tensors in one step."""

    found: int
    by_formula: int


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each id follows from the one before it, but for noise."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(IDS, (BATCH, LENGTH + 1), generator=generator)
    for i in range(1, LENGTH + 1):
        keep = torch.rand(BATCH, generator=generator) < 0.9
        ids[:, i] = torch.where(keep, (5 * ids[:, i - 1] + 1) % IDS, ids[:, i])
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def plain(steps: int, dtype: torch.dtype) -> list[float]:
    """The losses in plain torch."""
    model = GPT().to(dtype)
    matrices, others = split(model)
    optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)]
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batch(step))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def on_this_rank(steps: int, dtype: torch.dtype) -> tuple[list[float], Sent]:
    """The losses, each rank with its part of the batch, and what the last step sent."""
    import bmt_recording  # a plugin of the tests, not on every machine

    model: Any = GPT().to(dtype)
    for number, layer in enumerate(list(model.layers)):
        model.layers[number] = Block(layer)
    model = BMTrainModelWrapper(model)
    matrices, others = split(model)
    optimizer, manager, topology = (
        whole(torch.optim.Muon, matrices, **MUON),
        OptimManager(),
        current().topology,
    )
    manager.add_optimizer(optimizer)
    manager.add_optimizer(AdamW(others, **ADAMW))
    losses = []
    for step in range(steps):
        ids, targets = [x.chunk(topology.data_size)[topology.data_rank] for x in batch(step)]
        manager.zero_grad()
        loss = loss_of(model, ids, targets)
        manager.backward(loss)
        losses.append(float(all_reduce(loss.detach(), "avg")))
        bmt_recording.clear()
        manager.step()
    found = sum(call.bytes for call in bmt_recording.calls if call.op == "send")
    return losses, Sent(found, sum(sent_by_formula(optimizer, p) for p in matrices))


def sent_by_formula(optimizer: Any, p: nn.Parameter) -> int:
    """Each rank sends its part of the gradient to the owner, which sends each of the others its
    part of the values.
    """
    assert isinstance(p, DistributedParameter)
    is_owner = optimizer.state_owner(p).rank == current().rank
    elements = p.whole_shape.numel() - p.numel() if is_owner else p.numel()
    return elements * p.dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    expected = plain(options.steps, dtype)
    print(f"plain torch: first loss {expected[0]:.6f}, last {expected[-1]:.6f}")
    nbytes = sum(p.numel() * p.dtype.itemsize for p in split(GPT().to(dtype))[0])
    for ranks in options.ranks:
        init = {"comm_backend": "recording"}
        results = run_ranks(on_this_rank, ranks, options.steps, dtype, init=init, timeout=600)
        losses = results[0][0]
        furthest = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        sent, formula = (
            sum(sent.found for _, sent in results),
            sum(sent.by_formula for _, sent in results),
        )
        print(
            f"{ranks} ranks: last loss {losses[-1]:.6f}, largest relative difference"
            f" {furthest:.2e}; sent per step by all ranks {sent} bytes, by formula {formula}, of"
            f" {nbytes} bytes of matrices"
        )


if __name__ == "__main__":
    main()
