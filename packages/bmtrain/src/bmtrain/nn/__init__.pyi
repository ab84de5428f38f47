# Written by tools/facade_stubs.py from bmtrain/_table.py.

from . import parallel_linear_func as parallel_linear_func
