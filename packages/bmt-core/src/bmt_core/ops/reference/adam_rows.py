"""What the references of ``adam_step`` work on: settings, and rows of tensors that are updated alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Rows begin on such multiples in scratch memory, so that kernels can load several elements at once.
ALIGNMENT = 64


@dataclass(frozen=True)
class Settings:
    """The arguments of ``adam_step`` that are no lists."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    hold: bool
    scale: float | torch.Tensor
    clip: torch.Tensor | None
    skip: torch.Tensor | None


class Row(NamedTuple):
    """What belongs to one parameter, or to a slice of it."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None
    is_flat: bool
    """Whether the tensors have one dimension and no gaps, so that they can be cut."""

    def cut(self, limit: int) -> list[Row]:
        """Return consecutive slices of at most ``limit`` elements of a flat row; one that is not flat stays whole."""
        length = self.param.numel()
        if length <= limit or not self.is_flat:
            return [self]
        return [self._slice(slice(start, start + limit)) for start in range(0, length, limit)]

    def _slice(self, part: slice) -> Row:
        master = None if self.master is None else self.master[part]
        return Row(self.param[part], self.grad[part], self.exp_avg[part], self.exp_avg_sq[part], master, True)


def groups(*columns: Sequence[torch.Tensor | None]) -> list[list[Row]]:
    """Return the rows that have elements, sorted by dtype, kind of master, and whether they are flat."""
    found: dict[tuple[torch.dtype, torch.dtype | None, bool], list[Row]] = {}
    for param, *rest in zip(*columns, strict=True):
        assert param is not None
        if param.numel():
            row = _row(param, *rest)  # type: ignore[arg-type]  # only masters may be None
            kind = None if row.master is None else row.master.dtype
            found.setdefault((row.exp_avg.dtype, kind, row.is_flat), []).append(row)
    return list(found.values())


def _row(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
) -> Row:
    """Return a flat row over the same memory (the gradient may be copied), or one as it is where memory has gaps."""
    is_dense = param.is_contiguous() and exp_avg.is_contiguous() and exp_avg_sq.is_contiguous()
    if not is_dense or not (master is None or master.is_contiguous()):
        return Row(param, grad, exp_avg, exp_avg_sq, master, False)
    if param.dim() == 1:
        return Row(param, grad.contiguous(), exp_avg, exp_avg_sq, master, True)
    flat = None if master is None else master.view(-1)
    return Row(param.view(-1), grad.reshape(-1), exp_avg.view(-1), exp_avg_sq.view(-1), flat, True)


def batches(rows: Sequence[Row], limit: int) -> Iterator[list[Row]]:
    """Yield rows of up to ``limit`` elements together, long flat rows in slices."""
    batch: list[Row] = []
    elements = 0
    for row in (piece for whole in rows for piece in whole.cut(limit)):
        length = aligned(row.param.numel())
        if batch and elements + length > limit:
            yield batch
            batch, elements = [], 0
        batch.append(row)
        elements += length
    yield batch


def aligned(length: int) -> int:
    """Return ``length`` rounded up to a multiple of the alignment."""
    return -(-length // ALIGNMENT) * ALIGNMENT
