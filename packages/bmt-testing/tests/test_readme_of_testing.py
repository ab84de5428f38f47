"""The test files in the README do what the README says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
MODEL = """
import torch
from torch import nn

import bmt_core


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        logits = self.head(self.layers(self.embedding(tokens)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def tokens(seed):
    return torch.randint(11, (4, 5))
"""
MISTAKE = "return loss / (bmt_core.world_size() if bmt_core.is_initialized() else 1)"


def words(line: str) -> str:
    """Return ``line`` without numbers, spaces in a row, and what is left out."""
    without_numbers = re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", line)
    return " ".join(without_numbers.removesuffix("...'").split())


def pytest_output(capfd: pytest.CaptureFixture[str]) -> str:
    """Return what pytest prints of the current directory, whose modules are forgotten after it."""
    path, modules = list(sys.path), set(sys.modules)
    # The faulthandler of the pytest around this one stays as it is.
    plugins = ["no:cacheprovider", "no:xdist", "no:faulthandler"]
    try:
        pytest.main(["--capture=no", *[part for name in plugins for part in ("-p", name)]])
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(Path.cwd())):
                del sys.modules[name]
    return capfd.readouterr().out


def test_the_ten_lines_pass_and_with_a_mistake_print_what_the_readme_shows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    code, on_ranks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) == 10
    (shown,) = re.findall(r"```\n(E .*?)```", text, re.DOTALL)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_ranks.py").write_text(on_ranks)
    (tmp_path / "right").mkdir()
    (tmp_path / "right" / "gpt.py").write_text(MODEL)
    (tmp_path / "right" / "test_gpt.py").write_text(
        code.replace("max_examples=20", "max_examples=4")
    )
    (tmp_path / "wrong.py").write_text(MODEL.replace("return loss", MISTAKE))
    (tmp_path / "test_wrong.py").write_text(code.replace("from gpt", "from wrong"))
    output = pytest_output(capfd)
    assert "1 failed, 4 passed" in output, output
    printed = [words(line) for line in output.splitlines()]
    assert len(shown.splitlines()) == 10
    for line in shown.splitlines():
        wanted = words(line.replace("from gpt import", "from wrong import"))
        assert any(found.startswith(wanted) for found in printed), (wanted, output)
