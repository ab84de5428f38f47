"""bmt: train models of billions of parameters with code as simple as for one GPU.

    import bmtrain as bmt

This package is a table of names, which bring in the package that provides them when they are first used, and the few modules
that only scripts written for BMTrain 1.0 need; it answers to the import paths of BMTrain 1.0. Importing it starts nothing
and imports no torch.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from bmtrain import _lazy

__version__ = version("bmt-train")

_lazy.make_lazy(sys.modules[__name__])
