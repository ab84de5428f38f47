"""The example's data: which bytes of which files are read, and by which rank."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from text import SEPARATOR, read_text
from windows import Shard, Windows


@given(
    num_windows=st.integers(12, 90),
    batch_size=st.sampled_from([4, 8, 12]),
    seed=st.integers(0, 9),
    steps=st.integers(1, 40),
)
def test_shards_are_disjoint_and_together_the_batch_of_one_rank(
    num_windows: int, batch_size: int, seed: int, steps: int
) -> None:
    def indices(rank: int, world_size: int) -> list[list[int]]:
        shard = Shard(
            num_windows, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size
        )
        return [shard.indices(step).tolist() for step in range(steps)]

    alone = indices(0, 1)
    per_epoch = num_windows // batch_size
    for start in range(0, steps, per_epoch):
        epoch = [index for step in alone[start : start + per_epoch] for index in step]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(num_windows))
    for world_size in (2, 4):
        ranks = [indices(rank, world_size) for rank in range(world_size)]
        assert [list(chain(*step)) for step in zip(*ranks, strict=True)] == alone
        seen = [{index for step in rank for index in step} for rank in ranks]
        assert sum(map(len, seen)) == len(set.union(*seen))


def test_shards_need_a_batch_that_can_be_divided_and_text_for_one_batch() -> None:
    with pytest.raises(ValueError, match=r"6 sequences .* 4 ranks"):
        Shard(100, batch_size=6, seed=0, rank=0, world_size=4)
    with pytest.raises(ValueError, match="7 windows, and a batch needs 8"):
        Shard(7, batch_size=8, seed=0, rank=0, world_size=1)


@given(size=st.integers(0, 60), length=st.integers(1, 9))
def test_windows_read_every_byte_once_and_predict_the_next(size: int, length: int) -> None:
    windows = Windows(torch.arange(size, dtype=torch.uint8), length)
    inputs, targets = windows.take(torch.arange(len(windows)))
    assert inputs.flatten().tolist() == list(range(len(windows) * length))
    assert targets.flatten().tolist() == list(range(1, len(windows) * length + 1))
    assert size - len(windows) * length <= length


def test_python_sources_are_split_by_file_and_always_in_the_same_way() -> None:
    text, again = read_text(), read_text()
    assert text == again
    training, held_out = (
        {document.name for document in part} for part in (text.training, text.held_out)
    )
    assert len(training) > 200
    assert len(held_out) > 10
    assert not training & held_out
    assert not {document.content for document in text.training} & {
        document.content for document in text.held_out
    }
    assert not any(
        re.search(r"(^|/)(tests?|site-packages|_sysconfigdata)", name)
        for name in training | held_out
    )
    sizes = [
        sum(len(document.content) for document in part) for part in (text.training, text.held_out)
    ]
    assert 0.04 < sizes[1] / sum(sizes) < 0.08
    assert text.training_bytes().numel() == sizes[0] + len(training)


def test_files_of_a_directory_are_split_without_copies_and_without_binary_ones(
    tmp_path: Path,
) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"text {number % 20}\n" * 50)
    (tmp_path / "binary").write_bytes(b"a" + SEPARATOR + b"b")
    (tmp_path / "empty").touch()
    text = read_text(tmp_path)
    contents = [document.content for document in (*text.training, *text.held_out)]
    assert len(contents) == len(set(contents)) == 20
    assert all(SEPARATOR not in content for content in contents)
    assert text.held_out
    limited = read_text(tmp_path, max_bytes=1000)
    assert sum(len(document.content) for document in (*limited.training, *limited.held_out)) == 1000


def test_the_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    content = b"".join(b"line %d\n" % number for number in range(1000))
    (tmp_path / "a.txt").write_bytes(content)
    text = read_text(tmp_path / "a.txt")
    assert text.training[0].content + text.held_out[0].content == content
    assert text.training[0].content.endswith(b"\n")
    assert 0.04 < len(text.held_out[0].content) / len(content) < 0.06


def test_missing_and_empty_text_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file or directory"):
        read_text(tmp_path / "missing")
    with pytest.raises(ValueError, match="no text"):
        read_text(tmp_path)
