"""Stand-ins for NCCL and for the CUDA driver, compiled from ``fakes/``, and engines of the real
module on them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bmt_kernels import binaries

_SOURCES = Path(__file__).parent / "fakes"
_NUMBERS = (
    *("blocks", "async_error", "result", "microseconds", "asking"),
    *("finalized", "destroyed", "aborted", "ungrouped", "torn", "deaf", "inside", "thread"),
)
_DRIVER_NUMBERS = ("status", "record_status", "capturing", "events", "recorded")


def compiled(source: str, target: Path, *definitions: str) -> str:
    """Compile ``fakes/<source>.c`` and return the path of the library."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    options = [
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        *(f"-D{text}" for text in definitions),
    ]
    subprocess.run(
        [compiler, *options, str(_SOURCES / f"{source}.c"), "-o", str(target)], check=True
    )
    return str(target)


def native() -> Any:
    """The compiled module."""
    module = binaries.load("_nccl")
    assert module is not None, binaries.problem("_nccl")
    return module


class Fakes:
    """Both libraries, and what tests read and set in them."""

    def __init__(self, directory: Path) -> None:
        self.nccl = compiled("nccl", directory / "libnccl.so.2")
        self.cuda = compiled("cuda", directory / "libcuda.so.1")
        loaded = {"nccl": ctypes.CDLL(self.nccl), "cuda": ctypes.CDLL(self.cuda)}
        self._numbers = {
            name: ctypes.c_int.in_dll(loaded["nccl"], f"fake_{name}") for name in _NUMBERS
        }
        self._numbers |= {
            name: ctypes.c_int.in_dll(loaded["cuda"], f"fake_{name}") for name in _DRIVER_NUMBERS
        }

    def __getitem__(self, name: str) -> int:
        return self._numbers[name].value

    def __setitem__(self, name: str, value: int) -> None:
        self._numbers[name].value = value

    def reset(self) -> None:
        """Nothing goes wrong, nothing has happened."""
        for name in self._numbers:
            self[name] = 0

    def engine(self, timeout: float = 10.0) -> Any:
        """An engine on the fakes."""
        return native().Engine(
            native().Library(self.nccl), driver=self.cuda, device=1, timeout=timeout
        )

    def communicator(self, engine: Any, ranks: tuple[int, ...] = (4, 6, 9), rank: int = 1) -> Any:
        """A communicator in which this process is rank 6 of the world."""
        return engine.communicator(native().Library(self.nccl).unique_id(), list(ranks), rank)
