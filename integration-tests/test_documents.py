"""What the documents promise about the tests is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch
from beside_torch import assert_same_parameters
from document_code import ROOT, blocks, code, guides, run
from test_plans import PLAN
from torch import nn

import bmt_params
from bmt_testing import on_ranks
from bmt_zero import Block


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
    assert len({path for path, _ in named}) > 2
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


def test_the_plan_in_the_guide_is_the_one_that_is_tested() -> None:
    assert run(code("docs/tensor-parallel.md", 2))["plan"] == PLAN


class PlainFeedForward(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return out


@on_ranks(2, init={"tp_size": 2})
def test_the_layer_in_the_guide_has_the_gradients_of_plain_torch() -> None:
    layer = run(code("docs/tensor-parallel.md", 3))["FeedForward"](8)
    plain = PlainFeedForward(8)
    bmt_params.init_parameters(layer)
    plain.load_state_dict(layer.state_dict())
    x = torch.arange(4 * 3 * 8.0).view(4, 3, 8).sin()
    for module in (Block(layer), plain):
        module(x).square().sum().backward()
    assert_same_parameters(layer, plain)


def blocks_that_tests_run() -> set[tuple[str, int]]:
    """Return (page, number) of each block that a test gets by ``document_code.code``."""
    found: set[tuple[str, int]] = set()
    for source in (ROOT / "integration-tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "code":
                page, *numbers = [ast.literal_eval(argument) for argument in node.args]
                found |= {(page, number) for number in numbers or range(len(blocks(page)))}
    return found


def test_every_block_of_python_is_run_by_a_test() -> None:
    there = {(page, number) for page in guides() for number in range(len(blocks(page)))}
    assert len(there) > 40
    assert sorted(there - blocks_that_tests_run()) == [], "no test runs these"
    assert sorted(blocks_that_tests_run() - there) == [], "there are no such blocks"


def test_blocks_of_python_are_marked_so_that_tests_find_them() -> None:
    marks = {
        mark
        for page in guides()
        for mark in re.findall(r"^[ \t]*```([^`\n]+)$", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert marks <= {"bash", "diff", "json", "python", "sh", "text", "toml"}
    indented = [
        page for page in guides() if re.search(r"^[ \t]+```", (ROOT / page).read_text(), re.M)
    ]
    assert indented == []
