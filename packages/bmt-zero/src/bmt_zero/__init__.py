"""ZeRO blocks: parameters, gradients and optimizer state sharded over ranks, at a level chosen for each block."""

from bmt_zero.block import Block, CheckpointBlock
from bmt_zero.block_list import TransformerBlockList
from bmt_zero.schedule.no_sync import no_sync
from bmt_zero.sharding.flat_layout import FlatLayout, flat_layout
from bmt_zero.sharding.gathered_memory import GatheredMemory, gathered_memory
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
