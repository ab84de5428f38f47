"""docs/environment.md has the variables that the sources read, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from document_code import ROOT

NO_VARIABLES = {
    *("LOCAL_SIZE", "OMPI_COMM_WORLD_", "SIZE"),  # parts of names
    "BATCH",  # a type of "BATCH" in ENVIRONMENT, the variable
    *("AUTO", "DETAIL", "INFO", "OFF", "ON", "TRACE"),  # values
    "T",  # a type variable
    "BYTES",  # what an option of the program takes
}
JOINED = {
    f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
}  # "OMPI_COMM_WORLD_" and each in launch.py
NAME = r"[A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)*_?"


def names_in(source: str) -> Iterator[str]:
    """Yield the texts in ``source`` that are names of variables."""
    for node in ast.walk(ast.parse(source)):
        text = getattr(node, "value", None)
        if isinstance(node, ast.Constant) and isinstance(text, str) and re.fullmatch(NAME, text):
            yield text


def read_by_sources() -> set[str]:
    """Return the variables in files that look at the environment."""
    sources = [path.read_text() for path in ROOT.glob("packages/*/src/**/*.py")]
    found = {name for text in sources if "environ" in text for name in names_in(text)}
    kernels = ROOT / "packages" / "bmt-kernels"
    for path in (kernels / "CMakeLists.txt", *kernels.glob("cmake/*.cmake")):
        found |= set(re.findall(r"\$ENV\{(\w+)\}", path.read_text()))
    return (found - NO_VARIABLES) | JOINED


def test_the_page_has_every_variable_that_is_read_and_no_other() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    on_page = set(re.findall(rf"`({NAME})`", page)) - NO_VARIABLES
    assert len(on_page) > 60
    assert sorted(read_by_sources() - on_page) == [], "not on the page"
    assert sorted(on_page - read_by_sources()) == [], "read nowhere"
