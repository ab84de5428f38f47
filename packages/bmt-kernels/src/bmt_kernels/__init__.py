"""Compiled kernels for bmt: Adam, gradient checks and norms, and cross entropy, for the CPU and for CUDA.

Installed is active: ``init_distributed()`` finds the kernels of the run's device, and ``bmt doctor`` says which are
in use. The functions here are those that the table of operations has no place for.

[Note: how the kernels are built and called] A provider (:mod:`bmt_kernels.provider`) checks what it is given in
Python and sorts tensors into launches; the compiled half (``csrc/``) gets addresses, so it is built without torch and
fits every version of it. What has no kernel goes to the reference in plain torch, tensor by tensor.

- One source per operation serves all processors: a CPU kernel is written once, over ``Lanes``, and compiled once per
  instruction set (``csrc/cpu/lanes_*.h``); the module chooses when it is loaded. The last elements of a range go
  through ``Lane``, which does the same to one number, so that where a tensor begins and how it is cut changes no bit.
- Adam's bits are those of ``torch.optim.Adam``, down to the square root: torch's comes from MKL, which on some
  processors is not the nearest number. The first step tries out whether the result equals torch's in every bit; where
  not, the reference does float32.
- On CUDA a table of tensors travels with the kernel's parameters (up to 32 KB since CUDA 12.1): no copy, no
  allocation, safe in CUDA graphs. Thread blocks find their piece by binary search, so tensors of any dtypes and sizes
  share a launch.
- Nothing is decided on the host: scale, clip coefficient and overflow flag are addresses. A sum over many tensors is
  formed in a fixed order, without atomics, so that ranks and runs agree in every bit.
- Threads are OpenMP's, in the copy that torch brings: a pool of our own would compete with torch's, which stays awake
  for a while.
"""

from bmt_kernels.casts import cast
from bmt_kernels.logits import cross_entropy_backward_, row_max, softmax_, sum_exp
from bmt_kernels.provider import CpuKernels, CudaKernels

__all__ = ["CpuKernels", "CudaKernels", "cast", "cross_entropy_backward_", "row_max", "softmax_", "sum_exp"]
