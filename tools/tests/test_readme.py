"""The training loop of the README runs as it stands there, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"


def losses_of(tmp_path: Path, *launcher: str) -> list[float]:
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(code)
    # Neither the plain start nor torchrun may find a launcher's variables, or GPUs that only one of them uses.
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, "train.py"]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)) >= {"embedding.weight", "head.bias"}
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)$", result.stdout, re.MULTILINE)]


@pytest.mark.ranks(2)
def test_loop_learns_on_two_processes(tmp_path: Path) -> None:
    losses = losses_of(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert len(losses) == 60
    assert losses[0] > 5 and losses[-1] < 3.5
