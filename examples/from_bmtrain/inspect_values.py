"""Parameters and activations of the whole model and batch, by ``bmt.inspect``: a rank has parts of
them only.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from small_model import Embedding, Layer, mean_loss, own_batch, run


class Model(bmt.DistributedModule):
    """Records what each Block gets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(2)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits for (batch, length)."""
        hidden = self.embedding(words)
        for layer in self.layers:
            bmt.inspect.record_tensor(hidden, "hidden", group="layers")
            hidden = layer(hidden)
        return self.embedding.scores(hidden)


def main(device: str | None = None) -> str:
    """Return the table of statistics."""
    bmt.init_distributed(seed=0, device=device)
    model = Model()
    bmt.init_parameters(model)
    with bmt.inspect.inspect_tensor() as inspector:
        words, targets = own_batch(0)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
        manager.backward(mean_loss(model(words), targets))
    rows = [*inspector.get_summary(), *bmt.inspect.inspect_model(model, "*weight")]
    table: str = bmt.inspect.format_summary(rows)
    bmt.print_rank(table)
    bmt.shutdown()
    return table


if __name__ == "__main__":
    run(main)
