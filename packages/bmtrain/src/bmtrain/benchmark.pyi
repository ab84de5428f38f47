# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.benchmark import all_gather as all_gather
from bmt_core.benchmark import reduce_scatter as reduce_scatter
from bmt_core.benchmark import send_recv as send_recv
