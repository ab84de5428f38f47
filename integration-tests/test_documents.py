"""What the documents promise about the tests is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from test_plans import PLAN
from torch import nn

import bmt_core
from bmt_testing import run_ranks
from bmt_zero import Block

ROOT = Path(__file__).parent.parent


def documents() -> list[Path]:
    patterns = ("*.md", "docs/**/*.md", "packages/*/README.md", "examples/*/*.md", "tools/*/*.md")
    return [document for pattern in patterns for document in ROOT.glob(pattern)]


def test_every_test_that_a_document_names_exists() -> None:
    folders = ("packages/*/tests", "integration-tests", "integration-tests/*", "tools/tests")
    sources = [source for folder in folders for source in ROOT.glob(f"{folder}/test_*.py")]
    present = {
        name
        for source in sources
        for name in re.findall(r"^def (test_\w+)", source.read_text(), re.MULTILINE)
    }
    present |= {source.name for source in sources}
    # Without the code of examples, which defines tests of its own.
    texts = {
        document: re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for document in documents()
    }
    named = {
        (path, name)
        for path, text in texts.items()
        for name in re.findall(r"\btest_\w+(?:\.py)?", text)
    }
    assert len({path for path, _ in named}) > 3
    assert (
        sorted(f"{path.relative_to(ROOT)}: {name}" for path, name in named if name not in present)
        == []
    )


def test_every_link_between_documents_leads_somewhere() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents()
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []


def code_in_the_tensor_parallel_guide(text: str) -> dict[str, Any]:
    """Return the names that the guide's block of code with ``text`` defines."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "tensor-parallel.md").read_text(), re.DOTALL
    )
    (block,) = [block for block in blocks if text in block]
    names: dict[str, Any] = {"__name__": "guide"}
    exec(block, names)
    return names


def test_the_plan_in_the_guide_is_the_one_that_is_tested() -> None:
    assert code_in_the_tensor_parallel_guide("plan = Plan(")["plan"] == PLAN


class PlainFeedForward(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return out


def gradients_of_the_guides_layer() -> tuple[dict[str, Any], dict[str, Any]]:
    layer, plain = (
        code_in_the_tensor_parallel_guide("class FeedForward")["FeedForward"](8),
        PlainFeedForward(8),
    )
    bmt_core.init_parameters(layer)
    plain.load_state_dict(layer.state_dict())
    x = torch.arange(4 * 3 * 8.0).view(4, 3, 8).sin()
    for module in (Block(layer), plain):
        module(x).square().sum().backward()
    found = {
        name: parameter.gather_all_like(parameter.grad)
        for name, parameter in layer.named_parameters()
    }
    return found, {name: parameter.grad for name, parameter in plain.named_parameters()}


def test_the_layer_in_the_guide_has_the_gradients_of_plain_torch() -> None:
    for found, expected in run_ranks(gradients_of_the_guides_layer, 2, init={"tp_size": 2}):
        torch.testing.assert_close(found, expected)
