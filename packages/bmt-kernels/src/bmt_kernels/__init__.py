"""Compiled kernels for bmt: Adam, gradient checks and norms, and cross entropy, for the CPU and
for CUDA.

Installed kernels are active: ``init_distributed()`` finds those of the run's device, and
``bmt doctor`` says which are in use. This module exports the functions that are not operations
of ``bmt_core.ops``.

[Note: how the kernels are built and called] A provider (:mod:`bmt_kernels.provider`) checks
arguments in Python and sorts tensors into launches; the compiled half (``csrc/``) gets addresses,
so it is built without torch and fits every version of torch. Tensors without a kernel go to the
reference in plain torch.

- One source per operation serves all processors: a CPU kernel is written once, over ``Lanes``, and
  compiled once per instruction set (``csrc/cpu/lanes_*.h``); the module chooses when it is loaded.
  The last elements of a range go through ``Lane``, which does the same to one number, so that
  results do not depend in any bit on where a tensor begins or is cut.
- Adam's bits are those of ``torch.optim.Adam``, down to the square root: torch's comes from MKL,
  which on some processors is not the nearest number. The first step tests whether the result equals
  torch's in every bit; if not, float32 parameters are left to the reference.
- On CUDA a table of tensors travels with the kernel's parameters (up to 32 KB since CUDA 12.1): no
  copy, no allocation, safe in CUDA graphs. Thread blocks find their piece by binary search, so
  tensors of any dtypes and sizes share a launch.
- Nothing is decided on the host: scale, clip coefficient and overflow flag are addresses. A sum
  over many tensors is formed in a fixed order, without atomics, so that ranks and runs agree in
  every bit.
- Threads are those of torch's copy of OpenMP: a second pool would compete with torch's, whose
  threads spin for a while after use.
"""

from bmt_kernels.casts import cast
from bmt_kernels.logits import cross_entropy_backward_, row_max, softmax_, sum_exp
from bmt_kernels.provider import CpuKernels, CudaKernels

__all__ = [
    "CpuKernels",
    "CudaKernels",
    "cast",
    "cross_entropy_backward_",
    "row_max",
    "softmax_",
    "sum_exp",
]
