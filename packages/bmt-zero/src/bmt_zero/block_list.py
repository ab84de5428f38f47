"""``TransformerBlockList``: blocks that run one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import nn

from bmt_core.modules.layer_list import LayerList
from bmt_core.params.uninitialized import check_values_at_first_call
from bmt_zero.block import Block


class TransformerBlockList(LayerList):
    """A list of blocks; call it, or loop over it.

    ``modules`` may be any iterable; raw modules become :class:`Block`. The same raw module twice is one Block
    that runs twice. The same Block twice is an ``AssertionError``. ``num_hidden`` is how many leading arguments flow
    through: the first ``num_hidden`` outputs of a block replace the first ``num_hidden`` inputs of the next. Every block gets the
    other arguments unchanged.
    """

    def __init__(self, modules: Iterable[nn.Module], num_hidden: int = 1) -> None:
        super().__init__(num_hidden)
        members = list(modules)
        blocks = [member for member in members if isinstance(member, Block)]
        assert len(blocks) == len({id(block) for block in blocks}), (
            "A Block stands twice in this list. Pass the raw module twice to share its parameters."
        )
        for index, member in enumerate(members):
            self.add_module(str(index), member if isinstance(member, Block) else Block(member))
        sharded = [block._bmt_block.block for block in self.layers() if isinstance(block, Block)]
        for block, following in itertools.pairwise(sharded):
            block.following = following.number
        check_values_at_first_call(self)
