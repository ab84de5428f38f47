"""Blocks with a ZeRO level and recomputation of their own, called as a list or one by one; weights
in bfloat16.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from small_model import Embedding, Layer, mean_loss, own_batch, run


class Transformer(bmt.DistributedModule):
    """``is_loop``: the list's Blocks are called one by one, which means the same."""

    def __init__(self, dtype: torch.dtype, is_loop: bool) -> None:
        super().__init__()
        self.is_loop = is_loop
        self.embedding = Embedding(dtype=dtype)
        self.transformers = bmt.TransformerBlockList(
            [
                bmt.Block(Layer(dtype=dtype), use_checkpoint=True, zero_level=3),
                bmt.Block(Layer(dtype=dtype), use_checkpoint=False, zero_level=2),
                bmt.Block(Layer(dtype=dtype)),  # the run's level
            ]
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits for (batch, length)."""
        x = self.embedding(words)
        if self.is_loop:
            for block in self.transformers:
                x = block(x)
        else:
            x = self.transformers(x)
        return self.embedding.scores(x)


def main(device: str | None = None, steps: int = 20) -> list[list[float]]:
    """Train with both calls and return the global losses of each."""
    bmt.init_distributed(seed=0, zero_level=3, device=device)
    losses = [train(Transformer(torch.bfloat16, is_loop), steps) for is_loop in (True, False)]
    bmt.print_rank(
        f"loop {losses[0][0]:.3f} -> {losses[0][-1]:.3f}, list {losses[1][0]:.3f} ->"
        f" {losses[1][-1]:.3f}"
    )
    bmt.shutdown()
    return losses


def train(model: Transformer, steps: int) -> list[float]:
    """Train ``model`` from the same first values, and return the global losses."""
    torch.manual_seed(0)
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    losses = []
    for step in range(steps):
        words, targets = own_batch(step)
        loss = mean_loss(model(words), targets)
        manager.backward(loss)
        manager.step()
        manager.zero_grad()
        losses.append(bmt.sum_loss(loss).item())
    return losses


if __name__ == "__main__":
    run(main)
