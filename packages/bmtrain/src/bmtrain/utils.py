"""Helpers for training scripts: printing on one rank, memory in use, a moving average, the version
of torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import torch

import bmt_core
from bmt_core.launch import Launch

_WIDTH = 80
_GIBIBYTE = 2**30


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """``print``, on one rank only. Before ``init_distributed()`` the rank is the one that the
    launcher has set.
    """
    own = bmt_core.rank() if bmt_core.is_initialized() else Launch.from_env().rank
    if own == rank:
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
    print_block(
        title, "\n".join(f"{key!s:<{width}} : {value}" for key, value in content.items()), file
    )


def see_memory(message: str, detail: bool = False) -> None:
    """Print ``message`` and the memory in use on rank 0: that of its CUDA device, or of the process
    on the CPU.

    ``detail`` prints torch's memory summary for a CUDA device. The device's peak is reset, on
    every rank.
    """
    device = (
        bmt_core.current().device
        if bmt_core.is_initialized()
        else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    if device.type != "cuda":
        print_rank(f"{message}\n{_process_memory()}")
        return
    print_rank(
        f"{message}\n{torch.cuda.memory_summary(device) if detail else _device_memory(device)}"
    )
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
        return _lines(
            {label: int(fields[key].split()[0]) * 1024 for label, key in _PROCESS.items()}
        )
    except (OSError, KeyError):
        return "  (this operating system does not report the memory of a process)"


_PROCESS = {"process": "VmRSS", "process peak": "VmHWM"}


def _lines(sizes: Mapping[str, int]) -> str:
    return "\n".join(f"  {label:<16}{size / _GIBIBYTE:.2f} GiB" for label, size in sizes.items())


def round_up(x: int, d: int) -> int:
    """Return the smallest multiple of ``d`` that is at least ``x``.

    >>> round_up(10, 4)
    12
    """
    return (x + d - 1) // d * d


class AverageRecorder:
    """A bias-corrected exponential moving average: v / (1 − αⁿ) after n records, with v ← α·v +
    (1−α)·x from v = 0.

    It is an average of the recorded values only. ``start_value`` is the value before the
    first record.

    >>> average = AverageRecorder(alpha=0.5)
    >>> for loss in (4.0, 1.0):
    ...     average.record(loss)
    >>> average.value
    2.0
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0) -> None:
        self.alpha = alpha
        self._start = start_value
        self._moving = 0.0
        self._left = 1.0  # alpha ** number of records

    def record(self, v: float) -> None:
        """Add a value."""
        self._moving = self.alpha * self._moving + (1 - self.alpha) * v
        self._left *= self.alpha

    @property
    def value(self) -> float:
        """The average so far."""
        return self._start if self._left == 1 else self._moving / (1 - self._left)


def tp_split_tensor(tensor: torch.Tensor, split_dim: int) -> torch.Tensor:
    """Return this rank's tensor-parallel slice of ``tensor`` along ``split_dim``, contiguous; the
    whole with tp_size 1.
    """
    topology = bmt_core.current().topology
    size, length = topology.axis_size("tp"), tensor.shape[split_dim]
    if length % size:
        raise ValueError(
            f"Dim {split_dim} of shape {tuple(tensor.shape)} is not a multiple of tp_size={size}."
        )
    return tensor.narrow(
        split_dim, topology.axis_rank("tp") * (length // size), length // size
    ).contiguous()


def check_torch_version(version_str: str) -> int:
    """Return 1 when the installed torch is newer than ``version_str``, 0 when it is that version,
    -1 when it is older.

    Text after the numbers is ignored: ``2.2.0a0+abc`` equals 2.2.0 and 2.2.
    """
    installed, asked = _numbers(torch.version.__version__), _numbers(version_str)
    length = max(len(installed), len(asked))
    left, right = (numbers + [0] * (length - len(numbers)) for numbers in (installed, asked))
    return (left > right) - (left < right)


def _numbers(version: str) -> list[int]:
    """Return the leading numbers of a version.

    >>> _numbers("2.2.0a0+abc")
    [2, 2, 0]
    """
    leading = re.match(r"\d+(\.\d+)*", version)
    if leading is None:
        raise ValueError(f"A version looks like '2.1.0', not like {version!r}.")
    return [int(number) for number in leading[0].split(".")]
