"""Gradient accumulation: which micro-batch is the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bmt_zero.schedule.block_engine import BlockEngine


@contextmanager
def no_sync(model: nn.Module) -> Iterator[int]:
    """Run the micro-batches before the last inside: blocks of levels 0 and 1 keep their gradients locally, in float32.

    They are reduced, once, by the first backward whose forward ran outside. What is kept are the whole gradients of
    these blocks, 4 bytes a parameter; ``with no_sync(model) as held:`` tells how many bytes that is, on this rank.
    Blocks of levels 2 and 3, and parameters outside of blocks, keep their promise of memory and are reduced at every
    micro-batch. The sums are the same either way. ``zero_grad`` drops what is kept.
    """
    engines = [module.__dict__["_bmt_block"] for module in model.modules() if "_bmt_block" in module.__dict__]
    held_back: list[BlockEngine] = [engine for engine in engines if engine.block.level < 2]
    before = [engine.use for engine in held_back]
    for engine in held_back:
        engine.use = dataclasses.replace(engine.use, last_backward=False)
    try:
        yield sum(group.reducer.held_back_bytes for engine in held_back for group in engine.block.groups)
    finally:
        for engine, use in zip(held_back, before, strict=True):
            engine.use = use
