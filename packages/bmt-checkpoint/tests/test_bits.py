"""Every bit of every type goes through the ranks and a file: NaN payloads, signs of zeros, and
numbers below the smallest normal one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bmt_checkpoint
from bmt_checkpoint.safetensors_layout import TORCH_DTYPES
from bmt_params import DistributedModule, DistributedParameter
from bmt_testing import run_ranks

DTYPES = (*TORCH_DTYPES.values(), torch.complex128)


def random_bits(dtype: torch.dtype) -> torch.Tensor:
    """Seven numbers, which no number of ranks divides."""
    generator = torch.Generator().manual_seed(0)
    bytes = torch.randint(256, (7 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bytes.bool() if dtype == torch.bool else bytes.view(dtype)


def model_of(values: dict[torch.dtype, torch.Tensor]) -> DistributedModule:
    """A model with a buffer and a parameter of each type."""
    model = DistributedModule()
    for dtype, value in values.items():
        trains = dtype.is_floating_point or dtype.is_complex
        name = str(dtype).removeprefix("torch.")
        model.register_buffer(f"buffer_{name}", value)
        parameter = DistributedParameter(value.clone(), requires_grad=trains)
        model.register_parameter(f"parameter_{name}", parameter)
    return model


def save(path: str, dtypes: tuple[torch.dtype, ...], format: str | None) -> None:
    model = model_of({dtype: random_bits(dtype) for dtype in dtypes})
    bmt_checkpoint.save(model, path, format=format)


def load(path: str, dtypes: tuple[torch.dtype, ...]) -> list[bytes]:
    model = model_of({dtype: torch.zeros_like(random_bits(dtype)) for dtype in dtypes})
    bmt_checkpoint.load(model, path)
    parameters: list[Any] = list(model.parameters())
    return [bits_of(value) for value in (*model.buffers(), *(p.gather() for p in parameters))]


def bits_of(value: torch.Tensor) -> bytes:
    return bytes(value.detach().view(torch.uint8).tolist())


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model", "model.dcp"])
def test_every_bit_of_every_type_comes_back_at_another_number_of_ranks(
    name: str, tmp_path: Path
) -> None:
    path, format = str(tmp_path / name), "dcp" if name == "model.dcp" else None
    dtypes = DTYPES if name in ("model.pt", "model.dcp") else DTYPES[:-1]
    run_ranks(save, 2, path, dtypes, format)
    expected = [bits_of(random_bits(dtype)) for dtype in dtypes]
    assert run_ranks(load, 3, path, dtypes) == [[*expected, *expected]] * 3
