"""Gradient accumulation: which micro-batch is the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bmt_zero.block import Block


@contextmanager
def no_sync(model: nn.Module) -> Iterator[int]:
    """Run the micro-batches before the last inside: blocks of levels 0 and 1 keep their gradients locally, in float32.

    They are reduced, once, by the first backward whose forward ran outside. What is kept are the whole gradients of
    these blocks, 4 bytes a parameter; ``with no_sync(model) as held:`` tells how many bytes that is, on this rank.
    Blocks of levels 2 and 3, and parameters outside of blocks, keep their promise of memory and are reduced at every
    micro-batch. The sums are the same either way. ``zero_grad`` drops what is kept.
    """
    states = [module._bmt_block for module in model.modules() if isinstance(module, Block) and module._zero_level < 2]
    before = [state.schedule for state in states]
    for state in states:
        state.set_use(dataclasses.replace(state.schedule, last_backward=False))
    try:
        yield sum(flat.held_back_bytes for state in states for flat in state.flats)
    finally:
        for state, schedule in zip(states, before, strict=True):
            state.set_use(schedule)
