# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_tp import OpParallelLinear as OpParallelLinear
from bmt_tp import ReduceType as ReduceType
