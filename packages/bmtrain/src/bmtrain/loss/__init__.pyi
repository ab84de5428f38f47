# Written by tools/facade_stubs.py from bmtrain/_table.py.

from bmt_params.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from bmtrain._cross_entropy import FusedCrossEntropy as FusedCrossEntropy

from . import _function as _function
