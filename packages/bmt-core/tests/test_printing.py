"""Printing on one rank, blocks and tables, memory."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch

import bmt_core
from bmt_core.testing import run_ranks


def printed(rank: int) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        bmt_core.print_rank("a", 1, sep="-", rank=rank)
    return output.getvalue()


def test_print_rank_prints_on_one_rank() -> None:
    assert run_ranks(printed, 2, 1) == ["", "a-1\n"]
    assert run_ranks(printed, 2, 0) == ["a-1\n", ""]


def test_before_init_print_rank_prints_as_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    bmt_core.print_rank("here", rank=1)
    bmt_core.print_rank("here")
    assert capsys.readouterr().out == "here\n"


def test_blocks_and_tables_go_where_they_are_told() -> None:
    out = io.StringIO()
    bmt_core.print_block("title", file=out)
    bmt_core.print_dict("t", {}, file=out)
    bmt_core.print_dict("t", {"a": 1, "long": [2]}, file=out)
    title, empty, blank, table, *rows = out.getvalue().splitlines()
    assert title == " title ".center(80, "=") and empty == table == " t ".center(80, "=") and blank == ""
    assert rows == ["a    : 1", "long : [2]"]


def memory_lines() -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        bmt_core.see_memory("after init", detail=True)
    return output.getvalue()


def test_memory_of_the_process_is_told_on_rank_0() -> None:
    zero, one = run_ranks(memory_lines, 2)
    assert re.fullmatch(r"after init\n  process +\d+\.\d\d GiB\n  process peak +\d+\.\d\d GiB\n", zero)
    assert one == ""


@pytest.mark.gpu
def test_memory_of_the_device_is_told_and_its_peak_starts_anew(capsys: pytest.CaptureFixture[str]) -> None:
    held = torch.zeros(2**28, device="cuda")
    del held
    bmt_core.see_memory("peak")
    assert re.search(r"allocated peak +[1-9]\d*\.\d\d GiB", capsys.readouterr().out)
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    bmt_core.see_memory("all", detail=True)
    assert "memory summary" in capsys.readouterr().out
