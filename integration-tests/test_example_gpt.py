"""The example: its GPT against the same GPT in plain torch, its data, and ``train.py`` from the first line to the last."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bmtrain as bmt
import train as example
from bmt_core import DistributedParameter
from bmt_core.cli import main as bmt_program
from bmt_core.testing import RankFailure, run_ranks
from callbacks import CALLBACKS
from evaluation import Evaluation
from generation import generate
from models import GPT
from text import SEPARATOR, read_text
from windows import Shard, Windows

TRAIN = Path(example.__file__)
TIME_LIMIT = 120.0
LAST_LINE = re.compile(r"trained (\d+) steps: held-out loss (\d+\.\d+) -> (\d+\.\d+), checkpoint (\S+)")

# --- the model, against plain torch ---

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 62,
    "dim_model": 24,
    "dim_head": 8,
    "num_heads": 2,
    "dim_ff": 50,
    "max_distance": 12,
}
BATCH, LENGTH, STEPS, LR, CLIP = 8, 12, 5, 1e-2, 0.5
# With Adam's usual eps, an element whose gradient is zero but for rounding (the bias of the keys) still moves by the learning rate.
EPS = 1e-4


class PlainBlock(nn.Module):
    """Attention spelled out, as the definition has it."""

    def __init__(self, dim: int, heads: int, dim_head: int, dim_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_attn = nn.LayerNorm(dim)
        self.attn = nn.ModuleDict(
            {"project_qkv": nn.Linear(dim, 3 * heads * dim_head), "project_out": nn.Linear(heads * dim_head, dim)}
        )
        self.ln_ff = nn.LayerNorm(dim)
        self.ff = nn.ModuleDict({"w_in": nn.Linear(dim, dim_ff), "w_out": nn.Linear(dim_ff, dim)})

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        heads = []
        query, key, value = self.attn["project_qkv"](self.ln_attn(hidden)).chunk(3, dim=-1)
        for q, k, v in zip(*(each.chunk(self.heads, dim=-1) for each in (query, key, value)), strict=True):
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
            heads.append(scores.softmax(-1) @ v)
        hidden = hidden + self.attn["project_out"](torch.cat(heads, dim=-1))
        x = self.ff["w_in"](self.ln_ff(hidden))
        gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        hidden = hidden + self.ff["w_out"](gelu)
        return hidden


class PlainGPT(nn.Module):
    """The same GPT, in plain torch and in one process."""

    def __init__(self) -> None:
        super().__init__()
        dim = SIZES["dim_model"]
        self.input_embedding = nn.Embedding(SIZES["vocab_size"], dim)
        self.position_embedding = nn.Embedding(SIZES["max_distance"], dim)
        self.transformers = nn.ModuleList(
            PlainBlock(dim, SIZES["num_heads"], SIZES["dim_head"], SIZES["dim_ff"]) for _ in range(SIZES["num_layers"])
        )
        self.layernorm = nn.LayerNorm(dim)
        torch.manual_seed(3)
        for name, parameter in self.named_parameters():
            if "embedding" in name:
                nn.init.normal_(parameter, std=0.05)
            elif parameter.dim() == 2:
                nn.init.xavier_normal_(parameter, gain=0.2 if "out" in name else 1.0)
            else:
                nn.init.constant_(parameter, 1.0 if re.search(r"(ln_\w+|layernorm)\.weight", name) else 0.0)

    def forward(self, input_ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        visible = torch.zeros(len(input_ids), length, length, dtype=torch.bool)
        for row in range(len(input_ids)):
            for reader in range(length):
                for read in range(length):
                    is_before = pos[row, read] <= pos[row, reader] and mask[row, read]
                    visible[row, reader, read] = is_before or reader == read
        hidden = self.input_embedding(input_ids) + self.position_embedding(pos)
        for block in self.transformers:
            hidden = block(hidden, visible)
        logits: torch.Tensor = self.layernorm(hidden) @ self.input_embedding.weight.T
        return logits


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, positions, mask and targets of the global batch; sequences of several lengths, padded."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH + 1), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (BATCH, 1), generator=generator)
    pos = torch.arange(LENGTH).expand(BATCH, -1)
    mask = pos < lengths
    return tokens[:, :-1], pos, mask, tokens[:, 1:].masked_fill(~mask, -100)


class Trace(dict[str, Any]):
    """What a training run went through: initial values, and per step loss, norm and gradients; final values."""


def plain_trace() -> Trace:
    model = PlainGPT()
    trace = Trace(initial={name: value.clone() for name, value in model.state_dict().items()}, steps=[])
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=EPS)
    for step in range(STEPS):
        inputs, pos, mask, targets = batch_of(step)
        logits = model(inputs, pos, mask)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / inputs.numel()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        trace["steps"].append((loss.item(), norm.item(), gradients))
    trace["final"] = model.state_dict()
    return trace


def sharded_trace(zero_level: int, use_checkpoint: bool, num_micro_batches: int) -> Trace:
    model = GPT(**SIZES, dtype=torch.float32, use_checkpoint=use_checkpoint, zero_level=zero_level)
    torch.manual_seed(3)
    bmt.init_parameters(model)
    trace = Trace(initial={name: value.clone() for name, value in model.state_dict().items()}, steps=[])
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=LR, eps=EPS)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    loss_func = bmt.loss.FusedCrossEntropy(reduction="sum", parallel=True)
    topology = bmt.current().topology
    for step in range(STEPS):
        own = [each.chunk(topology.data_size)[topology.data_rank] for each in batch_of(step)]
        manager.zero_grad()
        total = torch.zeros(())
        for number in range(num_micro_batches):
            inputs, pos, mask, targets = (each.chunk(num_micro_batches)[number] for each in own)
            is_last = number == num_micro_batches - 1
            with contextlib.nullcontext() if is_last else bmt.no_sync(model):
                loss = loss_func(model(inputs, pos, mask).flatten(0, 1), targets.flatten()) / own[0].numel()
                manager.backward(loss)
            total += loss.detach()
        gradients = {name: gathered_gradient(parameter) for name, parameter in model.named_parameters()}
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=CLIP)
        manager.step()
        trace["steps"].append((bmt.sum_loss(total).item(), norm.item(), gradients))
    trace["final"] = model.state_dict()
    return trace


def gathered_gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DistributedParameter)
    assert parameter.grad is not None
    return parameter.gather_all_like(parameter.grad).clone()


@pytest.fixture(scope="module")
def plain() -> Trace:
    return plain_trace()


@pytest.mark.parametrize(
    ("world_size", "tp_size", "zero_level", "use_checkpoint", "num_micro_batches"),
    [
        (1, 1, 3, True, 1),
        (2, 1, 3, True, 1),
        (2, 1, 1, True, 2),
        (2, 1, 0, False, 4),
        (2, 2, 2, False, 1),
        (4, 1, 3, False, 2),
        (4, 1, 2, True, 1),
        (4, 2, 3, True, 2),
        (4, 2, 1, False, 1),
        (4, 2, 0, True, 4),
    ],
)
def test_gpt_trains_as_in_plain_torch(
    plain: Trace, world_size: int, tp_size: int, zero_level: int, use_checkpoint: bool, num_micro_batches: int
) -> None:
    init = {"tp_size": tp_size}
    traces = run_ranks(sharded_trace, world_size, zero_level, use_checkpoint, num_micro_batches, init=init)
    for trace in traces:
        assert trace["initial"].keys() == plain["initial"].keys()
        for name, value in plain["initial"].items():
            assert torch.equal(trace["initial"][name], value), name
        for (loss, norm, gradients), (plain_loss, plain_norm, plain_gradients) in zip(
            trace["steps"], plain["steps"], strict=True
        ):
            assert loss == pytest.approx(plain_loss, rel=1e-5)
            assert norm == pytest.approx(plain_norm, rel=1e-5)
            for name, value in plain_gradients.items():
                torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-6, msg=name)
        for name, value in plain["final"].items():
            torch.testing.assert_close(trace["final"][name], value, rtol=1e-4, atol=2e-5, msg=name)


def initial_values(chunks: int) -> dict[str, torch.Tensor]:
    model = GPT(**{**SIZES, "num_layers": 4}, dtype=torch.float32, chunks=chunks)
    bmt.init_parameters(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_first_values_are_those_of_one_process_where_stages_have_several_parts() -> None:
    (expected,) = run_ranks(initial_values, 1, 1)
    stages = run_ranks(initial_values, 2, 2, init={"pipe_size": 2})
    assert {name for values in stages for name in values} == expected.keys()
    for values in stages:
        assert {name: value for name, value in values.items() if not torch.equal(value, expected[name])} == {}


def logits_with_and_without_mask() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    model = GPT(**SIZES, dtype=torch.float32)
    bmt.init_parameters(model)
    inputs, pos, _, _ = batch_of(0)
    everything = torch.ones_like(pos, dtype=torch.bool)
    changed = inputs.clone()
    changed[:, 7:] = 0
    with torch.no_grad():
        return model(inputs, pos), model(inputs, pos, everything), model(changed, pos, pos < 7)


def test_no_mask_means_a_full_one_and_padding_is_not_read() -> None:
    (logits, masked, padded), *_ = run_ranks(logits_with_and_without_mask, 2)
    torch.testing.assert_close(masked, logits)
    torch.testing.assert_close(padded[:, :7], logits[:, :7])
    assert padded.isfinite().all()


# --- the data ---


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
        shard = Shard(num_windows, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
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
    training, held_out = ({document.name for document in part} for part in (text.training, text.held_out))
    assert len(training) > 200
    assert len(held_out) > 10
    assert not training & held_out
    assert not {document.content for document in text.training} & {document.content for document in text.held_out}
    assert not any(re.search(r"(^|/)(tests?|site-packages|_sysconfigdata)", name) for name in training | held_out)
    sizes = [sum(len(document.content) for document in part) for part in (text.training, text.held_out)]
    assert 0.04 < sizes[1] / sum(sizes) < 0.08
    assert text.training_bytes().numel() == sizes[0] + len(training)


def test_files_of_a_directory_are_split_without_copies_and_without_binary_ones(tmp_path: Path) -> None:
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


# --- evaluation and generation ---


def evaluation_and_sample(num_windows: int) -> tuple[float, bytes]:
    model = GPT(**{**SIZES, "vocab_size": 256}, dtype=torch.float32)
    bmt.init_parameters(model)
    text = torch.randint(256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    evaluate = Evaluation(Windows(text, LENGTH), num_windows)
    assert evaluate(model) == evaluate(model)
    # Cold, so that the logits and not the random numbers decide.
    return evaluate(model), generate(model, b"ab", length=20, context=LENGTH, temperature=0.05)


def test_evaluation_and_sample_are_identical_on_any_number_of_ranks() -> None:
    # 150 windows are 5 batches, the last one smaller: on 4 ranks three have none left in the second round.
    results = [result for ranks in (1, 2, 4) for result in run_ranks(evaluation_and_sample, ranks, 150)]
    assert len(set(results)) == 1
    loss, sample = results[0]
    assert loss == pytest.approx(5.5, abs=0.3)
    assert sample.startswith(b"ab")
    assert len(sample) == 22
    along_tp = [
        result for ranks in (2, 4) for result in run_ranks(evaluation_and_sample, ranks, 150, init={"tp_size": 2})
    ]
    assert len(set(along_tp)) == 1
    assert along_tp[0] == (pytest.approx(loss, rel=1e-6), sample)
    assert set(run_ranks(evaluation_and_sample, 4, 150, init={"pipe_size": 2})) == {results[0]}


# --- train.py ---

SMALL = {
    "layers": 2,
    "dim": 32,
    "heads": 2,
    "seq-len": 32,
    "batch-size": 8,
    "eval-windows": 48,
    "sample-bytes": 8,
    "log-every": 1,
}


def small(out: Path, *arguments: object) -> list[str]:
    """The command line of a run that takes a moment."""
    options = {**SMALL, "out": out}
    return [*(f"--{name}={value}" for name, value in options.items()), *(str(argument) for argument in arguments)]


def main_with_callback(line: list[str]) -> list[dict[str, Any]]:
    """Run ``train.py`` and return what it hands to a callback."""
    seen: list[dict[str, Any]] = []
    example.main(line, callbacks=[lambda step, metrics: seen.append({"step": step, **metrics})])
    return seen


def small_run(out: Path, *arguments: object, ranks: int = 2) -> list[dict[str, Any]]:
    """Run ``train.py`` on the ranks of the pool and return its metrics, which a callback gets on rank 0 too."""
    line = small(out, "--max-bytes", 400_000, *arguments)
    seen = run_ranks(main_with_callback, ranks, line, init=None, timeout=TIME_LIMIT)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, *others = seen
    assert first and first == records[-len(first) :] and not any(others)
    for record in records:
        record.pop("tokens_per_second", None)
    return records


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return small_run(tmp_path_factory.mktemp("one"), "--steps", 6, ranks=1)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, "--zero-level 3 --accumulate 2"),
        (2, "--zero-level 2 --no-checkpoint --overlap-forward --reduce-dtype param"),
        (2, "--zero-level 1 --accumulate 4"),
        (4, "--zero-level 0 --accumulate 2"),
        (2, "--tp 2 --zero-level 1 --accumulate 2"),
        (4, "--tp 2 --zero-level 3 --no-checkpoint"),
        (2, "--pipe 2 --micro-batches 4"),
        (4, "--pipe 2 --schedule gpipe --zero-level 1 --no-checkpoint"),
        (4, "--pipe 2 --tp 2 --micro-batches 8 --zero-level 2"),
    ],
)
def test_sharding_pipelines_and_accumulation_do_not_change_what_is_trained(
    tmp_path: Path, one_rank: list[dict[str, Any]], ranks: int, arguments: str
) -> None:
    records = small_run(tmp_path, "--steps", 6, *arguments.split(), ranks=ranks)
    assert len(records) == len(one_rank)
    for record, expected in zip(records, one_rank, strict=True):
        assert record == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("options", ["", "--dtype fp16 --accumulate 2 --zero-level 1"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, options: str) -> None:
    line = ["--steps", 20, "--checkpoint-every", 10, "--log-every", 5, *options.split()]
    whole = small_run(tmp_path / "whole", *line)
    resumed = small_run(tmp_path / "resumed", *line, "--resume", tmp_path / "whole/checkpoints/step-10")
    assert resumed == [record for record in whole if record["step"] > 10]
    assert_same_checkpoints(tmp_path / "whole/checkpoints/step-20", tmp_path / "resumed/checkpoints/step-20")
    assert (tmp_path / "whole/sample.txt").read_text() == (tmp_path / "resumed/sample.txt").read_text()


def assert_same_checkpoints(first: Path, second: Path) -> None:
    for name in ("model", "optimizer"):
        assert (
            CliRunner().invoke(bmt_program, ["checkpoint", "diff", str(first / name), str(second / name)]).output
            == "Equal.\n"
        )
    values = [torch.load(folder / "training.pt", weights_only=True) for folder in (first, second)]
    assert_equal(*values)


def assert_equal(first: Any, second: Any) -> None:
    """Compare nested values, bit for bit."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    else:
        assert first == second


