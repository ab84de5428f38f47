# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core import grouped_parameters as grouped_parameters
from bmt_core import init_parameters as init_parameters
from bmt_core import iterate_parameters as iterate_parameters
