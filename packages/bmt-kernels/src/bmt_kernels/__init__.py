"""Compiled kernels for bmt: Adam, gradient checks and norms, and cross entropy, for the CPU and for CUDA.

Installed is active: ``init_distributed()`` finds the kernels of the run's device, and ``bmt doctor`` says which are in use. The
functions here are the pieces that the table of operations has no place for.
"""

from bmt_kernels.provider import CpuKernels, CudaKernels
from bmt_kernels.vocabulary import row_max, softmax_, sum_exp

__all__ = ["CpuKernels", "CudaKernels", "row_max", "softmax_", "sum_exp"]