def test_a_run_that_stopped_goes_on_in_its_directory(tmp_path: Path) -> None:
    line = ["--steps", 6, "--checkpoint-every", 3, "--optimizer", "lion", "--lr", 1e-3]
    whole = small_run(tmp_path, *line)
    (tmp_path / "checkpoints/latest").write_text("step-3\n")  # as if it had stopped after step 3, or later
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "lo')  # killed while it wrote
    assert small_run(tmp_path, *line) == whole
    line[1] = 9
    longer = small_run(tmp_path, *line)
    assert longer[: len(whole)] == whole and longer[-1]["step"] == 9
    assert longer[-2]["lr"] == pytest.approx(1e-3 / 30 * 9)  # of the warm-up, which goes on
    with pytest.raises(RankFailure, match="has 9 steps behind it, more than --steps 6"):
        small_run(tmp_path, "--steps", 6, *line[2:])


@pytest.mark.parametrize("grid", ["--tp 1", "--tp 2", "--pipe 2"])
def test_a_run_goes_on_on_one_rank(tmp_path: Path, grid: str) -> None:
    line = ["--steps", 8, "--checkpoint-every", 4]
    whole = small_run(tmp_path / "whole", *line, *grid.split())
    resumed = small_run(tmp_path / "resumed", *line, "--resume", tmp_path / "whole/checkpoints/step-4", ranks=1)
    assert len(resumed) == 5
    for record, expected in zip(resumed, whole[-5:], strict=True):
        assert record == pytest.approx(expected, rel=1e-3)


