"""The option ``--slow`` of the tests: which slow tests run after a change."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

@pytest.mark.slow("bmt-one")
def test_one(): pass

@pytest.mark.slow("bmt-two", "tools/hosts.py")
def test_two(): pass

def test_quick(): pass
"""


def passed(tree: Path, *options: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", *options]
    ended = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    lines = ended.stdout.splitlines()
    return {line.split("::test_")[1] for line in lines if line.startswith("PASSED")}


def git(tree: Path, *arguments: str) -> None:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(tree), *author, *arguments], check=True, capture_output=True)


def test_slow_tests_run_where_what_they_are_about_differs_from_the_main_branch(
    tmp_path: Path,
) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    for name in ("packages/bmt-one/x.py", "packages/bmt-two/x.py", "tools/hosts.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    everything = {"one", "two", "quick"}
    assert passed(tmp_path, "--slow", "changed") == everything  # of whatever it differs
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert passed(tmp_path, "--slow", "changed") == everything  # it is the main branch
    (tmp_path / "packages/bmt-one/x.py").write_text("changed = True\n")
    assert passed(tmp_path, "--slow", "changed") == {"one", "quick"}
    assert passed(tmp_path) == everything
    git(tmp_path, "checkout", "-q", "packages")
    (tmp_path / "tools/hosts.py").write_text("changed = True\n")
    git(tmp_path, "commit", "-q", "-a", "-m", "second")
    assert passed(tmp_path, "--slow", "changed") == {"two", "quick"}
