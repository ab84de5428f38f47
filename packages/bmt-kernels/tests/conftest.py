from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from bmt_kernels.provider import CompiledKernels, CpuKernels, CudaKernels

INSTRUCTION_SETS = ("portable", "avx2", "avx512")


@pytest.fixture(params=[*INSTRUCTION_SETS, pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CompiledKernels]:
    """Each provider, that of the CPU with each instruction set. None leaves float32 Adam to
    the reference.
    """
    if request.param == "cuda":
        provider: CompiledKernels = CudaKernels()
        assert provider.available() is None
        yield provider
        return
    provider = CpuKernels()
    binary = cast(Any, provider.binary)
    if request.param not in binary.instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(provider, "equals_torch", lambda: True)
    before = binary.instruction_set()
    binary.use_instruction_set(request.param)
    yield provider
    binary.use_instruction_set(before)


@pytest.fixture
def device(kernels: CompiledKernels) -> torch.device:
    """The device of ``kernels``."""
    return torch.device("cuda", 0) if kernels.device_type == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """More than one thread, whatever the environment says."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
