"""A chrome trace of two steps, as torch's profiler writes it: ui.perfetto.dev shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import bmtrain as bmt

STEPS = 2


def write_trace(step: Callable[[], object], path: Path) -> None:
    """Run ``step`` two more times, and on rank 0 write what happened in them. Collective."""
    if bmt.rank() != 0:
        for _ in range(STEPS):
            step()
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=activities, experimental_config=_all_threads()) as profiler:
        for number in range(STEPS):
            with record_function(f"bench step {number}"):
                step()
    profiler.export_chrome_trace(str(path))


def _all_threads() -> Any:
    """Return what has the profiler watch threads that were there before it: that of an offloading
    optimizer, say.
    """
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # a torch that cannot
        return None
