"""bmt: train models of billions of parameters with code as simple as for one GPU.

    import bmtrain as bmt

This package has the import paths of BMTrain 1.0. Most names come from other packages, which are
imported when a name is first used. A few modules exist only for scripts written for BMTrain.
``import bmtrain`` starts nothing and does not import torch.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from bmtrain import _lazy

__version__ = version("bmt-train")

_lazy.make_lazy(sys.modules[__name__])
if _lazy.InternalsFinder not in sys.meta_path:
    sys.meta_path.append(_lazy.InternalsFinder)
