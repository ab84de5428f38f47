"""``TransformerBlockList``: blocks that run one after the other, and ``no_sync`` for the blocks of
a model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.keyword_arguments import explain_keywords
from bmt_params.modules.layer_list import LayerList
from bmt_params.uninitialized import check_values_at_first_call
from bmt_zero.block import Block
from bmt_zero.block_engine import BlockEngine, keep_in_blocks
from bmt_zero.keep import Keep, choice_of

_OF_BLOCKS = "Give it to each Block: TransformerBlockList([Block(layer, ...) for layer in layers])."


class TransformerBlockList(LayerList):
    """A list of blocks; call it, or loop over it.

    - ``modules``: any iterable; raw modules become :class:`Block`. The same raw module twice is one
      Block that runs twice. The same Block twice is an ``AssertionError``.
    - ``num_hidden``: how many leading arguments flow through: the first ``num_hidden`` outputs of a
      block replace the first ``num_hidden`` inputs of the next. Every block gets the other
      arguments unchanged.
    - ``param_dtype``: that of the blocks that the list makes: see :class:`Block`.
    - ``keep``: see :class:`Block`; a number of bytes is for all blocks together. Blocks that were
      made before keep what they were given.
    """

    @explain_keywords(use_checkpoint=_OF_BLOCKS, zero_level=_OF_BLOCKS, tile=_OF_BLOCKS)
    def __init__(
        self,
        modules: Iterable[nn.Module],
        num_hidden: int = 1,
        *,
        param_dtype: torch.dtype | None = None,
        keep: Keep | None = None,
    ) -> None:
        choice = choice_of(keep)
        super().__init__(num_hidden)
        members = list(modules)
        blocks = [member for member in members if isinstance(member, Block)]
        assert len(blocks) == len({id(block) for block in blocks}), (
            "A Block stands twice in this list. Pass the raw module twice to share its parameters."
        )
        for found in {block._bmt_block.state.param_dtype for block in blocks}:
            if param_dtype not in (None, found):
                raise ConfigError(
                    f"A Block has param_dtype={found}, and this list has param_dtype={param_dtype}."
                    " Give the Block the same, or pass its module."
                )
        for index, member in enumerate(members):
            is_block = isinstance(member, Block)
            layer = member if is_block else Block(member, param_dtype=param_dtype)
            self.add_module(str(index), layer)
        engines = [block._bmt_block for block in self.layers() if isinstance(block, Block)]
        keep_in_blocks(engines, choice)
        sharded = [engine.state for engine in engines]
        for block, following in itertools.pairwise(sharded):
            block.following = following.number
        check_values_at_first_call(self)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[int]:
    """Run all micro-batches but the last inside: blocks of levels 0 and 1 then sum their gradients
    locally, in float32.

    The first backward whose forward ran outside reduces the sums, once. They are the whole
    gradients of these blocks, 4 bytes a parameter; ``with no_sync(model) as held:`` gives their
    size in bytes on this rank. To save memory, gradients of blocks of levels 2 and 3 and of
    parameters outside of blocks are still reduced at every micro-batch; with
    ``optimizer_shards="all"`` and with gathers in float8 such a block then gathers from copies that
    are made once a step. The resulting gradients are the same. Until then ``.grad`` is zero for
    blocks of levels 0 and 1. ``zero_grad`` drops the local sums, and so does any other change of
    ``.grad``, so change gradients after the last micro-batch. If a block has several optimizers,
    ``zero_grad`` of one drops only the sums of its own parameters, unless ``set_to_none`` is False.
    A gradient hook makes its rank reduce at every micro-batch: register hooks on all ranks.
    """
    engines = [
        module.__dict__["_bmt_block"]
        for module in model.modules()
        if "_bmt_block" in module.__dict__
    ]
    held_back: list[BlockEngine] = [engine for engine in engines if engine.state.level < 2]
    before = [engine.use for engine in held_back]
    # Not those of an outer no_sync, which sets them back itself.
    groups = [group for engine in engines for group in engine.state.groups if group.expects_update]
    for engine in held_back:
        engine.use = dataclasses.replace(engine.use, last_backward=False)
    for group in groups:
        group.expects_update = False
    try:
        yield sum(
            group.ledger.held_back_bytes for engine in held_back for group in engine.state.groups
        )
    finally:
        for engine, use in zip(held_back, before, strict=True):
            engine.use = use
        for group in groups:
            group.expects_update = True
