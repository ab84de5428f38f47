"""The checklist of a release finds what must not be released. Building and installing is run by
hand, before a release: it takes minutes.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from release import Release, failure_of, file_problems, run_steps, table, uncommitted

PROJECT = """[build-system]
requires = []
build-backend = "none"

[project]
name = "bmt-{name}"
version = "{version}"
description = "A package"
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = ["bmt-core=={version}"]
"""
METADATA = """Metadata-Version: 2.4
Name: bmt-zero
Version: 0.1.0
Summary: A package
License-Expression: Apache-2.0
Requires-Python: >=3.11
Description-Content-Type: text/markdown

# bmt-zero

10⁹ parameters …
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("core", "zero"):
        package = tmp_path / "packages" / f"bmt-{name}"
        package.mkdir(parents=True)
        (package / "pyproject.toml").write_text(PROJECT.format(name=name, version="0.1.0"))
        (package / "README.md").write_text(f"# bmt-{name}\n\n10⁹ parameters …\n")
    for folder in ("changes", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "changes" / "README.md").write_text("# Fragments\n")
    page_of_changes(tmp_path).write_text("# Changes\n\n## 0.1.0 (2026-12-01)\n\n- All.\n")
    return tmp_path


def page_of_changes(tree: Path) -> Path:
    return tree / "docs" / "changes.md"


def release_of(tree: Path) -> Release:
    return Release(tree, tree / "files", tree / "scratch")


def wheel(tree: Path, metadata: str = METADATA, without: str = "", extra: str = "") -> Path:
    path = tree / "bmt_zero-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("bmt_zero-0.1.0.dist-info/METADATA", metadata)
        for name in ("bmt_zero-0.1.0.dist-info/licenses/LICENSE", "bmt_zero/py.typed", extra):
            if name and name.rpartition("/")[2] != without:
                file.writestr(name, "")
    return path


def test_a_good_tree_has_no_problems(tree: Path) -> None:
    release = release_of(tree)
    assert release.version_problems() == []
    assert release.changelog_problems(may_be_unreleased=False) == []
    assert file_problems(wheel(tree), tree / "packages" / "bmt-zero") == []


def test_files_that_are_not_committed_are_found(tree: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tree, check=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    assert uncommitted(tree) == []
    page_of_changes(tree).write_text("")
    (tree / "new.py").write_text("")
    assert uncommitted(tree) == [" M docs/changes.md", "?? new.py"]


def test_another_version_and_a_loose_pin_are_found(tree: Path) -> None:
    path = tree / "packages" / "bmt-zero" / "pyproject.toml"
    path.write_text(PROJECT.format(name="zero", version="0.2.0").replace("==0.2.0", ">=0.1"))
    problems = release_of(tree).version_problems()
    assert [problem.partition(": ")[2] for problem in problems] == [
        "version 0.1.0",
        "version 0.2.0",
        "'bmt-core>=0.1' should be 'bmt-core==0.2.0'",
    ]


@pytest.mark.parametrize(
    ("heading", "problem", "rehearsed"),
    [
        ("## 0.0.9", "no heading of level 2 with 0.1.0", "no heading"),
        ("## 0.1.0rc1", "no heading of level 2 with 0.1.0", "no heading"),
        ("## 0.1.0 (not released)", "calls 0.1.0 not released", ""),
    ],
)
def test_a_version_that_the_changelog_does_not_release_is_found(
    tree: Path, heading: str, problem: str, rehearsed: str
) -> None:
    page_of_changes(tree).write_text(f"# Changes\n\n{heading}\n\n- All of 0.1.0.\n")
    (found,) = release_of(tree).changelog_problems(may_be_unreleased=False)
    assert problem in found
    problems = release_of(tree).changelog_problems(may_be_unreleased=True)
    assert [rehearsed in text for text in problems] == ([True] if rehearsed else [])


def test_fragments_that_no_release_has_are_found(tree: Path) -> None:
    (tree / "changes" / "faster-loads.feature.md").write_text("Loads are faster.\n")
    (found,) = release_of(tree).changelog_problems(may_be_unreleased=False)
    assert found.endswith("in no release: faster-loads.feature.md")
    assert release_of(tree).changelog_problems(may_be_unreleased=True) == []


@pytest.mark.parametrize(
    ("old", "new", "without", "extra", "problem"),
    [
        ("Version: 0.1.0", "Version: 0.1.1", "", "", "Version is '0.1.1', not '0.1.0'"),
        ("Name: bmt-zero", "Name: bmt-one", "", "", "Name is 'bmt-one', not 'bmt-zero'"),
        ("License-Expression: Apache-2.0\n", "", "", "", "License-Expression is None"),
        ("# bmt-zero", "# bmt", "", "", "its description is not the README"),
        ("", "", "LICENSE", "", "it has no LICENSE"),
        ("", "", "py.typed", "", "it has no py.typed"),
        ("", "", "", "bmt_zero/tests/test_a.py", "it has tests"),
    ],
)
def test_a_wheel_that_differs_from_its_package_is_found(
    tree: Path, old: str, new: str, without: str, extra: str, problem: str
) -> None:
    path = wheel(tree, METADATA.replace(old, new), without, extra)
    (found,) = file_problems(path, tree / "packages" / "bmt-zero")
    assert problem in found


def test_a_source_archive_is_compared_too(tree: Path) -> None:
    path = tree / "bmt_zero-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"PKG-INFO": METADATA, "sub/PKG-INFO": "", "LICENSE": ""}.items():
            entry = tarfile.TarInfo(f"bmt_zero-0.1.0/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    assert file_problems(path, tree / "packages" / "bmt-zero") == []
    assert file_problems(path, tree / "packages" / "bmt-core") != []


def test_a_missing_file_is_found(tree: Path) -> None:
    (tree / "files").mkdir()
    problems = release_of(tree).metadata_problems()
    assert [problem.partition(":")[0] for problem in problems] == ["bmt-core", "bmt-zero"]


def test_a_failed_command_shows_what_it_printed(tmp_path: Path) -> None:
    assert failure_of([sys.executable, "-c", "print(1)"], tmp_path, {}) == []
    printed = failure_of([sys.executable, "-c", "print(1); raise SystemExit(3)"], tmp_path, {})
    assert printed[0] == "1" and printed[-1].startswith("Exit status 3: ")


def test_steps_after_a_failed_build_do_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    steps: dict[str, list[str]] = {"the changelog": ["bad"], "wheels": ["worse"], "last": []}
    results = run_steps((name, found.copy) for name, found in steps.items())
    assert [result for _, result, _ in results] == ["FAILED", "FAILED", "not run"]
    assert "bad" in capsys.readouterr().out
    assert table(results).splitlines()[-1].startswith("FAILED")
    assert table(results[2:]).splitlines()[-1].startswith("FAILED")
    assert table([("wheels", "ok", 1.0)]).splitlines()[-1].startswith("ok")


def test_a_release_and_a_rehearsal_have_the_steps_of_each_package(tree: Path) -> None:
    names = [name for name, _ in release_of(tree).steps()]
    assert names[0] == "everything is committed"
    assert names[-2:] == ["bmt-core alone", "bmt-zero alone"]
    assert [name for name, _ in release_of(tree).steps(is_rehearsal=True)] == names[1:]
