"""The examples in the READMEs of the packages run as they stand there, and print what stands
below them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from document_code import blocks, code, printed_by
from test_pages import assert_prints, own_lines

from bmt_testing import run_ranks

SCRIPTS = {
    "packages/bmt-checkpoint/README.md": code("packages/bmt-checkpoint/README.md"),
    "packages/bmt-core/README.md": code("packages/bmt-core/README.md"),
    "packages/bmt-optim/README.md": code("packages/bmt-optim/README.md"),
    "packages/bmt-pipeline/README.md": code("packages/bmt-pipeline/README.md"),
    "packages/bmt-tp/README.md": code("packages/bmt-tp/README.md"),
    "packages/bmt-zero/README.md": code("packages/bmt-zero/README.md"),
    "packages/bmtrain/README.md": code("packages/bmtrain/README.md"),
}
ON_TWO_RANKS = ("bmt-core", "bmt-pipeline", "bmt-tp", "bmt-zero")


@pytest.mark.parametrize("page", SCRIPTS)
def test_an_example_prints_what_stands_below_it(page: str, tmp_path: Path) -> None:
    ranks = 2 if page.split("/")[1] in ON_TWO_RANKS else 1
    printed = run_ranks(printed_by, ranks, SCRIPTS[page], str(tmp_path), init=None)
    (expected,) = blocks(page, "text")
    assert_prints("".join(map(own_lines, printed)), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_of_the_trainer_trains(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the Trainer is transformers'")
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    script = code("packages/bmt-hf/README.md")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    printed, *_ = run_ranks(trainer_prints, ranks, script, str(tmp_path), env=hidden)
    (expected,) = blocks("packages/bmt-hf/README.md", "text")
    lines = re.findall(r"^loss .*\n", printed, re.MULTILINE)
    assert_prints("".join(lines), expected)


def trainer_prints(script: str, folder: str) -> str:
    from trainer_runs import accelerate_forgets

    with accelerate_forgets():
        return printed_by(script, folder)
