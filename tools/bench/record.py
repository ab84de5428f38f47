"""Records: one JSON object per case, with every setting, so that a figure can be
explained later.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import bmtrain as bmt
from bench.case import Case

Record = dict[str, Any]
_VARIABLES = ("NCCL_", "PYTORCH_", "TORCH_NCCL_", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")


def describe_run(arguments: Sequence[str], device: torch.device) -> Record:
    """Return what all records of a run have in common; ``run`` tells runs apart."""
    now = datetime.now(UTC)
    is_cuda = device.type == "cuda"
    return {
        "run": now.strftime("%Y%m%dT%H%M%S.%f"),
        "date": now.date().isoformat(),
        "command": " ".join(arguments),
        "ranks": bmt.world_size(),
        "device": torch.cuda.get_device_name(device) if is_cuda else f"CPU, {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if is_cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,  # type: ignore[no-untyped-call]
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }


def describe_case(case: Case) -> Record:
    """Return the settings of ``case``."""
    return {
        **dataclasses.asdict(case),
        "shape": dataclasses.asdict(case.shape),
        "parameters": case.shape.num_parameters(),
        "flops_per_token": None if case.model is None else case.model.flops_per_token(),
        "torchao": None if case.float8 is None else version("torchao"),
    }


def append(path: Path, record: Record) -> None:
    """Add ``record`` to the file, at once, so that a run that is cut short leaves what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
