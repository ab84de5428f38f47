# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_optim import AdamOffloadOptimizer as AdamOffloadOptimizer
from bmt_optim import AdamOptimizer as AdamOptimizer
from bmt_optim import AdamW as AdamW
from bmt_optim import OptimManager as OptimManager
from bmt_optim import available as available
from bmt_optim import create as create
from bmt_optim import param_groups as param_groups
from bmt_optim import whole as whole

from . import optim_manager as optim_manager
