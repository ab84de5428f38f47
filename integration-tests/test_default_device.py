"""Programs that set torch's default device, as ``torch.set_default_device("cuda")`` does: what bmt
makes for itself lies where bmt needs it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_testing import run_ranks

SOURCES = Path(__file__).parents[1] / "packages"
FACTORIES = {
    *("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "zeros"),
}


def factories_without_device(path: Path) -> Iterator[str]:
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        is_factory = ast.unparse(call.func.value) == "torch" and call.func.attr in FACTORIES
        # One with ** may have it.
        if is_factory and not {"device", None} & {keyword.arg for keyword in call.keywords}:
            yield f"{path.relative_to(SOURCES)}:{call.lineno}: {ast.unparse(call)}"


def test_every_tensor_of_bmts_own_names_its_device() -> None:
    paths = [
        path
        for package in SOURCES.iterdir()
        if package.name != "bmt-testing"  # whose ranks have the default device of a new process
        for path in package.glob("src/**/*.py")
    ]
    assert len(paths) > 300
    assert [found for path in paths for found in factories_without_device(path)] == []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.dropout(self.linear(self.norm(x)))
        return out


def train(optimizer: str, default: str | None, folder: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), *[Layer() for _ in range(3)], nn.Linear(8, 16))
    bmt.BMTrainModelWrapper(model)
    manager = bmt.optim.OptimManager(loss_scale=2.0**10)
    manager.add_optimizer(bmt.optim.create(optimizer, model.parameters(), lr=0.01))
    loss_function = bmt.loss.FusedCrossEntropy()
    tokens = torch.randint(16, (4, 8))
    losses = []
    with nullcontext() if default is None else torch.device(default):
        for _ in range(3):
            manager.zero_grad()
            loss = loss_function(model(tokens).flatten(0, 1), tokens.flatten())
            manager.backward(loss)
            manager.clip_grad_norm(model.parameters(), 1.0)
            manager.step()
            losses.append(bmt.sum_loss(loss).item())
        bmt.save_checkpoint(folder, model=model, manager=manager)
        bmt.load_checkpoint(folder, model=model, manager=manager)
    return losses


@pytest.mark.parametrize("optimizer", ["adam_offload", "adamw"])
def test_a_training_is_the_same_under_another_default_device(
    optimizer: str, tmp_path: Path
) -> None:
    plain = run_ranks(train, 2, optimizer, None, str(tmp_path / "plain"))
    # Whatever were made on the default device would have no values.
    other = run_ranks(train, 2, optimizer, "meta", str(tmp_path / "other"))
    assert other == plain and plain[0][-1] < plain[0][0]
