"""Communication: what a backend must provide, the default one, differentiable collectives and
Python objects.
"""

from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import CommBackend, CommContext, Finished, Group, ReduceOp, Work
from bmt_core.comm.torch_backend import SingleGroup, TorchBackend, TorchGroup

__all__ = [
    "CommBackend",
    "CommContext",
    "Finished",
    "Group",
    "LazyGroup",
    "ReduceOp",
    "SingleGroup",
    "TorchBackend",
    "TorchGroup",
    "Work",
    "all_gather_object",
    "broadcast_object",
    "collective_section",
]
