"""Compiled kernels for bmt: Adam, gradient checks and norms, and cross entropy, for the CPU and for CUDA.

Installed is active: ``init_distributed()`` finds the kernels of the run's device, and ``bmt doctor`` says which are in use. The
functions here are those that the table of operations has no place for.
"""

from bmt_kernels.casts import cast
from bmt_kernels.logits import cross_entropy_backward_, row_max, softmax_, sum_exp
from bmt_kernels.provider import CpuKernels, CudaKernels

__all__ = ["CpuKernels", "CudaKernels", "cast", "cross_entropy_backward_", "row_max", "softmax_", "sum_exp"]
