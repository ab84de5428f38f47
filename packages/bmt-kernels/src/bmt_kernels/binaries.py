"""``load``: loads a compiled module; ``problem``: why a module cannot be loaded."""

from __future__ import annotations

import importlib.util
import os
import struct
from functools import cache
from pathlib import Path
from types import ModuleType

_DIRECTORY = Path(__file__).parent
_HEADER = struct.Struct("<40xQ10xHH2x")  # of ELF: e_shoff, e_shentsize, e_shnum


@cache
def load(name: str) -> ModuleType | None:
    """Return the compiled module ``bmt_kernels.<name>``; None if it is missing or does not
    work here.
    """
    return _attempt(name)[0]


@cache
def problem(name: str) -> str | None:
    """Return why :func:`load` returns None, as a clause; None if it returns a module."""
    return _attempt(name)[1]


@cache
def _attempt(name: str) -> tuple[ModuleType | None, str | None]:
    full_name = f"{__package__}.{name}"
    found = importlib.util.find_spec(full_name)
    if found is not None and found.origin is not None and is_cut_off(Path(found.origin)):
        return None, f"{found.origin} is not whole: install bmt-kernels again"
    try:
        return importlib.import_module(full_name), None
    except ModuleNotFoundError as error:
        if error.name == full_name:
            others = ", ".join(sorted(path.name for path in _DIRECTORY.glob(f"{name}.*.so")))
            if others:
                return (
                    None,
                    (
                        f"this installation of bmt-kernels has only {others}, which is for"
                        " another Python"
                    ),
                )
            built_without = f"this installation of bmt-kernels was built without {full_name}"
            return None, built_without + (f": {reason}" if (reason := _why_left_out(name)) else "")
        return None, f"{full_name} cannot be loaded: {error}"
    except Exception as error:  # any error is reported, and plain torch can do the work
        return None, f"{full_name} cannot be loaded: {str(error) or type(error).__name__}"


def _why_left_out(name: str) -> str | None:
    """Return why the build left the module out; the build stores the reason in the module for
    the CPU.
    """
    cpu = load("_cpu") if name == "_cuda" else None
    return getattr(cpu, "WITHOUT_CUDA", None)


def is_cut_off(path: Path) -> bool:
    """Whether ``path`` is a truncated library of Linux (ELF, 64 bits), as a full disk leaves it.
    Loading it would end the process.

    The table of sections is the last thing in such a file, and the header says where it is.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        size = file.seek(0, os.SEEK_END)
    if not header.startswith(b"\x7fELF\x02\x01"):
        return False
    if len(header) < _HEADER.size:
        return True
    sections_at, section_size, sections = _HEADER.unpack(header)
    return bool(sections_at + section_size * sections > size)
