# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_core.loss import FusedCrossEntropy as FusedCrossEntropy

from . import _function as _function
