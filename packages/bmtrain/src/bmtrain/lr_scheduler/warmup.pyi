# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_optim.lr_scheduler import WarmupLRScheduler as WarmupLRScheduler
