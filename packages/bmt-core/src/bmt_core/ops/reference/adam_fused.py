"""The update with the fused kernels of ``torch.optim.Adam(fused=True)``, which move every byte once.

They want everything in one dtype. What is not (half gradients, a master in two parts), and gradients that they would scale in
place, goes through scratch memory of bounded size, in pieces small enough to stay in the device's cache in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.ops import remainder
from bmt_core.ops.reference.adam_rows import Row, Settings, aligned, batches

# Two scratch tensors of so many float32 elements are 64 MiB.
MAX_ELEMENTS = 1 << 23


def update_fused(rows: Sequence[Row], settings: Settings) -> None:
    """Update flat ``rows`` of one dtype, all with the same kind of master; parameters move (``hold`` is not for this)."""
    call = _Call(settings, rows[0].param.device)
    wide = rows[0].exp_avg.dtype
    is_compact = rows[0].master is not None and rows[0].master.dtype == remainder.DTYPE
    has_other_gradients = call.divisor is not None or any(row.grad.dtype != wide for row in rows)
    if not is_compact and not has_other_gradients:
        call.update(rows, [_weight(row) for row in rows], [row.grad for row in rows])
        _round(rows)
        return
    pieces = list(batches(rows, MAX_ELEMENTS))
    length = max(sum(aligned(row.param.numel()) for row in piece) for piece in pieces)
    scratch = [torch.empty(length, dtype=wide, device=call.device) for _ in range(1 + is_compact)]
    for piece in pieces:
        grads = _views(scratch[0], piece)
        weights = _views(scratch[1], piece) if is_compact else [_weight(row) for row in piece]
        _update_piece(call, piece, weights, grads, is_compact)


def _update_piece(
    call: _Call, rows: Sequence[Row], weights: list[torch.Tensor], grads: list[torch.Tensor], is_compact: bool
) -> None:
    if is_compact:
        for row, weight in zip(rows, weights, strict=True):
            remainder.read_master(row.param, _master(row), out=weight)
    torch._foreach_copy_(grads, [row.grad for row in rows])
    call.update(rows, weights, grads)
    if not is_compact:
        _round(rows)
        return
    for row, weight, grad in zip(rows, weights, grads, strict=True):
        remainder.write_master(weight, row.param, _master(row), spare=grad.view(torch.int32))


class _Call:
    """What the calls of the fused kernel have in common; they read the step, the divisor and the flag on the device."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.device = device
        self.divisor = _divisor(settings, device)
        self._settings = settings
        self._step = torch.full((), float(settings.step), dtype=torch.float32, device=device)
        self._found_inf: torch.Tensor | None = None
        if settings.skip is not None:
            # The kernels compare with 1, in float32.
            flag = torch.empty((), dtype=torch.float32, device=device)
            self._found_inf = torch.ne(settings.skip.reshape(()), 0, out=flag)

    def update(self, rows: Sequence[Row], weights: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Update moments and ``weights``; gradients are divided in place if there is a divisor."""
        s = self._settings
        fused = torch._fused_adamw_ if s.decoupled else torch._fused_adam_
        fused(
            weights,
            grads,
            [row.exp_avg for row in rows],
            [row.exp_avg_sq for row in rows],
            [],
            [self._step] * len(rows),
            lr=s.lr,
            beta1=s.beta1,
            beta2=s.beta2,
            weight_decay=s.weight_decay,
            eps=s.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=self.divisor,
            found_inf=self._found_inf,
        )


def _divisor(s: Settings, device: torch.device) -> torch.Tensor | None:
    if s.clip is None and not isinstance(s.scale, torch.Tensor) and s.scale == 1:
        return None
    if isinstance(s.scale, torch.Tensor):
        scale = s.scale.reshape(())
    else:
        scale = torch.full((), s.scale, dtype=torch.float32, device=device)
    return scale if s.clip is None else scale / s.clip.reshape(())


def _views(scratch: torch.Tensor, rows: Sequence[Row]) -> list[torch.Tensor]:
    lengths = [row.param.numel() for row in rows]
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + aligned(length))
    return [scratch[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _weight(row: Row) -> torch.Tensor:
    return row.param if row.master is None else row.master


def _master(row: Row) -> torch.Tensor:
    assert row.master is not None
    return row.master


def _round(rows: Sequence[Row]) -> None:
    if rows[0].master is not None:
        torch._foreach_copy_([row.param for row in rows], [_weight(row) for row in rows])
