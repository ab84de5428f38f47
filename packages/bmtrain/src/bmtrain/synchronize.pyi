# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core import gather_result as gather_result
from bmt_core import sum_loss as sum_loss
from bmt_core import synchronize as synchronize
from bmtrain._streams import wait_loader as wait_loader
