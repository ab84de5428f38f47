"""Finds NCCL: the library that torch has loaded, or would load."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bmt_core.errors import ConfigError
from bmt_kernels import binaries

if TYPE_CHECKING:
    from bmt_kernels._nccl import Engine, Library

NAME = "libnccl.so.2"
VARIABLE = "BMT_NCCL_LIBRARY"
_DRIVER = "libcuda.so.1"


def make_engine(device: torch.device, timeout: float) -> tuple[Library, Engine]:
    """Open NCCL and the CUDA driver for ``device``; :class:`ConfigError` says why that cannot be
    done, and what to do.
    """
    if device.type != "cuda":
        raise _unusable(
            f"it moves tensors between GPUs, and this run's device is {device}", "Start on GPUs"
        )
    module = binaries.load("_nccl")
    if module is None:
        raise _unusable(str(binaries.problem("_nccl")), "Install bmt-kernels again")
    library = open_library()
    try:
        return library, module.Engine(library, driver=_DRIVER, device=device.index, timeout=timeout)
    except (OSError, RuntimeError) as error:
        raise _unusable(
            f"the CUDA driver does not work: {error}", "Look at what nvidia-smi says"
        ) from error


def open_library() -> Library:
    """Return the first NCCL that can be opened.

    If ``BMT_NCCL_LIBRARY`` is set, only the library that it names is tried; else the loaded one,
    those installed beside torch, and the one that the loader finds. Raises :class:`ConfigError` if
    there is none, or if its version is unknown.
    """
    module = binaries.load("_nccl")
    assert module is not None
    reasons = []
    for path, only_if_loaded in candidates():
        try:
            library: Library = module.Library(path, only_if_loaded)
            return library
        except OSError as error:
            reasons.append(str(error))
        except RuntimeError as error:
            raise _unusable(str(error), f"Let {VARIABLE} name another {NAME}") from None
    remedy = f"Install a torch that is built for CUDA, or let {VARIABLE} name the file {NAME}"
    raise _unusable(f"NCCL is not found ({'; '.join(reasons)})", remedy)


def candidates() -> Iterator[tuple[str, bool]]:
    """Yield the paths where NCCL may be, each with whether only a loaded copy counts."""
    if chosen := os.environ.get(VARIABLE):
        yield chosen, False
        return
    yield NAME, True
    directories = [
        Path(torch.version.__file__).parent / "lib",
        Path(torch.version.__file__).parents[1] / "nvidia" / "nccl" / "lib",
    ]
    wheels = importlib.util.find_spec("nvidia")  # may lie in another directory than torch
    if wheels is not None and wheels.submodule_search_locations is not None:
        directories += [
            Path(location) / "nccl" / "lib" for location in wheels.submodule_search_locations
        ]
    for path in dict.fromkeys(directory / NAME for directory in directories):
        if path.exists():
            yield str(path), False
    yield NAME, False


def _unusable(reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"comm_backend='nccl-native' cannot be used: {reason}. {remedy}, or choose"
        " comm_backend='torch'."
    )
