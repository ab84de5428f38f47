"""The optimizer's whole state, by the manager's method or the optimizer's, and training that goes
on from it.
"""

from __future__ import annotations

from typing import Any

import torch

import bmtrain as bmt
from small_model import Embedding, Layer, mean_loss, own_batch, run


class Model(bmt.DistributedModule):
    """An embedding and one Block, in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(dtype=torch.half)
        self.layers = bmt.TransformerBlockList([bmt.Block(Layer(dtype=torch.half))])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits for (batch, length)."""
        return self.embedding.scores(self.layers(self.embedding(words)))


def start() -> tuple[Model, bmt.optim.AdamOffloadOptimizer, bmt.optim.OptimManager]:
    """Return a model with its first values, its optimizer and the manager."""
    model = Model()
    torch.manual_seed(0)
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=1024)
    manager.add_optimizer(optimizer)
    return model, optimizer, manager


def train(model: Model, manager: bmt.optim.OptimManager, steps: range) -> list[float]:
    """Train and return the global losses."""
    losses = []
    for step in steps:
        words, targets = own_batch(step)
        loss = mean_loss(model(words), targets)
        manager.backward(loss)
        manager.step()
        manager.zero_grad()
        losses.append(bmt.sum_loss(loss).item())
    return losses


def main(device: str | None = None, steps: int = 5) -> list[list[float]]:
    """Train on without a break, from the manager's state and from the optimizer's; return the
    losses of each.
    """
    bmt.init_distributed(seed=0, device=device)
    model, optimizer, manager = start()
    train(model, manager, range(steps))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    # Methods of the objects, and collective: every rank calls them. The manager's is complete on
    # rank 0 alone, which saves it.
    of_manager: dict[str, Any] = manager.state_dict(gather_opt=True)
    of_optimizer: dict[str, Any] = optimizer.state_dict(gather=True)

    following = range(steps, 2 * steps)
    losses = [train(model, manager, following)]
    for state in (of_manager, of_optimizer):
        model, optimizer, manager = start()
        model.load_state_dict(values)
        (manager if state is of_manager else optimizer).load_state_dict(state)
        losses.append(train(model, manager, following))
    bmt.print_rank("\n".join(f"{losses[0][0]:.4f} -> {of[-1]:.4f}" for of in losses))
    bmt.shutdown()
    return losses


if __name__ == "__main__":
    run(main)
