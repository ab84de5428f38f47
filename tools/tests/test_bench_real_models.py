"""The side-by-side benchmark of models of transformers, on two ranks of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.options import Options
from bench.real_models import CONFIGURATIONS, RealModel
from bench.run import measure_all
from bench.table import format_tables
from bmt_testing import run_ranks

pytest.importorskip("transformers", reason="the models are those of transformers")
OPTIONS = (
    "--model llama-tiny --sequence 64 --dtype fp32 --batch 2 --warmup 1 --steps 5 --interleave"
    " --device cpu"
)
RUN = {"run": "1", "date": "", "ranks": 2, "device": "CPU", "torch": "", "cuda": None, "nccl": None}


def records_of(options: str) -> list[dict[str, Any]]:
    return measure_all(Options.parse(options.split()), RUN)


def measured(options: str, output: Path, ranks: int = 2, **init: Any) -> list[dict[str, Any]]:
    run_ranks(records_of, ranks, f"{OPTIONS} {options} --output {output}", init=init)
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow("tools/bench/", "bmt-hf")
@pytest.mark.parametrize("more", ["", "--lora 4"])
def test_real_models_train_alike_under_bmt_and_fsdp2(more: str, tmp_path: Path) -> None:
    if more:
        pytest.importorskip("peft", reason="the adapters are those of PEFT")
    records = measured(
        "--keep none,attention,attention+products,0.001 --peer-keep none,selective,products"
        f" {more}",
        tmp_path / "records.jsonl",
    )
    assert [(each["toolkit"], each["keep"], each["status"]) for each in records] == [
        ("bmt", None, "ok"),
        ("bmt", "attention", "ok"),
        ("bmt", "attention+products", "ok"),
        ("bmt", "0.001", "ok"),
        ("fsdp2", None, "ok"),
        ("fsdp2", "selective", "ok"),
        ("fsdp2", "products", "ok"),
    ]
    for each in records:
        assert each["losses"] == pytest.approx(records[0]["losses"], rel=1e-5)
        assert each["losses"][-1] < each["losses"][0]
    table = format_tables(records)
    assert table.startswith(f"**llama-tiny{', LoRA of rank 4' if more else ''}**: 0.")
    assert table.count("| 2 | bmt |") == 4 and "| attention+products |" in table


def test_the_loss_without_logits_is_the_same(tmp_path: Path) -> None:
    (whole,) = measured("--toolkits bmt", tmp_path / "whole.jsonl")
    (fused,) = measured("--toolkits bmt --fused-loss", tmp_path / "fused.jsonl")
    assert fused["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert "**llama-tiny, loss without logits**" in format_tables([fused])


@pytest.mark.slow("tools/bench/", "bmt-cp")
def test_a_sequence_that_ranks_share_has_the_losses_of_a_whole_one(tmp_path: Path) -> None:
    pytest.importorskip("bmt_cp", reason="it divides the sequence")
    # Inputs of a layer have 1 MiB on each of two ranks, and are offloaded.
    options = "--toolkits bmt --fused-loss --sequence 1024 --batch 8 --warmup 2 --steps 2"
    (whole,) = measured(f"{options} --first-sequence 32", tmp_path / "whole.jsonl", 1)
    (shared,) = measured(
        f"{options} --first-sequence 32 --cp 2 --offload-inputs --tile 100",
        tmp_path / "shared.jsonl",
        cp_size=2,
    )
    assert shared["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert len(set(shared["losses"])) == 4


def test_models_have_the_size_of_their_names_and_count_operations_of_what_a_token_uses() -> None:
    models = {
        name: RealModel(name=name, sequence=4096) for name in CONFIGURATIONS if "tiny" not in name
    }
    billions = {name: round(each.num_parameters() / 1e9, 2) for name, each in models.items()}
    assert billions == {
        "llama3-1b": 1.24,
        "llama3-8b": 8.03,
        "mistral-7b": 7.25,
        "qwen3-4b": 4.02,
        "qwen3-moe": 5.76,
    }
    llama = models["llama3-8b"]
    attention = 12 * 32 * 4096 * 2048
    assert llama.flops_per_token() == 6 * llama.num_parameters() + attention
    adapters = RealModel(name="llama3-8b", sequence=4096, lora=16)
    extra = adapters.num_parameters() - llama.num_parameters()
    assert extra == 41_943_040
    assert adapters.flops_per_token() == 4 * llama.num_parameters() + 6 * extra + attention
    sparse = models["qwen3-moe"]
    used = sparse.num_parameters() - 16 * 56 * 3 * 2048 * 768
    assert sparse.flops_per_token() == 6 * used + 12 * 16 * 4096 * 2048


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--keep attention", "--fused-loss, --offload-inputs, --tile and --cp need --model"),
        ("--model llama3-8b --keep 24 --no-recompute", "what recomputation keeps"),
        ("--model llama3-8b --toolkits bmt,dtensor", "no toolkit is named dtensor"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        Options.parse(options.split())
    assert message in capsys.readouterr().err
