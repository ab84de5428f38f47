# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_zero import Block as Block
from bmt_zero import CheckpointBlock as CheckpointBlock
from bmt_zero import TransformerBlockList as TransformerBlockList
from bmtrain.utils import round_up as round_up
