"""Tensor parallelism by BMTrain's operations, over all ranks: ``VPEmbedding`` and
``OpParallelLinear`` in a layer of one's own.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

import bmtrain as bmt
from bmtrain.nn.parallel_linear_func import OpParallelLinear, ReduceType
from small_model import LENGTH, WIDTH, WORDS, run


class FeedForward(bmt.DistributedModule):
    """Each rank computes some of the inner features. Rows (length / tp, batch, width) to the
    same shape.
    """

    def __init__(self) -> None:
        super().__init__()
        tp = bmt.config["tp_size"]
        normal = bmt.ParameterInitializer(torch.nn.init.normal_, std=WIDTH**-0.5)
        self.w_in = bmt.DistributedParameter(
            torch.empty(4 * WIDTH // tp, WIDTH), init_method=normal, tp_mode=True, tp_split_dim=0
        )
        self.w_out = bmt.DistributedParameter(
            torch.empty(WIDTH, 4 * WIDTH // tp), init_method=normal, tp_mode=True, tp_split_dim=1
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keep the shape."""
        rows = F.rms_norm(hidden, hidden.shape[-1:])
        inner = OpParallelLinear.apply(rows, self.w_in, None, True)  # gathers the rows of all ranks
        added = OpParallelLinear.apply(
            F.gelu(inner), self.w_out, None, False, False, False, ReduceType.REDUCE_SCATTER
        )
        return hidden + added


class Model(bmt.DistributedModule):
    """Words (batch, length / tp) to the logits of this rank's part of the vocabulary, for
    all positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = bmt.nn.VPEmbedding(WORDS, WIDTH, dtype=torch.float32, init_std=0.3)
        self.layers = bmt.TransformerBlockList([bmt.Block(FeedForward()) for _ in range(2)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, length, words / tp)."""
        logits: torch.Tensor = self.embedding(self.layers(self.embedding(words)), projection=True)
        return logits


def main(device: str | None = None, steps: int = 20) -> list[float]:
    """Train and return the losses. All ranks compute one loss together."""
    tp = int(os.environ.get("WORLD_SIZE", "1"))
    bmt.init_distributed(seed=0, tp_size=tp, sequence_dim=1, device=device)
    model = Model()
    bmt.init_parameters(model)
    loss_of = bmt.loss.FusedCrossEntropy(parallel=True)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        # One batch for all ranks.
        start = torch.randint(WORDS, (1, 4), generator=torch.Generator().manual_seed(step))
        words = ((start.t() + torch.arange(LENGTH + 1)) % WORDS).to(bmt.current().device)
        own_words = words[:, :-1].chunk(tp, dim=1)[bmt.config["tp_rank"]]
        loss = loss_of(model(own_words).flatten(0, 1), words[:, 1:].flatten())
        manager.backward(loss)
        manager.step()
        manager.zero_grad()
        losses.append(loss.item())
    bmt.print_rank(f"tp_size {tp}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    bmt.shutdown()
    return losses


if __name__ == "__main__":
    run(main)
