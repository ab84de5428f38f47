"""What the documents promise about the tests is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from test_plans import PLAN

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_failure_modes_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "failure-modes.md").read_text()))
    folders = ("packages/*/tests", "integration-tests", "tools/tests")
    sources = [source for folder in folders for source in ROOT.glob(f"{folder}/test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source.read_text(), re.MULTILINE)}
    assert named and sorted(named - defined) == []


def test_every_link_between_documents_leads_somewhere() -> None:
    documents = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("examples/*/*.md"),
    ]
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []


def test_the_plan_in_the_guide_is_the_one_that_is_tested() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tensor-parallel.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "plan = Plan(" in block]
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["plan"] == PLAN
