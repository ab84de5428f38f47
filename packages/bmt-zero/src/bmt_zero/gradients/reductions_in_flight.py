"""``ReductionsInFlight``: keeps whole gradients alive while reductions read them."""

from __future__ import annotations

import torch

from bmt_core.run.lanes import Mark


class ReductionsInFlight:
    """Whole gradients that the lane still reads, of at most one block besides the one whose backward runs.

    If none were allowed, the backward of a block would wait for the reduction of the previous block. The memory was allocated on
    the computation's stream, so it is kept until the computation has waited for the lane: see [Note: buffer lifetime] in
    :mod:`bmt_core.run.lanes`.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[str, torch.Tensor, Mark]] = []

    def keep(self, block: str, full: torch.Tensor, done: Mark) -> None:
        """Keep ``full``, which a reduction for ``block`` reads, until ``done``."""
        self._kept.append((block, full, done))

    def make_room(self) -> None:
        """Wait for the reductions of all blocks but the latest, and free their gradients. Called before new ones are allocated."""
        if self._kept:
            self._free_all_but(self._kept[-1][0])

    def wait(self) -> None:
        """Wait for all reductions and free their gradients. Called at the end of the backward pass."""
        self._free_all_but(None)

    def _free_all_but(self, last: str | None) -> None:
        kept, self._kept = self._kept, [entry for entry in self._kept if entry[0] == last]
        for block, _, done in kept:
            if block != last:
                done.wait()
