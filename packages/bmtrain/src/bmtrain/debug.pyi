# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.debug import append as append
from bmt_core.debug import clear as clear
from bmt_core.debug import extend as extend
from bmt_core.debug import get as get
from bmt_core.debug import set as set
