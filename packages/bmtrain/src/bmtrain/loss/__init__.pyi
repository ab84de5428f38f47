# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmtrain._cross_entropy import FusedCrossEntropy as FusedCrossEntropy

from . import _function as _function
