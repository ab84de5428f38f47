# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.nn import Linear as Linear
from bmt_core.nn import OpLinear as OpLinear
from bmt_tp import ColumnParallelLinear as ColumnParallelLinear
from bmt_tp import OpParallelLinear as OpParallelLinear
from bmt_tp import ReduceType as ReduceType
from bmt_tp import RowParallelLinear as RowParallelLinear
from bmt_tp import VPEmbedding as VPEmbedding

from . import parallel_linear_func as parallel_linear_func
