"""Settings of all tests."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

Install = Callable[..., None]
ROOT = Path(__file__).resolve().parent

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("bmt", deadline=None)
settings.load_profile("bmt")

# Small operations of the plain trainings would wait for a second thread, which the ranks of other
# tests keep from a core. Ranks have one thread, too; tests of kernels set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# For each connection to a store torch asks for the name of ::ffff:127.0.0.1, which /etc/hosts does
# not have. Where the name server leaves a question unanswered now and then, a start would wait 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption(
        "--slow",
        choices=("all", "changed"),
        default="all",
        help="which slow tests: all (default), or those of what differs from origin's main branch",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark ``slow``."""
    config.addinivalue_line(
        "markers",
        "slow(*packages): waits for timeouts or starts hosts; with --slow changed it runs where one"
        " of the packages it is about, one of the paths, which have a slash, or its own file"
        " differs from origin's main branch",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests of what has not changed."""
    changed = changed_files() if config.getoption("--slow") == "changed" else None
    if changed is None:
        return
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is None:
            continue
        paths = [each if re.search("[/.]", each) else f"packages/{each}/" for each in mark.args]
        own = item.path.relative_to(ROOT).as_posix()
        if not any(path == own or path.startswith(tuple(paths)) for path in changed):
            names = ", ".join(mark.args)
            item.add_marker(pytest.mark.skip(reason=f"slow, and {names} as on the main branch"))


def changed_files() -> list[str] | None:
    """Return the files that differ from origin's main branch; None where there is no such branch,
    or this is it: then all are tested.
    """
    for branch in ("origin/HEAD", "origin/main"):
        base = _git("merge-base", "HEAD", branch)
        if base is not None:
            changed = _git("diff", "--name-only", base.strip())
            return changed.splitlines() if changed else None
    return None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return ended.stdout if ended.returncode == 0 else None


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install distributions as pip would: module and metadata, each in a directory of its own on
    ``sys.path``, last one first.
    """

    def install_one(
        distribution: str,
        code: str,
        *,
        plugin: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
    ) -> None:
        directory = tmp_path / distribution
        module = f"{distribution}_of_{tmp_path.name}".replace("-", "_")
        metadata = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (directory / f"{module}.py").write_text(textwrap.dedent(code))
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}"
        )
        (metadata / "entry_points.txt").write_text(f"[bmt]\n{plugin or distribution} = {module}\n")
        monkeypatch.syspath_prepend(str(directory))

    return install_one
