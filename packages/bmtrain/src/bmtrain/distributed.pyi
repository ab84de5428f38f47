# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.run.collectives import all_gather as all_gather
from bmt_core.run.collectives import all_reduce as all_reduce
from bmt_core.run.collectives import broadcast as broadcast
from bmt_core.run.collectives import recv_activations as recv_activations
from bmt_core.run.collectives import reduce_scatter as reduce_scatter
from bmt_core.run.collectives import send_activations as send_activations
