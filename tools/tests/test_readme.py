"""The training loop of the README runs as it stands there, with what the first line above it
installs; its versions are the packages'.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet

from bmt_testing import RankPool

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PROJECTS = [
    tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")
]


def loop() -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    return str(code)


def printed_by(script: str, directory: str) -> str:
    """Run ``script`` as ``python script`` does in ``directory``, and return what it printed."""
    os.chdir(directory)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def test_loop_learns_on_two_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(loop())
    # Processes of their own, which have not asked for a GPU yet: all are hidden, since there may be
    # one for two ranks.
    with contextlib.closing(RankPool(2)) as pool:
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        printed, nothing = pool.run(
            printed_by, "train.py", str(tmp_path), init=None, env=hidden, timeout=120
        )
    losses = [
        float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)$", printed, re.MULTILINE)
    ]
    assert len(losses) == 60
    assert losses[0] > 5 and losses[-1] < 3.5
    assert nothing == ""
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)) >= {
        "embedding.weight",
        "head.bias",
    }


WITHOUT = """
import importlib.util, runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
runpy.run_path("train.py", run_name="__main__")
"""


def test_first_install_line_has_what_the_loop_needs(tmp_path: Path) -> None:
    lines = re.findall(r"^pip (?:install) (.*)$", README.read_text(), re.MULTILINE)
    installed = {path.replace("-", "_") for path in re.findall(r"packages/([\w-]+)", lines[0])}
    missing = {path.name.replace("-", "_") for path in ROOT.glob("packages/*")} - installed
    assert "bmt_tp" in missing
    (tmp_path / "train.py").write_text(loop().replace("range(60)", "range(2)"))
    plugins = ",".join(
        entry.name
        for entry in entry_points(group="bmt")
        if entry.name.replace("-", "_") not in installed
    )
    env = {**os.environ, "BMT_DISABLE_PLUGINS": plugins, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT.format(missing=missing)]
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "step 1: loss" in result.stdout and (tmp_path / "model.pt").exists()


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 100
    pictures = re.findall(r"^!\[[^\]]+\]\(([^)]+)\)$", README.read_text(), re.MULTILINE)
    assert len(pictures) == 1 and (ROOT / pictures[0]).exists()


def test_versions_in_the_readme_are_those_of_the_packages() -> None:
    (python, oldest, newest, tested) = re.findall(
        r"^Python ([\d.]+) or later and torch ([\d.]+) to ([\d.]+)\. Tested: (.*)$",
        README.read_text(),
        re.MULTILINE,
    )[0]
    assert {project["requires-python"] for project in PROJECTS} == {f">={python}"}
    torch_of = [
        each
        for project in PROJECTS
        for each in project["dependencies"]
        if re.match(r"torch\b", each)
    ]
    major, minor = newest.split(".")
    assert torch_of == [f"torch>={oldest},<{major}.{int(minor) + 1}"]
    versions = re.findall(r"\b2\.\d+\.\d+", tested)
    assert versions[0].startswith(f"{oldest}.")
    assert all(version in SpecifierSet(f">={oldest}") for version in versions)
    pinned = re.search(r"^torch==(.*)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] in versions
    assert re.findall(r"Python ([\d.]+\d) with", tested)[0] == python
