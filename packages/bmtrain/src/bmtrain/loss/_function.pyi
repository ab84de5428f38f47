# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.loss._function import has_inf_nan as has_inf_nan
