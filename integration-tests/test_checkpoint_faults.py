"""A few of the faults that ``checkpoint_faults.py`` draws, and the host memory that saving and
loading take.
"""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import bmt_core
from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_checkpoint.shared_reader import SharedReader
from bmt_core.errors import CheckpointError
from bmt_optim import AdamOptimizer, OptimManager
from bmt_params.state.state_tensors import StoredTensor
from bmt_testing import on_ranks
from bmt_zero import Block

FAULTS = Path(__file__).with_name("checkpoint_faults.py")
LAYERS, WIDTH = 20, 1024  # as many tensors as big as the largest


@pytest.mark.slow("bmt-checkpoint")
@pytest.mark.ranks(2)
def test_after_a_fault_the_newest_whole_checkpoint_loads_or_the_error_names_the_cause() -> None:
    draws = ["--kills=3", "--full=3", "--mutations=40", "--shared-mutations=3", "--seed=3"]
    found = subprocess.run(
        [sys.executable, str(FAULTS), *draws], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.count(", 0 wrong, ") == 5, found.stderr


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most host memory that is taken inside of the ``with`` statement, beyond what was taken at
    its beginning.
    """

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and kept would hide what is taken
        self._before = anonymous_bytes()
        self.most, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.most = max(self.most, anonymous_bytes() - self._before)
            self._is_over.wait(0.0005)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the memory of the process from Linux"
)
@on_ranks(2, timeout=200)
def test_saving_and_loading_take_the_host_memory_of_few_tensors_of_many(tmp_path: Path) -> None:
    """Saving, loading the model, and loading a training, beyond model and moments."""
    folder = str(tmp_path)
    model = nn.Sequential(*(Block(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)))
    optimizer = AdamOptimizer(model.parameters(), lr=0.01)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    model(torch.ones(1, WIDTH)).sum().backward()
    manager.step()
    save_checkpoint(f"{folder}/first", nn.Linear(2, 2))  # what a first call imports
    load_checkpoint(f"{folder}/first", nn.Linear(2, 2))
    with Peak() as saving:
        save_checkpoint(folder, model, manager)
    bmt_core.synchronize()
    with Peak() as loading:
        load_checkpoint(folder, model)
    bmt_core.synchronize()
    with Peak() as resuming:
        load_checkpoint(folder, model, manager)
    most = [peak.most / (WIDTH * WIDTH * 4) for peak in (saving, loading, resuming)]
    assert max(most) < 3.5, most  # of 60 tensors, with the moments
    message = interrupted(model, manager, folder)
    assert "was interrupted, and model and optimizer are loaded in part" in message
    assert "Input/output error" in message


def interrupted(model: nn.Module, manager: OptimManager, folder: str) -> str:
    """What a load says whose files cannot be read any more on rank 1 when it has begun."""
    whole = SharedReader.stored

    def stored(self: SharedReader, name: str) -> StoredTensor:
        found = whole(self, name)
        return (
            replace(found, read=unreadable)
            if bmt_core.rank() == 1 and name.startswith("7.")
            else found
        )

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(SharedReader, "stored", stored)
        load_checkpoint(folder, model, manager)
    return str(caught.value)


def unreadable() -> torch.Tensor:
    raise OSError(errno.EIO, "Input/output error")
