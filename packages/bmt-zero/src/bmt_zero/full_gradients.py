"""``FullGradients``: where the full gradients of a flat shard come together in one backward pass of one use.

They lie in one flat tensor, laid out like the full parameters, which is what is reduced. Gradients that linear layers
write there themselves (:mod:`bmt_zero.linear`) need no copy; the others come in one multi-tensor copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.run.lanes import Mark
from bmt_zero.flat import FlatShard


class InFlight:
    """Full gradients that the lane still reads: those of one block beside the one whose backward fills its own.

    With none the backward of a block would wait for the reduction of the block before it.

    They are memory of the computation, so they are kept until the computation has waited for the lane: see
    [Note: buffer lifetime] in :mod:`bmt_core.run.lanes`.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, torch.Tensor, Mark]] = []

    def keep(self, block: int, full: torch.Tensor, mark: Mark) -> None:
        """Keep ``full``, gradients of the block with that number, until ``mark``."""
        self._kept.append((block, full, mark))

    def make_room(self) -> None:
        """Wait for the reductions of all blocks but the last one, and free what they read: before new memory is asked for."""
        if self._kept:
            self._free_all_but(self._kept[-1][0])

    def let_go(self) -> None:
        """Wait until nothing is read any more, and free it: the pass is over."""
        self._free_all_but(None)

    def _free_all_but(self, last: int | None) -> None:
        kept, self._kept = self._kept, [entry for entry in self._kept if entry[0] == last]
        for block, _, mark in kept:
            if block != last:
                mark.wait()


class FullGradients:
    """The full gradients of ``flat`` in one backward pass of one use."""

    def __init__(self, flat: FlatShard, in_flight: InFlight) -> None:
        in_flight.make_room()
        self.flat = flat
        self._buffer = torch.empty(flat.layout.total, dtype=flat.buffer_dtype, device=flat.device)
        self._views = flat.views_of(self._buffer)
        self._is_written = [False] * len(self._views)

    def place(self, index: int) -> tuple[torch.Tensor, bool] | None:
        """Return where the gradient of parameter ``index`` belongs and whether one is there, to which to add.

        The caller writes it at once. None when it cannot be written in place: the buffer has another dtype.
        """
        if self._buffer.dtype != self.flat.dtype:
            return None
        was_written, self._is_written[index] = self._is_written[index], True
        return self._views[index], was_written

    def complete(self, grads: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> torch.Tensor:
        """Add ``grads`` to what was written in place and return the flat tensor, zero where not ``wanted``."""
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        empty = self.flat.gaps_of(self._buffer)
        for view, grad, want, written in zip(self._views, grads, wanted, self._is_written, strict=True):
            if not want or (grad is None and not written):
                empty.append(view)
            elif grad is not None:
                (added if written else copied).append((view, grad))
        if copied:
            torch._foreach_copy_(
                [view for view, _ in copied], [grad.to_dense() if grad.is_sparse else grad for _, grad in copied]
            )
        if added:
            torch._foreach_add_(
                [view for view, _ in added], [grad.to_dense() if grad.is_sparse else grad for _, grad in added]
            )
        if empty:
            torch._foreach_zero_(empty)
        return self._buffer
