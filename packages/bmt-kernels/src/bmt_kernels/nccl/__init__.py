"""The communication backend ``nccl-native``: NCCL without torch's process groups in between.

``init_distributed(comm_backend="nccl-native")`` or ``BMT_COMM_BACKEND=nccl-native`` chooses it. Operations run on the caller's
current stream; tensors on the CPU go through gloo.
"""

from bmt_kernels.nccl.backend import NcclBackend
from bmt_kernels.nccl.errors import NcclError
from bmt_kernels.nccl.group import NcclGroup

__all__ = ["NcclBackend", "NcclError", "NcclGroup"]
