# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_tp import ColumnParallelLinear as ColumnParallelLinear
from bmt_tp import OpParallelLinear as OpParallelLinear
from bmt_tp import ReduceType as ReduceType
from bmt_tp import RowParallelLinear as RowParallelLinear
from bmt_tp import VPEmbedding as VPEmbedding
from bmtrain._linear import Linear as Linear
from bmtrain._linear import OpLinear as OpLinear

from . import parallel_linear_func as parallel_linear_func
