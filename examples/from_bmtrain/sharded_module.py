"""The steps from an ordinary module to a sharded one: parameters, then Blocks, then a list of
Blocks. All give one result.
"""

from __future__ import annotations

import torch
from torch import nn

import bmtrain as bmt
from small_model import run


class SomeTransformerBlock(nn.Module):
    """Any module of plain torch. Arguments after the first reach it as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, first: int, second: int, third: int) -> torch.Tensor:
        """Keep the shape (..., 64)."""
        return x + torch.tanh(self.linear(x)) * first / (second + third)


class Original(nn.Module):
    """Plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.param = nn.Parameter(torch.linspace(-1, 1, 1024))
        self.module_list = nn.ModuleList([SomeTransformerBlock() for _ in range(3)])

    def forward(self) -> torch.Tensor:
        """Return (16, 64)."""
        x = self.param.view(16, 64)
        for module in self.module_list:
            x = module(x, 1, 2, 3)
        return x


class Sharded(bmt.DistributedModule):
    """Changed: the base class, the parameter, and ``CheckpointBlock`` around each block."""

    def __init__(self) -> None:
        super().__init__()
        self.param = bmt.DistributedParameter(torch.linspace(-1, 1, 1024))
        self.module_list = nn.ModuleList(
            [bmt.CheckpointBlock(SomeTransformerBlock()) for _ in range(3)]
        )

    def forward(self) -> torch.Tensor:
        """Return (16, 64)."""
        x = self.param.view(16, 64)
        for module in self.module_list:
            x = module(x, 1, 2, 3)
        return x


class ShardedList(bmt.DistributedModule):
    """Changed once more: a ``TransformerBlockList``, which is called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.param = bmt.DistributedParameter(torch.linspace(-1, 1, 1024))
        self.module_list = bmt.TransformerBlockList(
            [bmt.CheckpointBlock(SomeTransformerBlock()) for _ in range(3)]
        )

    def forward(self) -> torch.Tensor:
        """Return (16, 64)."""
        output: torch.Tensor = self.module_list(self.param.view(16, 64), 1, 2, 3)
        return output


def main(device: str | None = None, steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Train the three alike and return their parameters, whole."""
    bmt.init_distributed(seed=0, device=device)
    trained = []
    for kind in (Original, Sharded, ShardedList):
        torch.manual_seed(0)
        model = kind().to(bmt.current().device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        for _ in range(steps):
            loss = (model() - 1).square().sum()
            manager.backward(loss)
            manager.step()
            manager.zero_grad()
        bmt.print_rank(f"{kind.__name__}: loss {loss.item():.3f}")
        trained.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
    bmt.shutdown()
    return trained


if __name__ == "__main__":
    run(main)