def test_resuming_another_run_is_an_error_on_every_rank(tmp_path: Path) -> None:
    whole = small_run(tmp_path / "run", "--steps", 2)
    arguments = ["--steps", 4, "--lr", 0.1]
    for out, more in (("run", []), ("other", ["--resume", tmp_path / "run/checkpoints"])):
        with pytest.raises(RankFailure) as failure:
            small_run(tmp_path / out, *arguments, *more)
        errors = failure.value.errors
        assert len(errors) == 2
        for error in errors.values():
            assert "run: lr was 0.004 and is 0.1" in str(error)
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [
        record["step"] for record in whole
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch-size 12 --accumulate 4", "--batch-size 12 is not a multiple of 2 ranks x --accumulate 4. Try 8."),
        (
            "--tp 2 --accumulate 3",
            "--batch-size 8 is not a multiple of 1 groups of --tp 2 ranks x --accumulate 3. Try 6.",
        ),
        (
            "--pipe 2 --micro-batches 3",
            "--batch-size 8 is not a multiple of 1 groups of --pipe 2 ranks x --micro-batches 3. Try 6.",
        ),
        ("--pipe 2 --layers 1", "1 layers cannot be split into 2 parts."),
        ("--tp 2 --dim 33 --heads 3 --seq-len 15", "--tp 2 must divide --heads 3 and --seq-len 15."),
    ],
)
def test_what_cannot_be_divided_is_an_error_on_every_rank(tmp_path: Path, arguments: str, message: str) -> None:
    with pytest.raises(RankFailure) as failure:
        small_run(tmp_path, *arguments.split())
    errors = failure.value.errors
    assert len(errors) == 2
    for error in errors.values():
        assert message in str(error)


