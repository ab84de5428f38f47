# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_params import DistributedModule as DistributedModule
