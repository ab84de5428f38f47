"""ZeRO blocks: parameters, gradients and optimizer state sharded over ranks, at a level chosen for
each block.
"""

from bmt_zero.block import Block, CheckpointBlock
from bmt_zero.block_list import TransformerBlockList, no_sync
from bmt_zero.flat_layout import FlatLayout, flat_layout
from bmt_zero.parameter_group import GatheredMemory, gathered_memory
from bmt_zero.wrapper import BMTrainModelWrapper

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "CheckpointBlock",
    "FlatLayout",
    "GatheredMemory",
    "TransformerBlockList",
    "flat_layout",
    "gathered_memory",
    "no_sync",
]
