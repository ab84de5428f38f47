"""``FileLayout``: a file with its header and the values at its offsets is what the safetensors
library reads, aligned, with checksums that tell every change.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmt_checkpoint import safetensors_layout
from bmt_checkpoint.memory_pieces import bytes_of
from bmt_checkpoint.safetensors_layout import (
    CHECKSUMS,
    FileLayout,
    check_entries,
    file_summary,
    header_is_whole,
    read_header,
    state_in,
)
from bmt_core.errors import CheckpointError
from bmt_params.state.index import Index, TensorEntry

# All but one that the library does not read from memory.
DTYPES = [each for each in safetensors_layout._DTYPES if each != torch.float8_e8m0fnu]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def index_of(tensors: dict[str, torch.Tensor], others: dict[str, Any] | None = None) -> Index:
    """An index in which the first tensor has a second name, ``tied``."""
    entries: dict[str, Any] = {
        name: TensorEntry(shape=value.shape, dtype=value.dtype, source=name)
        for name, value in tensors.items()
    }
    if entries:
        entries["tied"] = next(iter(entries.values()))
    return Index(entries={**entries, **(others or {})}, metadata={"a": {"version": 2}})


def file_of(layout: FileLayout, tensors: dict[str, torch.Tensor]) -> bytes:
    checksums = {name: zlib.crc32(bytes_of(value)) for name, value in tensors.items()}
    data = bytearray(layout.file_size)
    data[: layout.data_start] = layout.header(checksums)
    for name, value in tensors.items():
        start = layout.offset_of(name)
        assert start % value.element_size() == 0
        data[start : start + value.nbytes] = bytes(bytes_of(value))
    assert len(data) == layout.file_size
    return bytes(data)


def metadata_of(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return metadata


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), st.text(max_size=4))
def test_a_file_is_what_the_library_reads_and_its_metadata_what_was_given(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], text: str
) -> None:
    tensors = {
        f"{text}.{number}": torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        for number, (shape, dtype) in enumerate(kinds)
    }
    layout = FileLayout(index_of(tensors, {"_extra_state": {"seen": 3}}))
    data = file_of(layout, tensors)
    assert layout.data_start % 8 == 0
    read = safetensors.torch.load(data)
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype and read[name].shape == value.shape
        assert bytes(bytes_of(read[name])) == bytes(bytes_of(value))
    metadata = metadata_of(data)
    assert metadata["format"] == "pt"
    assert metadata.get("tied") == (next(iter(tensors)) if tensors else None)
    assert state_in(metadata) == ({"_extra_state": {"seen": 3}}, {"a": {"version": 2}})
    # As the docstring says it: the header's own, then those of the tensors, sorted by name.
    sums = [f"{zlib.crc32(bytes_of(tensors[name])):08x}" for name in sorted(tensors)]
    assert metadata[CHECKSUMS][8:] == "".join(sums)


def test_the_state_in_the_file_of_another_program_is_empty() -> None:
    assert state_in({"format": "pt"}) == ({}, {})


def test_a_changed_byte_of_the_header_is_noticed(tmp_path: Path) -> None:
    tensors = {"weight": torch.arange(3.0), "bias": torch.ones(2)}
    layout = FileLayout(index_of(tensors))
    data = file_of(layout, tensors)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    header = read_header(path)
    assert header == data[: layout.data_start]
    checksums = metadata_of(data)[CHECKSUMS]
    assert header_is_whole(header, checksums)
    for place in range(8, len(header)):
        changed = header[:place] + bytes([header[place] ^ 1]) + header[place + 1 :]
        assert not header_is_whole(changed, checksums)
    summary = {"size": len(data), "header_crc32": f"{zlib.crc32(header):08x}"}
    assert file_summary(path) == summary


def test_what_a_file_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(name: str, dtype: torch.dtype) -> str:
        entry = TensorEntry(shape=torch.Size([2]), dtype=dtype, source=name)
        with pytest.raises(CheckpointError) as caught:
            check_entries(
                {
                    "good": TensorEntry(shape=torch.Size(), dtype=torch.int8, source="good"),
                    name: entry,
                }
            )
        return str(caught.value)

    assert "weight is of torch.complex128" in refusal("weight", torch.complex128)
    assert "cannot hold a tensor called __metadata__" in refusal("__metadata__", torch.float32)
    check_entries({"__metadata__": "no tensor"})

    index = index_of({"weight": torch.ones(2)})
    length = FileLayout(index).data_start - 8
    monkeypatch.setattr(safetensors_layout, "_LONGEST_HEADER", length)
    FileLayout(index)
    monkeypatch.setattr(safetensors_layout, "_LONGEST_HEADER", length - 1)
    with pytest.raises(CheckpointError, match=f"take {length} bytes.*has room for {length - 1}"):
        FileLayout(index)
