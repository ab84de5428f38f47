"""What ranks tell each other, over the CPU: it works whatever state the device is in, and waits for
no kernel.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

import bmtrain as bmt

ResultT = TypeVar("ResultT")

OUT_OF_MEMORY = "out of memory"
FAILED = "failed"
_MAX_BYTES = 600


class CaseFailed(Exception):
    """A case cannot go on, on any rank. ``status`` is :data:`OUT_OF_MEMORY` or :data:`FAILED`."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


def together(part: Callable[[], ResultT]) -> ResultT:
    """Return ``part()``, or raise :class:`CaseFailed` on every rank if it raised on one.
    Collective.

    ``part`` must not wait for the device: where one rank fails in the middle of a step, the others'
    kernels wait for it for ever, but their hosts arrive here.
    """
    failure, result = "", None
    try:
        result = part()
    except torch.OutOfMemoryError as error:
        failure = f"{OUT_OF_MEMORY}|{str(error).splitlines()[0]}"
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        failure = f"{FAILED}|{type(error).__name__}: {error}"
    failures = [(rank, text) for rank, text in enumerate(gather_texts(failure)) if text]
    if failures:
        # What is worse than no memory explains the rest.
        rank, text = min(failures, key=lambda item: item[1].startswith(OUT_OF_MEMORY))
        status, reason = text.split("|", 1)
        raise CaseFailed(status, f"rank {rank}: {reason}")
    return result  # type: ignore[return-value]  # no failure: it is there


def gather_texts(text: str) -> list[str]:
    """Return the (shortened) texts of all ranks. Collective."""
    if bmt.world_size() == 1:
        return [text]
    own = torch.zeros(_MAX_BYTES, dtype=torch.uint8)
    encoded = text.encode()[:_MAX_BYTES]
    own[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(bmt.world_size())]
    dist.all_gather(gathered, own)
    return [bytes(other.tolist()).rstrip(b"\0").decode(errors="ignore") for other in gathered]


def largest(values: Sequence[float]) -> list[float]:
    """Return each value's maximum over all ranks. Collective."""
    return _reduced(values, dist.ReduceOp.MAX)


def mean(values: Sequence[float]) -> list[float]:
    """Return each value's mean over all ranks. Collective."""
    return [total / bmt.world_size() for total in _reduced(values, dist.ReduceOp.SUM)]


def _reduced(values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    if bmt.world_size() > 1:
        dist.all_reduce(tensor, op=operation)
    reduced: list[float] = tensor.tolist()
    return reduced
