"""The training loop of the README runs as it stands there, and learns."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import torch

from bmt_core.testing import RankPool

README = Path(__file__).parents[2] / "README.md"


def printed_by(script: str, directory: str) -> str:
    """Run ``script`` as ``python script`` does in ``directory``, and return what it printed."""
    os.chdir(directory)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def test_loop_learns_on_two_processes(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(code)
    # Processes of their own, which have not asked for a GPU yet: all are hidden, since there may be one for two ranks.
    with contextlib.closing(RankPool(2)) as pool:
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        printed, nothing = pool.run(printed_by, "train.py", str(tmp_path), init=None, env=hidden, timeout=120)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 60
    assert losses[0] > 5 and losses[-1] < 3.5
    assert nothing == ""
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)) >= {"embedding.weight", "head.bias"}
