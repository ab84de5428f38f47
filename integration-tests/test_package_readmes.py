"""The READMEs of the packages: each example is a whole program that prints what the README shows,
and each README fits a screen and says how to install.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from document_code import blocks, printed_by_blocks
from trainer_runs import accelerate_forgets

from bmt_testing import run_ranks

PACKAGES = sorted((Path(__file__).parents[1] / "packages").iterdir())
# bmt-testing shows a test, and what it prints of a mistake; its own tests run them.
LONGER = {"bmt-testing": 85}


def readme(package: str) -> str:
    return f"../packages/{package}/README.md"


def printed(package: str, directory: str) -> str:
    # What accelerate knows of the process ends with the example, as with the process of a user.
    with accelerate_forgets():
        return printed_by_blocks(readme(package), (0,), directory)


def own_lines(printed: Iterable[str]) -> str:
    """Return what ranks print, without what bmt and transformers say of the run."""
    lines = "".join(printed).splitlines(keepends=True)
    said = ("bmt:", "{'eval_loss'", "{'train_runtime'")
    return "".join(line for line in lines if not line.startswith(said))


@pytest.mark.parametrize(
    ("package", "ranks"),
    [
        ("bmt-core", 2),
        ("bmt-checkpoint", 1),
        ("bmt-zero", 2),
        ("bmt-optim", 1),
        ("bmt-tp", 2),
        ("bmt-pipeline", 2),
        ("bmt-hf", 2),
        ("bmt-kernels", 1),
        ("bmtrain", 2),
    ],
)
def test_the_example_of_a_readme_prints_what_stands_below_it(
    package: str, ranks: int, tmp_path: Path
) -> None:
    if package == "bmt-hf":
        pytest.importorskip("transformers", minversion="5.23")
    if package == "bmt-kernels":
        pytest.importorskip("bmt_kernels")
    found = own_lines(run_ranks(printed, ranks, package, str(tmp_path), init=None))
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