def test_weights_of_an_earlier_run_can_be_the_first(tmp_path: Path) -> None:
    before = small_run(tmp_path / "before", "--steps", 3)
    after = small_run(tmp_path / "after", "--steps", 3, "--init", tmp_path / "before/model.pt", ranks=1)
    assert after[0]["held_out_loss"] == pytest.approx(before[-1]["held_out_loss"], rel=1e-6)


@pytest.mark.parametrize("options", ["--dtype bf16", "--dtype fp16", "--dtype bf16 --tp 2"])
def test_half_precision_learns(tmp_path: Path, one_rank: list[dict[str, Any]], options: str) -> None:
    records = small_run(tmp_path, "--steps", 6, *options.split())
    assert records[-1]["held_out_loss"] == pytest.approx(one_rank[-1]["held_out_loss"], rel=0.02)


def test_a_mistake_ends_in_one_line_and_in_a_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["train.py", *small(tmp_path), "--device=cpu", "--data", str(tmp_path / "missing")]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as ended:
        example.run()
    assert ended.value.code == f"train.py, rank 0: ValueError: There is no file or directory {tmp_path / 'missing'}."
    monkeypatch.setattr(sys, "argv", [*line, "--traceback"])
    with pytest.raises(ValueError, match="no file or directory"):
        example.run()
    assert not bmt.is_initialized()
    monkeypatch.setattr("options.importlib.util.find_spec", lambda package: None)
    monkeypatch.setattr(sys, "argv", [*line, "--log-to", "wandb"])
    with pytest.raises(SystemExit):
        example.run()
    assert "--log-to wandb needs the package wandb" in capsys.readouterr().err


