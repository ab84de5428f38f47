# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.nccl import allGather as allGather
from bmt_core.nccl import allReduce as allReduce
from bmt_core.nccl import broadcast as broadcast
from bmt_core.nccl import commCount as commCount
from bmt_core.nccl import commRank as commRank
from bmt_core.nccl import groupEnd as groupEnd
from bmt_core.nccl import groupStart as groupStart
from bmt_core.nccl import recv as recv
from bmt_core.nccl import reduce as reduce
from bmt_core.nccl import reduceScatter as reduceScatter
from bmt_core.nccl import send as send
