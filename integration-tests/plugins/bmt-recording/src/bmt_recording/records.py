"""What was recorded in this process."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Call(NamedTuple):
    """One call on a group.

    ``op`` is the name of the method of ``Group``. ``numel`` and ``bytes`` are those of the whole
    buffer: of the output of an all_gather, of the input of a reduce_scatter, of the tensor of all
    others; ``dtype`` is the dtype of that buffer.
    """

    op: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    bytes: int


calls: list[Call] = []
"""All calls of this rank since the last :func:`clear`, in the order in which they were issued."""


def clear() -> None:
    """Forget all calls."""
    calls.clear()
