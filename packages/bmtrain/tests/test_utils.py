"""Output on one rank, memory, averages, versions, slices."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmt_core.errors import NotInitializedError
from bmt_testing import run_ranks
from bmtrain.utils import (
    AverageRecorder,
    check_torch_version,
    print_block,
    print_dict,
    print_rank,
    round_up,
    see_memory,
    tp_split_tensor,
)


def printed(rank: int) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        print_rank("a", 1, sep="-", rank=rank)
    return output.getvalue()


def test_print_rank_prints_on_one_rank() -> None:
    assert run_ranks(printed, 2, 1) == ["", "a-1\n"]
    assert run_ranks(printed, 2, 0) == ["a-1\n", ""]


def test_before_init_of_a_launched_job_print_rank_asks_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    print_rank("of rank 0")
    print_rank("of rank 1", rank=1)
    assert capsys.readouterr().out == "of rank 1\n"


def test_before_init_print_rank_prints_as_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    print_rank("here", rank=1)
    print_rank("here")
    assert capsys.readouterr().out == "here\n"


def test_blocks_and_tables_go_where_they_are_told() -> None:
    out = io.StringIO()
    print_block("title", file=out)
    print_dict("t", {}, file=out)
    print_dict("t", {"a": 1, "long": [2]}, file=out)
    title, empty, blank, table, *rows = out.getvalue().splitlines()
    assert (
        title == " title ".center(80, "=")
        and empty == table == " t ".center(80, "=")
        and blank == ""
    )
    assert rows == ["a    : 1", "long : [2]"]


def memory_lines() -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        see_memory("after init", detail=True)
    return output.getvalue()


def test_memory_of_the_process_is_told_on_rank_0() -> None:
    zero, one = run_ranks(memory_lines, 2)
    assert re.fullmatch(
        r"after init\n  process +\d+\.\d\d GiB\n  process peak +\d+\.\d\d GiB\n", zero
    )
    assert one == ""


@pytest.mark.gpu
def test_memory_of_the_device_is_told_and_its_peak_starts_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = torch.zeros(2**28, device="cuda")
    del held
    see_memory("peak")
    assert re.search(r"allocated peak +[1-9]\d*\.\d\d GiB", capsys.readouterr().out)
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    see_memory("all", detail=True)
    assert "memory summary" in capsys.readouterr().out


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_round_up_is_the_next_multiple(x: int, d: int) -> None:
    assert round_up(x, d) % d == 0 and x <= round_up(x, d) < x + d


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
    st.floats(-1e3, 1e3),
)
def test_average_is_that_of_the_records_whatever_the_start(
    records: list[float], alpha: float, start: float
) -> None:
    average = AverageRecorder(alpha, start)
    assert average.value == start
    for value in records:
        average.record(value)
    weights = [alpha ** (len(records) - 1 - i) for i in range(len(records))]
    expected = sum(w * v for w, v in zip(weights, records, strict=True)) / sum(weights)
    assert average.value == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("installed", "asked", "order"),
    [
        ("2.2.0a0+abc", "2.2.0", 0),
        ("2.2.0a0+abc", "2.1.9", 1),
        ("2.13.0+cpu", "2.2.0", 1),
        ("2.13.0", "2.13", 0),
        ("2.13", "2.13.1", -1),
        ("1.12.1+cu113", "2.0.0", -1),
        ("2.11.0.dev20260101+cu130", "2.11.0", 0),
    ],
)
def test_torch_version_is_compared_by_its_numbers(
    installed: str, asked: str, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "__version__", installed)
    assert check_torch_version(asked) == order


def test_what_is_no_version_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"looks like '2\.1\.0', not like 'new'"):
        check_torch_version("new")


def split_without_tp() -> list[list[float]]:
    return tp_split_tensor(torch.arange(6.0).view(2, 3), 1).tolist()  # type: ignore[no-any-return]


def test_without_tensor_parallelism_the_slice_is_the_whole() -> None:
    assert run_ranks(split_without_tp, 2) == [[[0, 1, 2], [3, 4, 5]]] * 2
    with pytest.raises(NotInitializedError):
        split_without_tp()


class FourTensorParallelRanks:
    class topology:
        @staticmethod
        def axis_size(axis: str) -> int:
            return 4 if axis == "tp" else 1

        @staticmethod
        def axis_rank(axis: str) -> int:
            return 2 if axis == "tp" else 0


def test_slices_are_contiguous_and_must_work_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bmt_core.current", FourTensorParallelRanks)
    tensor = torch.arange(24).view(3, 8)
    part = tp_split_tensor(tensor, 1)
    assert part.tolist() == tensor[:, 4:6].tolist() and part.is_contiguous()
    assert tp_split_tensor(tensor, -1).tolist() == part.tolist()
    with pytest.raises(ValueError, match=r"Dim 0 of shape \(3, 8\) is not a multiple of tp_size=4"):
        tp_split_tensor(tensor, 0)
