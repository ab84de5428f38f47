# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core import config as config
from bmt_core import rank as rank
from bmt_core import world_size as world_size
