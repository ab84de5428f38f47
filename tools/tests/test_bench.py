"""The side-by-side benchmark: the real command on two ranks, and what it does when a case
cannot run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bench import run
from bench.fsdp2 import mesh_of
from bench.models import SIZES, TransformerBlock, build_gpt, fill
from bench.options import Options
from bench.ours import optimizer_settings
from bench.ranks import OUT_OF_MEMORY, CaseFailed, together
from bench.run import measure_all
from bench.table import format_tables, main
from bench.toolkits import TOOLKITS
from bench.training import Training, make_batch
from bmt_testing import run_ranks

TOOLS = Path(__file__).parents[1]
CPU = torch.device("cpu")

# --- the command ---


@pytest.mark.slow("tools/bench/", "bmt-zero")
@pytest.mark.ranks(2)
def test_toolkits_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "records.jsonl"
    options = (
        "--size tiny --dtype fp32 --batch 1,2 --toolkits bmt,fsdp2 --interleave --warmup 1 --steps"
        " 5 --device cpu"
    )
    result = run_command(f"{options} --output {output}")
    assert result.returncode == 0, result.stdout + result.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(r["toolkit"], r["batch"], r["status"]) for r in records] == [
        ("bmt", 1, "ok"),
        ("fsdp2", 1, "ok"),
        ("bmt", 2, "ok"),
        ("fsdp2", 2, "ok"),
    ]
    for ours, peer in (records[:2], records[2:]):
        assert ours["losses"] == pytest.approx(peer["losses"], rel=1e-6)
        assert ours["losses"] == sorted(ours["losses"], reverse=True) and len(ours["losses"]) == 6
        assert ours["losses"][-1] < 0.9 * ours["losses"][0]
    for record in records:
        assert len(record["seconds_of_steps"]) == 5 and record["step_seconds"] > 0
        assert record["tokens_per_second"] == pytest.approx(
            record["batch"] * 32 / record["step_seconds"]
        )
        assert (
            record["ranks"] == 2 and record["torch"] == torch.__version__ and record["level"] == 3
        )
    assert main([str(output)]) == 0
    table = capsys.readouterr().out.strip()
    assert table in result.stdout
    assert (
        "**tiny**: 0.2 M parameters, sequence 32, level 3, recompute, eager, fp32. 2 × CPU" in table
    )
    assert table.count("| fsdp2 |") == 2


RUN = {"run": "1", "date": "", "ranks": 2, "device": "CPU", "torch": "", "cuda": None, "nccl": None}


def records_of(options: str) -> list[dict[str, Any]]:
    return measure_all(Options.parse(options.split()), RUN)


@pytest.mark.slow("tools/bench/", "bmt-zero")
def test_toolkits_train_alike_in_float8(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="float8 layers are torchao's")
    output = tmp_path / "records.jsonl"
    options = f"--size tiny --dtype fp32 --warmup 1 --steps 5 --device cpu --output {output}"
    for more in ("--toolkits bmt", "--float8", "--float8 tensorwise_gathered"):
        run_ranks(records_of, 2, f"{options} {more}")
    without, ours, peer, *gathered = map(json.loads, output.read_text().splitlines())
    assert len(gathered) == 2
    for record in gathered:
        assert record["losses"] == pytest.approx(ours["losses"], rel=2e-3)
    # A unit of rounding in float8 is 1/16 of a number.
    assert ours["losses"] == pytest.approx(peer["losses"], rel=2e-3)
    assert ours["losses"] == pytest.approx(without["losses"], rel=0.05)
    assert ours["losses"][0] != pytest.approx(without["losses"][0], rel=1e-5)
    said = "recompute, eager, fp32, layers in float8 (tensorwise, torchao "
    assert said in format_tables([ours, peer]) and said not in format_tables([without])


def run_command(options: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, str(TOOLS / "bench"), "measure", *options.split()]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


# --- cases that cannot run ---


class Greedy(Training):
    """Runs out of memory on rank 1, in its third step."""

    name = "greedy"

    def __init__(self, case: Any, device: torch.device) -> None:
        self.steps = 0

    @classmethod
    def version(cls) -> str:
        return "1"

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps == 3 and bmt.rank() == 1:
            raise torch.OutOfMemoryError("Tried to allocate 7 GiB.\nMore text")
        return torch.zeros(())


def records_with_a_greedy_toolkit(output: Path) -> list[dict[str, Any]]:
    TOOLKITS["greedy"] = Greedy
    try:
        options = "--toolkits greedy,fsdp2 --dtype fp32 --warmup 1 --steps 5 --device cpu --output"
        return records_of(f"{options} {output}")
    finally:
        del TOOLKITS["greedy"]


def test_run_goes_on_when_one_rank_is_out_of_memory(tmp_path: Path) -> None:
    output = tmp_path / "records.jsonl"
    for records in run_ranks(records_with_a_greedy_toolkit, 2, output):
        assert [record["status"] for record in records] == ["out of memory", "ok"]
        assert records[0]["reason"] == "rank 1: Tried to allocate 7 GiB."
    assert len(output.read_text().splitlines()) == 2


def status_when_ranks_fail_differently() -> tuple[str, str]:
    def part() -> None:
        raise torch.OutOfMemoryError("no memory") if bmt.rank() == 0 else ValueError("a mistake")

    with pytest.raises(CaseFailed) as failure:
        together(part)
    return failure.value.status, failure.value.reason


def test_mistake_on_one_rank_is_not_called_out_of_memory() -> None:
    assert (
        run_ranks(status_when_ranks_fail_differently, 2)
        == [("failed", "rank 1: ValueError: a mistake")] * 2
    )


def grid_of_hybrid_sharding(arguments: list[str]) -> list[tuple[int, ...]]:
    """Numbers of copies and shards, of bmt and of FSDP2, in the run that is measured."""
    found: list[tuple[int, ...]] = []

    def note(options: Options, _: object) -> list[Any]:
        topology = bmt.current().topology
        found.append((topology.axis_size("replica"), topology.axis_size("dp")))
        (case,) = options.cases()
        found.append(tuple(mesh_of(bmt.current().device, case.shard_size).shape))
        return []

    with patch.object(run, "measure_all", note):
        run.main(arguments)
    return found


def test_hybrid_sharding_copies_over_the_other_ranks() -> None:
    arguments = ["--shard-size", "2", "--toolkits", "fsdp2", "--device", "cpu"]
    assert run_ranks(grid_of_hybrid_sharding, 4, arguments, init=None) == [[(2, 2), (2, 2)]] * 4


def test_fsdp2_with_states_on_the_host_trains_as_without(tmp_path: Path) -> None:
    output = tmp_path / "records.jsonl"
    options = "--size tiny --dtype fp32 --toolkits fsdp2,fsdp2-offload --warmup 1 --steps 5"
    run_ranks(records_of, 2, f"{options} --device cpu --output {output}")
    there, offloaded = (json.loads(line) for line in output.read_text().splitlines())
    assert offloaded["toolkit"] == "fsdp2-offload" and offloaded["status"] == "ok"
    assert offloaded["losses"] == pytest.approx(there["losses"], rel=1e-6)


@pytest.mark.slow("tools/bench/", "bmt-zero")
@pytest.mark.parametrize("more", [(), ("--optimizer-shards", "all")])
def test_hybrid_sharding_trains_alike(tmp_path: Path, more: tuple[str, ...]) -> None:
    output = tmp_path / "records.jsonl"
    options = "--size tiny --dtype fp32 --shard-size 2 --batch 2 --warmup 1 --steps 5 --device cpu"
    arguments = [*options.split(), *more, "--output", str(output)]
    assert run_ranks(run.main, 4, arguments, init=None) == [0] * 4
    ours, peer = (json.loads(line) for line in output.read_text().splitlines())
    assert ours["losses"] == pytest.approx(peer["losses"], rel=1e-6)
    assert ours["shard_size"] == peer["shard_size"] == 2
    assert ours["optimizer_shards"] == (more[1] if more else None)
    assert peer["optimizer_shards"] is None


@pytest.mark.parametrize(("more", "expected"), [((), True), (("--no-overlap-forward",), False)])
def test_the_update_is_beside_the_forward_unless_asked_otherwise(
    more: tuple[str, ...], expected: bool
) -> None:
    ours, peer = Options.parse(["--toolkits", "bmt,fsdp2", *more]).cases()
    assert optimizer_settings(ours)["overlap_forward"] is expected
    assert not peer.overlap_forward


def test_toolkits_say_what_they_cannot_do() -> None:
    (case,) = Options.parse(["--toolkits", "fsdp2", "--level", "1"]).cases()
    assert TOOLKITS["fsdp2"].obstacle(case) == "not applicable: FSDP2 has no level 1"


# --- options, model, table ---


def test_interleaved_toolkits_take_turns() -> None:
    arguments = ["--batch", "1,4", "--toolkits", "bmt,fsdp2"]
    names = [case.name for case in Options.parse(arguments).cases()]
    assert names == ["bmt-batch1", "bmt-batch4", "fsdp2-batch1", "fsdp2-batch4"]
    names = [case.name for case in Options.parse([*arguments, "--interleave"]).cases()]
    assert names == ["bmt-batch1", "fsdp2-batch1", "bmt-batch4", "fsdp2-batch4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 3", "--steps must be at least 5"),
        ("--warmup 0", "--warmup must be at least 1"),
        ("--toolkits bmt,megatron", "no toolkit is named megatron"),
        (
            "--float8 --toolkits bmt,dtensor",
            "--float8 is an option of bmt and fsdp2, and not of dt",
        ),
        ("--batch 1,0", "'1,0' is not a list of positive numbers"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        Options.parse(arguments.split())
    assert message in capsys.readouterr().err


def test_sizes_are_what_their_names_say() -> None:
    billions = {name: round(size.num_parameters() / 1e9, 1) for name, size in SIZES.items()}
    assert billions == {"tiny": 0.0, "narrow": 0.0, "1b": 1.3, "3b": 3.3, "7b": 6.5, "13b": 12.7}


def test_whole_model_never_exists() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    def shard(unit: nn.Module) -> nn.Module:
        # The caller's variable still holds the last.
        assert all(other() is None for other in alive[:-1])
        alive.append(weakref.ref(unit))
        return nn.Identity()

    build_gpt(
        SIZES["tiny"],
        dtype=torch.float32,
        rounded_to=torch.float32,
        device=CPU,
        shard=shard,
        chain=lambda blocks: nn.Sequential(*blocks),
    )
    assert len(alive) == SIZES["tiny"].num_layers + 2


def test_values_do_not_depend_on_the_dtype_of_parameters() -> None:
    size = SIZES["tiny"]
    narrow, wide = (TransformerBlock(size, dtype) for dtype in (torch.bfloat16, torch.float32))
    for block in (narrow, wide):
        fill(block, size, seed=3, rounded_to=torch.bfloat16)
    for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(one.float(), other)


def test_batches_differ_between_ranks_and_not_between_calls() -> None:
    (tokens, targets), (again, _), (others, _) = (
        make_batch(SIZES["tiny"], batch=2, rank=rank, device=CPU) for rank in (0, 0, 1)
    )
    assert torch.equal(tokens, again) and not torch.equal(tokens, others)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def record(
    toolkit: str, batch: int, speed: float, memory: float, losses: list[float]
) -> dict[str, Any]:
    common = {
        "run": "1",
        "size": "13b",
        "level": 3,
        "recompute": True,
        "compile": False,
        "dtype": "bf16",
        "ranks": 4,
    }
    software = {
        "torch": "2",
        "cuda": "13",
        "nccl": "2.28",
        "device": "GPU",
        "date": "2026-01-01",
        "toolkit_version": "1",
    }
    case = {
        "shape": {"sequence": 512},
        "parameters": 12_700_000_000,
        "steps": 2,
        "warmup": 1,
        "batch": batch,
    }
    settings = {
        "optimizer": "adam",
        "reduce_dtype": None,
        "toolkit": toolkit,
        "status": "ok",
        "losses": losses,
    }
    figures = {"tokens_per_second": speed, "step_seconds": 1 / speed}
    return (
        common
        | software
        | case
        | settings
        | figures
        | {"peak_allocated": memory, "peak_reserved": memory + 1}
    )


def test_table_compares_each_repetition_with_its_neighbour() -> None:
    failed = record("fsdp2", 4, 1, 1, []) | {
        "status": OUT_OF_MEMORY,
        "reason": "rank 0: Tried to allocate.",
    }
    records = [
        record("bmt", 8, 120, 60, [4, 3, 2]),
        record("fsdp2", 8, 100, 50, [4, 3, 2.5]),
        record("bmt", 4, 10, 10, [4, 3, 2]),
        failed,
        record("bmt", 8, 110, 60, [4, 3, 2]),
        record("fsdp2", 8, 100, 60, [4, 3, 2]),
    ]
    rows = [line.split("|")[1:-1] for line in format_tables(records).splitlines()[4:]]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells == [
        ["4", "bmt", "0.1000", "10", "", "10.0 (11.0)", "", "3.0000 → 2.0000", ""],
        ["4", "fsdp2", "out of memory", "", "", "", "", "", ""],
        ["8", "bmt", "0.0083", "120", "", "60.0 (61.0)", "", "3.0000 → 2.0000", ""],
        [
            "8",
            "fsdp2",
            "0.0100",
            "100",
            "1.200",
            "50.0 (51.0)",
            "1.200",
            "3.0000 → 2.5000",
            "2.5e-01",
        ],
        ["8", "bmt", "0.0091", "110", "", "60.0 (61.0)", "", "3.0000 → 2.0000", ""],
        [
            "8",
            "fsdp2",
            "0.0100",
            "100",
            "1.100",
            "60.0 (61.0)",
            "1.000",
            "3.0000 → 2.0000",
            "0.0e+00",
        ],
    ]
