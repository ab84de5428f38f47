"""The diff of the README and of the first page trains as its plain lines do; what they say of
installing and of versions is true.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

import dev
import readme_picture
from bmt_testing import RankPool

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
HOME = ROOT / "docs" / "index.md"
INSTALL = ROOT / "docs" / "install.md"
FIRST_TRAINING = ROOT / "docs" / "first-training.md"
PROJECTS = [
    tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def side(page: Path, sign: str) -> str:
    """Return the lines of the page's diff that stay or have ``sign``, as a program on the CPU."""
    (diff,) = blocks(page, "diff")
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)]
    return "\n".join(lines).replace(".cuda()", "").replace("seed=0", "seed=0, device='cpu'")


def trained(source: str, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Run ``source`` on this rank's rows of four batches; return the parameters, whole."""
    import bmtrain as bmt

    draw = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, 3, generator=draw) for _ in range(4)]
    names = {
        "torch": torch,
        "bmt": bmt,
        "Model": lambda: torch.nn.Sequential(torch.nn.Linear(3, 5)).double(),
        "batches": [(each[rank::ranks].double(), each.argmax(1)[rank::ranks]) for each in rows],
    }
    torch.manual_seed(0)
    exec(source, names)
    state: dict[str, torch.Tensor] = dict(names["model"].state_dict())  # type: ignore[attr-defined]
    if bmt.is_initialized():
        bmt.shutdown()
    return state


def trained_on_a_rank(source: str) -> dict[str, torch.Tensor]:
    return trained(source, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


@pytest.mark.parametrize("page", [README, HOME], ids=["README", "home"])
def test_the_diff_trains_on_two_processes_as_plain_torch_does(page: Path) -> None:
    assert sum(line.startswith("+") for line in blocks(page, "diff")[0].splitlines()) == 6
    expected = trained(side(page, "-"), 0, 1)
    # Processes of their own, which have not asked for a GPU yet.
    with contextlib.closing(RankPool(2)) as pool:
        for found in pool.run(trained_on_a_rank, side(page, "+"), init=None, timeout=120):
            torch.testing.assert_close(found, expected)


WITHOUT = """
import importlib.util, runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
runpy.run_path("train.py", run_name="__main__")
"""


def test_dev_install_has_what_the_first_training_needs(tmp_path: Path) -> None:
    directories = dev.required_directories(dev.FIRST_PACKAGES)
    installed = {directory.name.replace("-", "_") for directory in directories}
    missing = {path.name.replace("-", "_") for path in ROOT.glob("packages/*")} - installed
    assert "bmt_tp" in missing
    script = "\n".join(blocks(FIRST_TRAINING, "python")[:3]).replace("range(60)", "range(2)")
    (tmp_path / "train.py").write_text(script)
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
    assert "step 0: loss" in result.stdout and (tmp_path / "model.pt").exists()


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 100
    pictures = re.findall(r"^!\[[^\]]+\]\(([^)]+)\)$", README.read_text(), re.MULTILINE)
    assert [ROOT / picture for picture in pictures] == [readme_picture.PICTURE]


def test_the_picture_has_the_recorded_figures(tmp_path: Path) -> None:
    readme_picture.draw(tmp_path / readme_picture.PICTURE.name)
    drawn, expected = (
        re.findall(r">([^<>]+)</text>", path.read_text())
        for path in (tmp_path / readme_picture.PICTURE.name, readme_picture.PICTURE)
    )
    assert drawn == expected and len(drawn) > 20
    speeds = re.findall(
        r"compiled, on two H200: ([\d,]+) .*?peak of ([\d.]+) GiB", README.read_text()
    )
    speeds += re.findall(r"best settings: ([\d,]+) and ([\d.]+) GiB", README.read_text())
    assert [{value.replace(",", "") for value in pair} <= {*drawn} for pair in speeds] == [True] * 2


def test_versions_in_the_page_are_those_of_the_packages() -> None:
    (python, oldest, newest, tested) = re.findall(
        r"^Python ([\d.]+) or later and torch ([\d.]+) to ([\d.]+)\. Tested: (.*)$",
        INSTALL.read_text(),
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
