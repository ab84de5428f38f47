"""The READMEs of the packages: each example is a whole program that prints what the README shows,
and each README fits a screen and says how to install.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from document_code import blocks, code, printed_by
from trainer_runs import accelerate_forgets

from bmt_testing import run_ranks

PACKAGES = sorted((Path(__file__).parents[1] / "packages").iterdir())
# bmt-testing shows a test, and what it prints of a mistake; its own tests run them.
LONGER = {"bmt-testing": 85}
EXAMPLES = {
    "bmt-core": (code("packages/bmt-core/README.md", 0), 2),
    "bmt-params": (code("packages/bmt-params/README.md", 0), 2),
    "bmt-checkpoint": (code("packages/bmt-checkpoint/README.md", 0), 1),
    "bmt-zero": (code("packages/bmt-zero/README.md", 0), 2),
    "bmt-optim": (code("packages/bmt-optim/README.md", 0), 1),
    "bmt-tp": (code("packages/bmt-tp/README.md", 0), 2),
    "bmt-pipeline": (code("packages/bmt-pipeline/README.md", 0), 2),
    "bmt-hf": (code("packages/bmt-hf/README.md", 0), 2),
    "bmt-kernels": (code("packages/bmt-kernels/README.md", 0), 1),
    "bmt-watch": (code("packages/bmt-watch/README.md", 0), 2),
    "bmtrain": (code("packages/bmtrain/README.md", 0), 2),
}
"""The program of each README, and on how many ranks it prints what is shown."""


def readme(package: str) -> str:
    return f"packages/{package}/README.md"


def printed(script: str, directory: str) -> str:
    # What accelerate knows of the process ends with the example, as with the process of a user.
    with accelerate_forgets():
        return printed_by(script, directory)


def own_lines(printed: Iterable[str]) -> str:
    """Return what ranks print, without what bmt and transformers say of the run."""
    lines = "".join(printed).splitlines(keepends=True)
    said = ("bmt:", "{'eval_loss'", "{'train_runtime'")
    return "".join(line for line in lines if not line.startswith(said))


@pytest.mark.parametrize("package", EXAMPLES)
def test_the_example_of_a_readme_prints_what_stands_below_it(package: str, tmp_path: Path) -> None:
    if package == "bmt-hf":
        pytest.importorskip("transformers", minversion="5.23")
    if package == "bmt-kernels":
        pytest.importorskip("bmt_kernels")
    script, ranks = EXAMPLES[package]
    found = own_lines(run_ranks(printed, ranks, script, str(tmp_path), init=None))
    assert found == blocks(readme(package), "text")[0]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_readme_is_one_screen_and_begins_with_how_to_install(package: Path) -> None:
    text = (package / "README.md").read_text()
    assert len(text.splitlines()) <= LONGER.get(package.name, 60)
    install = blocks(readme(package.name), "sh")[0]
    (clone,) = re.findall(r"^(?:pip) install .*\./packages/.*$", install, re.MULTILINE)
    assert f"./packages/{package.name}" in clone
    assert "from the index, once bmt is published there" in install
    name = "bmt-train" if package.name == "bmtrain" else package.name
    assert re.search(rf'^(?:pip) install .*"?{name}\b', install.replace(clone, ""), re.MULTILINE)
