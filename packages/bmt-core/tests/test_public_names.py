"""``import bmt_core``: what it offers, what it costs, what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import bmt_core


def test_all_is_sorted_and_true() -> None:
    assert bmt_core.__all__ == sorted(bmt_core.__all__)
    assert all(hasattr(bmt_core, name) for name in bmt_core.__all__)


IMPORT = """
import contextlib, importlib.util, io, random, signal, sys, threading
import torch
if importlib.util.find_spec("numpy"):
    import numpy
before = (
    torch.get_rng_state().tolist(), random.getstate(), torch.get_num_threads(),
    torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.is_grad_enabled(),
    signal.getsignal(signal.SIGINT), threading.active_count(),
)
import bmt_core
after = (
    torch.get_rng_state().tolist(), random.getstate(), torch.get_num_threads(),
    torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.is_grad_enabled(),
    signal.getsignal(signal.SIGINT), threading.active_count(),
)
assert before == after
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
heavy = {"rich", "pytest", "torch._dynamo", "torch._inductor"}
heavy |= {"click", "bmt_testing", "bmtrain", "bmt_zero", "bmt_optim"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert bmt_core.is_initialized() is False and bmt_core.rank() == 0 and bmt_core.world_size() == 1

# Nor does the start of a run, with all plugins, bring what only the program bmt needs.
with contextlib.redirect_stdout(io.StringIO()):
    bmt_core.init_distributed(device="cpu")
    bmt_core.shutdown()
heavy = {"click", "rich", "pytest", "bmtrain._program"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_import_and_start_change_nothing_and_bring_little() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
