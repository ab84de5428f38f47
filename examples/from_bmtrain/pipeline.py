"""From ZeRO to a pipeline: another list of layers. Two stages where the number of ranks is even,
else one.
"""

from __future__ import annotations

import torch
from torch import nn

import bmtrain as bmt
from small_model import Embedding, Layer, mean_loss, own_batch, run


class Model(bmt.DistributedModule):
    """``layer_list`` is the class of the list of layers."""

    def __init__(self, layer_list: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = layer_list([Layer() for _ in range(4)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits for (batch, length)."""
        return self.embedding.scores(self.layers(self.embedding(words)))


def main(device: str | None = None, steps: int = 20) -> list[float]:
    """Train and return the global losses."""
    bmt.init_distributed(seed=0, device=device)
    stages = 2 if bmt.world_size() % 2 == 0 else 1
    bmt.shutdown()
    bmt.init_distributed(seed=0, pipe_size=stages, num_micro_batches=2 * stages, device=device)
    model = Model(bmt.PipelineTransformerBlockList if stages > 1 else bmt.TransformerBlockList)
    bmt.init_parameters(model)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        words, targets = own_batch(step)
        loss = mean_loss(model(words), targets)
        manager.backward(loss)
        manager.step()
        manager.zero_grad()
        losses.append(bmt.sum_loss(loss).item())
    bmt.print_rank(f"{stages} stages: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    bmt.shutdown()
    return losses


if __name__ == "__main__":
    run(main)
