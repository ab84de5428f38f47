"""``no_sync``: gradient accumulation without communication until the last micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from bmt_zero.schedule.block_engine import BlockEngine


@contextmanager
def no_sync(model: nn.Module) -> Iterator[int]:
    """Run all micro-batches but the last inside: blocks of levels 0 and 1 then sum their gradients locally, in float32.

    The first backward whose forward ran outside reduces the sums, once. They are the whole gradients of these blocks, 4 bytes
    a parameter; ``with no_sync(model) as held:`` gives their size in bytes on this rank. To save memory, gradients of blocks of
    levels 2 and 3 and of parameters outside of blocks are still reduced at every micro-batch. The resulting gradients are the same.
    Until then ``.grad`` is zero for blocks of levels 0 and 1. ``zero_grad`` drops the local sums, and so does any other change of
    ``.grad``, so change gradients after the last micro-batch. If a block has several optimizers, ``zero_grad`` of one drops only
    the sums of its own parameters, unless ``set_to_none`` is False. A gradient hook makes its rank reduce at every micro-batch:
    register hooks on all ranks.
    """
    engines = [module.__dict__["_bmt_block"] for module in model.modules() if "_bmt_block" in module.__dict__]
    held_back: list[BlockEngine] = [engine for engine in engines if engine.block.level < 2]
    before = [engine.use for engine in held_back]
    for engine in held_back:
        engine.use = dataclasses.replace(engine.use, last_backward=False)
    try:
        yield sum(group.ledger.held_back_bytes for engine in held_back for group in engine.block.groups)
    finally:
        for engine, use in zip(held_back, before, strict=True):
            engine.use = use
