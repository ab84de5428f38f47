# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmtrain._loss_functions import has_inf_nan as has_inf_nan
