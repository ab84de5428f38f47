"""``docs/architecture.md`` has one line for each folder of the packages, and the files that one
step enters, in order.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn import functional as F

import bmtrain as bmt
from bmt_testing import on_ranks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def folders() -> set[str]:
    """Return the folders of all packages that have modules, as they are imported."""
    sources = [source for source in ROOT.glob("packages/*/src") if source.is_dir()]
    return {
        path.parent.relative_to(source).as_posix()
        for source in sources
        for path in source.rglob("*.py")
    }


def test_each_folder_has_one_line() -> None:
    rows = re.findall(r"^\| `(\w+(?:/\w+)*)` \| \S", PAGE, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == folders()


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(bmt\w+(?:/\w+)*\.py)`", PAGE))
    assert named
    missing = {each for each in named if not list(ROOT.glob(f"packages/*/src/{each}"))}
    assert not missing


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


@on_ranks(2)
def test_the_files_of_a_step_are_listed_in_order() -> None:
    """The files of packages that the fourth step enters by named functions, but for those that look
    on and compiled kernels.
    """
    model = bmt.BMTrainModelWrapper(Model())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    tokens, found = torch.arange(18).view(2, 9), dict[str, None]()

    def enters(frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and not name.startswith("<") and "/src/bmt" in file:
            found[file.split("/src/")[1]] = None

    for step in range(4):
        sys.setprofile(enters if step == 3 else None)
        try:
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            manager.backward(loss)
            manager.step()
            manager.zero_grad()
        finally:
            sys.setprofile(None)
    entered = [file for file in found if not file.startswith(("bmt_kernels", "bmt_watch"))]
    assert entered == re.findall(r"^\d+\. `(bmt\w+(?:/\w+)*\.py)`: ", PAGE, re.MULTILINE)
