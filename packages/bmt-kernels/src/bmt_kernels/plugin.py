"""The hooks that this package implements."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from bmt_core.comm.protocols import CommBackend
from bmt_core.ops import KernelProvider
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.runtime import Runtime
from bmt_kernels.provider import CpuKernels, CudaKernels

logger = logging.getLogger("bmt_kernels")
PROVIDERS: tuple[type[KernelProvider], ...] = (CpuKernels, CudaKernels)


@hookimpl
def bmt_kernel_providers() -> Sequence[type[KernelProvider]]:
    """The kernels for the CPU and for CUDA."""
    return PROVIDERS


@hookimpl
def bmt_comm_backends() -> Sequence[type[CommBackend]]:
    """NCCL without torch's process groups."""
    from bmt_kernels.nccl import NcclBackend

    return [NcclBackend]


@hookimpl
def bmt_run_started(runtime: Runtime) -> None:
    """Say in one line, on one rank of each host, if these kernels cannot do what they are
    installed for.
    """
    if runtime.launch.local_rank != 0 or os.environ.get("BMT_KERNELS"):
        return
    for kind in PROVIDERS:
        if kind.device_type == runtime.device.type and (reason := kind().available()) is not None:
            logger.warning(
                "bmt: rank %d: the compiled kernels of bmt-kernels for %s cannot be used, which"
                " makes training slower: %s.",
                runtime.rank,
                kind.device_type,
                reason,
            )
