"""Small helpers that training scripts use."""

from __future__ import annotations

import re

import torch

from bmt_core.run.runtime import current


def round_up(x: int, d: int) -> int:
    """Return the smallest multiple of ``d`` that is at least ``x``.

    >>> round_up(10, 4)
    12
    """
    return (x + d - 1) // d * d


class AverageRecorder:
    """An exponential moving average, corrected for its start: v̂ = (v − αⁿ·s)/(1 − αⁿ) with v ← α·v + (1−α)·x from v
    = s.

    So the value after n records is an average of these records alone, and ``start_value`` s is only what it is before
    the first.

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
        """Take one more value in."""
        self._moving = self.alpha * self._moving + (1 - self.alpha) * v
        self._left *= self.alpha

    @property
    def value(self) -> float:
        """The average so far."""
        return self._start if self._left == 1 else self._moving / (1 - self._left)


def tp_split_tensor(tensor: torch.Tensor, split_dim: int) -> torch.Tensor:
    """Return this rank's tensor-parallel slice of ``tensor`` along ``split_dim``, contiguous; the whole with tp_size 1."""
    topology = current().topology
    size, length = topology.axis_size("tp"), tensor.shape[split_dim]
    if length % size:
        raise ValueError(f"Dim {split_dim} of shape {tuple(tensor.shape)} is not a multiple of tp_size={size}.")
    return tensor.narrow(split_dim, topology.axis_rank("tp") * (length // size), length // size).contiguous()


def check_torch_version(version_str: str) -> int:
    """Return 1 when the installed torch is newer than ``version_str``, 0 when it is that version, -1 when it is older.

    What stands after the numbers does not count: ``2.2.0a0+abc`` is 2.2.0, and 2.2 too.
    """
    installed, asked = _numbers(torch.__version__), _numbers(version_str)
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
