"""The operations that may have compiled kernels, their references in plain torch, and the choice
of kernels.
"""

from bmt_core.ops.host_flag import HostFlag
from bmt_core.ops.kernel_choice import by_priority, choose_host_kernels, choose_kernels
from bmt_core.ops.kernels import REFERENCE, Kernels
from bmt_core.ops.peer_link import PeerLink
from bmt_core.ops.provider import OPERATIONS, KernelProvider
from bmt_core.ops.remainder import read_master, split_master, write_master

__all__ = [
    "OPERATIONS",
    "REFERENCE",
    "HostFlag",
    "KernelProvider",
    "Kernels",
    "PeerLink",
    "by_priority",
    "choose_host_kernels",
    "choose_kernels",
    "read_master",
    "split_master",
    "write_master",
]