def test_metrics_go_to_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    CALLBACKS["tensorboard"](tmp_path, 2)(3, {"loss": 1.5, "lr": 0.25})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(name, event.step, event.value) for name in ("loss", "lr") for event in events.Scalars(name)] == [
        ("loss", 3, 1.5),
        ("lr", 3, 0.25),
    ]


def test_metrics_go_to_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, which would start a process of its own, is replaced."""
    run = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=run))
    CALLBACKS["wandb"](tmp_path, 2)(3, {"loss": 1.5, "lr": 0.25})
    run.assert_called_once_with(dir=tmp_path)
    run.return_value.log.assert_called_once_with({"loss": 1.5, "lr": 0.25}, step=3)


KILLED = f"""
# train.py, whose rank 1 dies right after the first checkpoint, once.
import os, runpy, signal, sys
import bmtrain as bmt

save_checkpoint = bmt.save_checkpoint

def save_and_die(*arguments, **options):
    path = save_checkpoint(*arguments, **options)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return path

bmt.save_checkpoint = save_and_die
sys.path.insert(0, os.path.dirname({str(TRAIN)!r}))
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""


@pytest.mark.ranks(2)
def test_train_py_under_torchrun_goes_on_after_a_rank_was_killed_and_ends_with_the_line_that_tells_all(
    tmp_path: Path,
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    (tmp_path / "killed.py").write_text(KILLED)
    line = small(tmp_path, "--steps", 12, "--warmup", 2, "--checkpoint-every", 5)
    command = [*launch, str(tmp_path / "killed.py"), *line]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert result.returncode == 0, result.stderr
    *_, last = result.stdout.splitlines()
    found = LAST_LINE.fullmatch(last)
    assert found is not None, last
    steps, first_loss, last_loss, checkpoint = found.groups()
    assert steps == "12"
    assert float(first_loss) == pytest.approx(5.5, abs=0.2)
    assert float(last_loss) < float(first_loss) - 0.5
    assert (Path(checkpoint) / "model" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text().startswith("def ")
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == GPT_KEYS
    assert "going on after step 5, from" in result.stdout
    steps = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("step ")]
    done = [step for step in steps if "/" in step]
    assert done[:5] == [f"{step}/12" for step in range(1, 6)]
    assert done[-7:] == [f"{step}/12" for step in range(6, 13)]


GPT_KEYS = {
    *(f"{part}.weight" for part in ("input_embedding", "position_embedding", "layernorm")),
    "layernorm.bias",
    *(
        f"transformers.{layer}.{part}.{kind}"
        for layer in range(2)
        for part in ("ln_attn", "attn.project_qkv", "attn.project_out", "ln_ff", "ff.w_in", "ff.w_out")
        for kind in ("weight", "bias")
    ),
}


def test_train_py_alone_shows_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TRAIN.read_bytes() * 3)
    command = [sys.executable, str(TRAIN), *small(tmp_path, "--steps", 3, "--data", tmp_path / "text.txt")]
    terminal, its_end = pty.openpty()
    try:
        process = subprocess.Popen(command, stdout=its_end, stderr=its_end, env={**os.environ, "TERM": "xterm"})
        os.close(its_end)
        shown = b""
        # Reading a terminal whose other end was closed fails with EIO.
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 4096):
                shown += part
        assert process.wait(TIME_LIMIT) == 0, shown.decode()
    finally:
        os.close(terminal)
    assert re.search(rb"3/3.*loss .* tokens/s", shown), shown
    *_, last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).strip().splitlines()
    assert LAST_LINE.fullmatch(last), last
