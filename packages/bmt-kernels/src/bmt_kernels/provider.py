"""The kernel providers that this package offers, one per device."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch

from bmt_core.ops import PeerLink
from bmt_kernels import adam, binaries, bits, cross_entropy, gradients
from bmt_kernels.launcher import Launcher, Where


class CompiledKernels(Launcher):
    """Checks the operations' arguments and passes addresses to a compiled module.

    Cases without a kernel (float64 parameters, logits with gaps between classes, gradients in
    another layout than their parameter, ...) are left to the reference. Arguments that the
    reference does not take raise.
    """

    has_compact_adam = True
    priority = -100

    adam_step = adam.adam_step
    cross_entropy_backward = cross_entropy.cross_entropy_backward
    cross_entropy_forward = cross_entropy.cross_entropy_forward
    has_non_finite = gradients.has_non_finite
    powers_sum = gradients.powers_sum
    scale_ = gradients.scale_
    zero_if_ = gradients.zero_if_


class CpuKernels(CompiledKernels):
    """Kernels for the CPU, on as many threads as torch uses: AVX-512, AVX2 or plain C++, whichever
    the processor has.
    """

    name = "cpu"
    device_type = "cpu"
    module = "_cpu"

    def available(self) -> str | None:
        return binaries.problem(self.module)

    def where(self, device: torch.device) -> Where:
        """The number of threads."""
        return (torch.get_num_threads(),)

    def equals_torch(self) -> bool:
        """Whether Adam on float32 parameters equals torch's in every bit: see
        :mod:`bmt_kernels.bits`.
        """
        return self._equals_torch

    @cached_property
    def _equals_torch(self) -> bool:
        module = binaries.load(self.module)
        return module is not None and bits.choose_square_root(module)


class CudaKernels(CompiledKernels):
    """Kernels for NVIDIA GPUs, on the current stream of the tensors' device."""

    name = "cuda"
    device_type = "cuda"
    module = "_cuda"

    def available(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no usable GPU"
        module = binaries.load(self.module)
        if module is None:
            return binaries.problem(self.module)
        return _architecture_problem(module.ARCHITECTURES, torch.cuda.get_device_capability())

    def where(self, device: torch.device) -> Where:
        """The index of the device, and its current stream."""
        stream = torch.cuda.current_stream(device)
        return (stream.device_index, stream.cuda_stream)

    def peer_link(self) -> PeerLink:
        """The current device's copy engine."""
        link: PeerLink = cast(Any, self.binary).PeerLink()
        return link


_SHARED = {"cpu": CpuKernels(), "cuda": CudaKernels()}


def kernels_on(device: torch.device) -> CompiledKernels | None:
    """Return the kernels for ``device``, whatever the run has chosen; None if none can be used."""
    kernels = _SHARED.get(device.type)
    return kernels if kernels is not None and kernels.available() is None else None


def _architecture_problem(built_for: list[int], capability: tuple[int, int]) -> str | None:
    """Return why a GPU of ``capability`` cannot run code for ``built_for`` (900 is sm_90), None if
    it can.

    Machine code runs on later GPUs of its generation; of the newest architecture there is also code
    that later generations translate.

    >>> _architecture_problem([800, 900], (8, 6)), _architecture_problem([800, 900], (10, 0))
    (None, None)
    >>> _architecture_problem([900], (8, 0))
    'bmt-kernels was built for sm_90, and this GPU is sm_80'
    """
    own = capability[0] * 100 + capability[1] * 10
    if max(built_for) <= own or any(
        built <= own and built // 100 == own // 100 for built in built_for
    ):
        return None
    names = ", ".join(f"sm_{built // 10}" for built in built_for)
    return f"bmt-kernels was built for {names}, and this GPU is sm_{own // 10}"
