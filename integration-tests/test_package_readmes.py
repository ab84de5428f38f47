"""The READMEs of the packages: what a package is for, how to install it, and where to read on."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from document_code import blocks

import dev

PACKAGES = sorted((Path(__file__).parents[1] / "packages").iterdir())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_readme_says_how_to_install_and_where_to_read_on(package: Path) -> None:
    name = dev.name_of(package)
    page = f"packages/{package.name}/README.md"
    text = (package / "README.md").read_text()
    assert text.startswith(f"# {name}\n\n") and len(text.split()) < 120
    clone, index = blocks(page, "sh")[0].splitlines()
    program, _, names = clone.partition(" install ")
    assert program == "python3 tools/dev.py"
    assert package in dev.required_directories(shlex.split(names, comments=True))
    command, _, comment = index.partition("#")
    pip, verb, requirement = shlex.split(command)
    assert (pip, verb, requirement.partition("[")[0]) == ("pip", "install", name)
    assert "from the index, once bmt is published there" in comment
    assert "](../../docs/" in text.splitlines()[-1]
