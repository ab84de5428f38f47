"""``FileLayout``: the header of a safetensors file and each tensor's offset, computed before any
value is there.

A safetensors file is eight bytes with the length of the header (little-endian), the header (JSON),
and the values. See https://github.com/huggingface/safetensors#format. All that bmt adds is in the
header's ``__metadata__``, which maps texts to texts and is ignored by other readers:

- ``<name>``: the name of the tensor to which ``<name>`` is tied, as
  ``safetensors.torch.save_model`` writes it;
- ``bmt_state``: what is not a tensor, serialised: the extra state and the versions of modules;
- ``bmt_crc32``: CRC-32 of 8 digits each: first that of the header, computed with zeros in its
  place, then those of the tensors, sorted by name.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bmt_core.errors import CheckpointError
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.serialization import from_bytes, to_bytes

STATE, CHECKSUMS = "bmt_state", "bmt_crc32"
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000  # the library's limit
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_REMEDY = (
    'Files of the torch format hold it: save(model, "NAME.pt"), or save_checkpoint(...,'
    ' format="torch").'
)
TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
"""The dtype of a tensor by its name in the header."""


class FileLayout:
    """Where the tensors of an :class:`Index` lie in its file: those of wide dtypes first, so that
    all are aligned.
    """

    def __init__(self, index: Index) -> None:
        entries = {
            name: entry for name, entry in index.entries.items() if isinstance(entry, TensorEntry)
        }
        own = {name: entry for name, entry in entries.items() if entry.source == name}
        self.names = sorted(own)
        self._tensors: dict[str, Any] = {}
        self._ends: dict[str, tuple[int, int]] = {}
        end = 0
        check_entries(index.entries)
        for name, entry in sorted(own.items(), key=lambda item: -item[1].dtype.itemsize):
            start, end = end, end + entry.shape.numel() * entry.dtype.itemsize
            self._tensors[name] = {
                "dtype": _DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, end],
            }
            self._ends[name] = (start, end)
        others = {
            name: entry
            for name, entry in index.entries.items()
            if not isinstance(entry, TensorEntry)
        }
        state = {
            "extra": others,
            "versions": {prefix: dict(value) for prefix, value in index.metadata.items()},
        }
        self._metadata = {
            "format": "pt",
            **{name: entry.source for name, entry in entries.items() if entry.source != name},
            STATE: base64.b64encode(to_bytes(state)).decode(),
        }
        self.data_start = len(self._encoded("0" * (8 + 8 * len(self.names))))
        self.file_size = self.data_start + end

    def offset_of(self, name: str) -> int:
        """Return where the values of ``name`` begin in the file."""
        return self.data_start + self._ends[name][0]

    def header(self, checksums: Mapping[str, int]) -> bytes:
        """Return all that comes before the values, given the checksum of each tensor."""
        sums = "".join(f"{checksums[name]:08x}" for name in self.names)
        return self._encoded(f"{zlib.crc32(self._encoded('0' * 8 + sums)):08x}" + sums)

    def _encoded(self, checksums: str) -> bytes:
        head = {_METADATA: {**self._metadata, CHECKSUMS: checksums}, **self._tensors}
        text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _LONGEST_HEADER:
            raise CheckpointError(
                f"The names and extra states of the model take {len(text)} bytes, and a safetensors"
                f" file has room for {_LONGEST_HEADER}. Save a directory, or a file in the torch"
                " format (.pt)."
            )
        return len(text).to_bytes(8, "little") + text


def state_in(metadata: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the modules' extra state and versions from a file's metadata; both are empty if
    another program wrote the file.
    """
    if STATE not in metadata:
        return {}, {}
    state = from_bytes(base64.b64decode(metadata[STATE], validate=True))
    extra, versions = dict(state["extra"]), dict(state["versions"])
    return extra, {prefix: dict(value) for prefix, value in versions.items()}


def header_is_whole(header: bytes, checksums: str) -> bool:
    """Whether ``header``, the beginning of a file up to its values, has the checksum that
    ``checksums`` begins with.
    """
    blank = header.replace(checksums.encode(), (b"0" * 8) + checksums[8:].encode(), 1)
    return f"{zlib.crc32(blank):08x}" == checksums[:8]


def read_header(path: Path) -> bytes:
    """Return the beginning of the file up to its values."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER))


def file_summary(path: Path) -> dict[str, Any]:
    """Return the size of the file and the CRC-32 of its header, which has the checksums of
    its tensors.
    """
    return {"size": path.stat().st_size, "header_crc32": f"{zlib.crc32(read_header(path)):08x}"}


def check_entries(entries: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> None:
    """Raise :class:`CheckpointError` for a tensor among the entries of an index, or ``values``,
    that a safetensors file cannot hold.
    """
    for name, value in (values or {}).items():
        if isinstance(value, torch.Tensor) and value.numel() and not value.data_ptr():
            raise CheckpointError(
                f"{name} is of {type(value).__name__}, whose elements are in other tensors:"
                f" safetensors files and .dcp directories cannot hold it. {_REMEDY}"
            )
    for name, entry in entries.items():
        if isinstance(entry, TensorEntry) and entry.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} is of {entry.dtype}, which safetensors files cannot hold. {_REMEDY}"
            )
        if isinstance(entry, TensorEntry) and name == _METADATA:
            raise CheckpointError(
                f"A safetensors file cannot hold a tensor called {name}. Rename it. {_REMEDY}"
            )
