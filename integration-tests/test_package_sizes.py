"""No package grows unnoticed: each has a limit of lines."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
SOURCES = {".py", ".pyi", ".h", ".inl", ".cpp", ".c", ".cuh", ".cu"}
LIMITS = {
    "bmt-checkpoint": 4_900,
    "bmt-core": 7_275,
    "bmt-cp": 1_200,
    "bmt-hf": 1_880,
    "bmt-kernels": 7_000,
    "bmt-optim": 7_630,
    "bmt-params": 8_330,
    "bmt-pipeline": 4_500,
    "bmt-testing": 7_600,
    "bmt-tp": 3_910,
    "bmt-watch": 2_300,
    "bmt-zero": 8_330,
    "bmtrain": 4_900,
}
"""Lines of the sources of each package, rounded up to hundreds. When one shrinks, so does its
number. Raising one takes a line in docs/decisions.md that says what for.
"""


def lines_of(package: str) -> int:
    return sum(
        len(path.read_text().splitlines())
        for folder in ("src", "csrc")
        for path in (PACKAGES / package / folder).rglob("*")
        if path.suffix in SOURCES
    )


def test_every_package_has_a_limit() -> None:
    assert {path.parent.name for path in PACKAGES.glob("*/pyproject.toml")} == LIMITS.keys()


@pytest.mark.parametrize("package", LIMITS)
def test_a_package_is_not_larger_than_its_limit(package: str) -> None:
    assert lines_of(package) <= LIMITS[package]
