"""Parts of files, written by several writers: what is in the file, the checksums, and how often the
system is called.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bmt_checkpoint
from bmt_checkpoint import memory_pieces, range_writer
from bmt_checkpoint.range_writer import RangeWriter


@st.composite
def divided(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int]]]]:
    """Sizes of a tensor, and for each of up to three writers the ranges of its elements,
    in order.
    """
    numel = draw(st.integers(0, 90))
    ends = sorted(draw(st.sets(st.integers(1, max(numel, 1)), max_size=20)) | {numel})
    writers: list[list[tuple[int, int]]] = [[] for _ in range(draw(st.integers(1, 3)))]
    start = 0
    for end in ends:
        if end <= numel:
            writers[draw(st.integers(0, len(writers) - 1))].append((start, end))
            start = end
    return numel, writers


@settings(max_examples=60)
@given(
    divided(),
    st.sampled_from([torch.uint8, torch.float32, torch.float64]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_writers_of_parts_make_the_file_and_its_checksum(
    case: tuple[int, list[list[tuple[int, int]]]], dtype: torch.dtype, piece: int, most: int
) -> None:
    """The system takes at most ``most`` bytes at once."""
    write = os.pwrite
    numel, writers = case
    whole = torch.arange(numel).mul(37).to(dtype)
    expected = bytes(memory_pieces.bytes_of(whole))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_pieces, "PIECE", piece)
        patch.setattr(range_writer, "PIECE", piece)
        patch.setattr(os, "pwrite", lambda file, data, start: write(file, data[:most], start))
        path, checksum = Path(folder) / "file", 0
        path.write_bytes(b"\0" * (5 + len(expected)))
        for ranges in writers:
            part = torch.cat([whole[start:end] for start, end in ranges]) if ranges else whole[:0]
            with RangeWriter(path) as file:
                checksum ^= file.write_part(5, part, ranges, len(expected))
        assert path.read_bytes() == b"\0" * 5 + expected
        assert checksum == zlib.crc32(expected)


def test_many_small_tensors_are_written_by_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Module()
    for i in range(300):
        model.register_buffer(f"b{i}", torch.full((7,), float(i)))
    model.register_buffer("large", torch.arange(600_000.0))
    calls = 0
    write = os.pwrite

    def counted(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", counted)
    bmt_checkpoint.save(model, f"{tmp_path}/")
    assert calls <= 5  # the small ones, the large one in three pieces of 1 MiB or less, the header
    other = torch.nn.Module()
    for name, buffer in model.named_buffers():
        other.register_buffer(name, torch.zeros_like(buffer))
    bmt_checkpoint.load(other, tmp_path)
    assert all(
        one.equal(buffer) for one, buffer in zip(other.buffers(), model.buffers(), strict=True)
    )
