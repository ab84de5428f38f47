# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core import Topology as topology
from bmt_core import init_distributed as init_distributed
from bmt_core import is_initialized as is_initialized
