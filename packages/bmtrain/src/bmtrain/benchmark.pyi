# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmtrain._benchmark import all_gather as all_gather
from bmtrain._benchmark import reduce_scatter as reduce_scatter
from bmtrain._benchmark import send_recv as send_recv
