"""One manager for two optimizers, one of them torch's own, each with or without a learning-rate
schedule; weights in fp16.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from small_model import Embedding, Layer, mean_loss, own_batch, run


class Model(bmt.DistributedModule):
    """An embedding and two Blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # torch's own optimizers have no master of half types.
        self.embedding = Embedding(dtype=torch.float32)
        self.layers = bmt.TransformerBlockList(
            [bmt.CheckpointBlock(Layer(dtype=dtype)) for _ in range(2)]
        )
        self.dtype = dtype

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits for (batch, length)."""
        hidden = self.layers(self.embedding(words).to(self.dtype))
        return self.embedding.scores(hidden.float())


def main(device: str | None = None, steps: int = 20) -> list[float]:
    """Train and return the global losses."""
    bmt.init_distributed(seed=0, device=device)
    model = Model(torch.half)
    bmt.init_parameters(model)
    of_layers = bmt.optim.AdamOptimizer(model.layers.parameters(), weight_decay=1e-2)
    of_embedding = torch.optim.AdamW(model.embedding.parameters(), lr=1e-2)
    lr_scheduler = bmt.lr_scheduler.Noam(of_layers, start_lr=3e-2, warmup_iter=4, end_iter=100)

    manager = bmt.optim.OptimManager(loss_scale=1024)
    manager.add_optimizer(of_layers, lr_scheduler)
    manager.add_optimizer(of_embedding)
    losses = []
    for step in range(steps):
        words, targets = own_batch(step)
        loss = mean_loss(model(words), targets)
        manager.backward(loss)  # which scales the loss
        manager.clip_grad_norm([*of_layers.param_groups, *of_embedding.param_groups], max_norm=1.0)
        manager.step()  # all optimizers and schedulers, unless a gradient overflowed
        manager.zero_grad()  # of all optimizers
        losses.append(bmt.sum_loss(loss).item())
    bmt.print_rank(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, loss scale {manager.loss_scale:g}")
    bmt.shutdown()
    return losses


if __name__ == "__main__":
    run(main)
