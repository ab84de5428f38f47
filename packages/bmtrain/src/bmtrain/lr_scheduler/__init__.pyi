# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_optim.lr_scheduler import WSD as WSD
from bmt_optim.lr_scheduler import Cosine as Cosine
from bmt_optim.lr_scheduler import Exponential as Exponential
from bmt_optim.lr_scheduler import Linear as Linear
from bmt_optim.lr_scheduler import Noam as Noam
from bmt_optim.lr_scheduler import NoDecay as NoDecay
from bmt_optim.lr_scheduler import WarmupLRScheduler as WarmupLRScheduler

from . import warmup as warmup
