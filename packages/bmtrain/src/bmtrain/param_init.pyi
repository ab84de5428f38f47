# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_params import grouped_parameters as grouped_parameters
from bmt_params import init_parameters as init_parameters
from bmt_params import iterate_parameters as iterate_parameters
