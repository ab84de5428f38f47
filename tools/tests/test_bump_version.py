"""One version for all packages."""

from __future__ import annotations

from pathlib import Path

import pytest

import bump_version

CORE = """[project]
name = "bmt-core"
version = "0.1.0"
dependencies = [
    "torch>=2.11",
]

[project.entry-points.bmt]
bmt-core = "bmt_core.core_plugin"
"""

FACADE = """[project]
name = "bmt-train"
version = "0.1.0"
dependencies = ["bmt-core==0.1.0"]

[project.optional-dependencies]
zero = ["bmt-zero==0.1.0"]
all = ["bmt-train[zero]==0.1.0"]

[tool.hatch.build.targets.wheel]
packages = ["src/bmtrain"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"bmt-core": CORE, "bmtrain": FACADE}.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "pyproject.toml").write_text(text)
    return tmp_path


def test_this_repository_has_one_version() -> None:
    assert bump_version.main(["--check"]) == 0


def test_new_version_is_written_everywhere_and_nowhere_else(tree: Path) -> None:
    assert bump_version.main(["--root", str(tree), "1.2.0rc1"]) == 0
    assert (tree / "packages/bmt-core/pyproject.toml").read_text() == CORE.replace(
        "0.1.0", "1.2.0rc1"
    )
    assert (tree / "packages/bmtrain/pyproject.toml").read_text() == FACADE.replace(
        "0.1.0", "1.2.0rc1"
    )
    assert bump_version.main(["--root", str(tree), "--check"]) == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'version = "0.1.0"',
            'version = "0.2.0"',
            "packages/bmtrain/pyproject.toml: version 0.2.0",
        ),
        ('"bmt-core==0.1.0"', '"bmt-core>=0.1.0"', "'bmt-core>=0.1.0' should be 'bmt-core==0.1.0'"),
        ('"bmt-zero==0.1.0"', '"bmt-zero"', "'bmt-zero' should be 'bmt-zero==0.1.0'"),
        (
            '"bmt-train[zero]==0.1.0"',
            '"bmt-train[zero]==0.0.9"',
            "'bmt-train[zero]==0.0.9' should be 'bmt-train[zero]==0.1.0'",
        ),
        ('version = "0.1.0"', "", "packages/bmtrain/pyproject.toml: no line"),
    ],
)
def test_check_finds(
    tree: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    path = tree / "packages/bmtrain/pyproject.toml"
    path.write_text(FACADE.replace(old, new))
    assert bump_version.main(["--root", str(tree), "--check"]) == 1
    assert message in capsys.readouterr().out


def test_what_is_no_version_is_refused(tree: Path) -> None:
    with pytest.raises(SystemExit):
        bump_version.main(["--root", str(tree), "next"])
