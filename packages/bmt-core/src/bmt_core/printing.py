"""Output of programs that run on many ranks: lines on one of them, titled blocks, memory in use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from bmt_core.run.runtime import current, is_initialized
from bmt_core.run.runtime import rank as own_rank
from bmt_core.utils import round_up

_WIDTH = 80
_GIBIBYTE = 2**30


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """``print``, on one rank only."""
    if own_rank() == rank:
        print(*args, **kwargs)


def print_block(title: str, content: str | None = None, file: TextIO | None = None) -> None:
    """Print a title in a line of ``=``, and ``content`` below it.

    >>> print_block("GPT", "12 layers")
    ===================================== GPT ======================================
    12 layers
    """
    out = sys.stdout if file is None else file
    print(f" {title} ".center(_WIDTH, "="), file=out)
    if content is not None:
        print(content, file=out)


def print_dict(title: str, content: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print a block with one line per entry, the values aligned.

    >>> print_dict("GPT", {"layers": 12, "dim_model": 768})
    ===================================== GPT ======================================
    layers    : 12
    dim_model : 768
    """
    width = max((len(str(key)) for key in content), default=0)
    print_block(title, "\n".join(f"{key!s:<{width}} : {value}" for key, value in content.items()), file)


def see_memory(message: str, detail: bool = False) -> None:
    """Print ``message`` and the memory in use on rank 0: of its device, or of the process on the CPU.

    ``detail`` prints torch's whole summary for a CUDA device. The device's peak starts anew on every rank.
    """
    device = current().device if is_initialized() else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        print_rank(f"{message}\n{_process_memory()}")
        return
    print_rank(f"{message}\n{torch.cuda.memory_summary(device) if detail else _device_memory(device)}")
    torch.cuda.reset_peak_memory_stats(device)


def _device_memory(device: torch.device) -> str:
    return _lines(
        {
            "allocated": torch.cuda.memory_allocated(device),
            "allocated peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "reserved peak": torch.cuda.max_memory_reserved(device),
        }
    )


def _process_memory() -> str:
    try:
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        return _lines({label: int(fields[key].split()[0]) * 1024 for label, key in _PROCESS.items()})
    except (OSError, KeyError):
        return "  (this operating system does not tell the memory of a process)"


_PROCESS = {"process": "VmRSS", "process peak": "VmHWM"}


def _lines(sizes: Mapping[str, int]) -> str:
    width = round_up(max(map(len, sizes)) + 1, 4)
    return "\n".join(f"  {label:<{width}}{size / _GIBIBYTE:.2f} GiB" for label, size in sizes.items())
