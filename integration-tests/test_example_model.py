"""The example's GPT against the same GPT in plain torch; its evaluation and its text on any number
of ranks.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import bmtrain as bmt
from bmt_params import DistributedParameter
from bmt_testing import run_ranks
from bmtrain._program import main
from evaluation import Evaluation
from generation import generate
from models import GPT
from windows import Windows

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
# With Adam's usual eps, an element whose gradient is zero but for rounding (the bias of the keys)
# still moves by the learning rate.
EPS = 1e-4


class PlainBlock(nn.Module):
    """Attention spelled out, as the definition has it."""

    def __init__(self, dim: int, heads: int, dim_head: int, dim_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_attn = nn.LayerNorm(dim)
        self.attn = nn.ModuleDict(
            {
                "project_qkv": nn.Linear(dim, 3 * heads * dim_head),
                "project_out": nn.Linear(heads * dim_head, dim),
            }
        )
        self.ln_ff = nn.LayerNorm(dim)
        self.ff = nn.ModuleDict({"w_in": nn.Linear(dim, dim_ff), "w_out": nn.Linear(dim_ff, dim)})

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        heads = []
        query, key, value = self.attn["project_qkv"](self.ln_attn(hidden)).chunk(3, dim=-1)
        for q, k, v in zip(
            *(each.chunk(self.heads, dim=-1) for each in (query, key, value)), strict=True
        ):
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
            PlainBlock(dim, SIZES["num_heads"], SIZES["dim_head"], SIZES["dim_ff"])
            for _ in range(SIZES["num_layers"])
        )
        self.layernorm = nn.LayerNorm(dim)
        torch.manual_seed(3)
        for name, parameter in self.named_parameters():
            if "embedding" in name:
                nn.init.normal_(parameter, std=0.05)
            elif parameter.dim() == 2:
                nn.init.xavier_normal_(parameter, gain=0.2 if "out" in name else 1.0)
            else:
                nn.init.constant_(
                    parameter, 1.0 if re.search(r"(ln_\w+|layernorm)\.weight", name) else 0.0
                )

    def forward(
        self, input_ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        visible = torch.zeros(len(input_ids), length, length, dtype=torch.bool)
        for row in range(len(input_ids)):
            for reader in range(length):
                for read in range(length):
                    is_before = pos[row, read] <= pos[row, reader] and mask[row, read]
                    visible[row, reader, read] = is_before or reader == read
        visible = visible.to(input_ids.device)
        hidden = self.input_embedding(input_ids) + self.position_embedding(pos)
        for block in self.transformers:
            hidden = block(hidden, visible)
        logits: torch.Tensor = self.layernorm(hidden) @ self.input_embedding.weight.T
        return logits


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, positions, mask and targets of the global batch; sequences of several
    lengths, padded.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH + 1), generator=generator)
    lengths = torch.randint(4, LENGTH + 1, (BATCH, 1), generator=generator)
    pos = torch.arange(LENGTH).expand(BATCH, -1)
    mask = pos < lengths
    return tokens[:, :-1], pos, mask, tokens[:, 1:].masked_fill(~mask, -100)


class Trace(dict[str, Any]):
    """What a training run went through: initial values, and per step loss, norm and gradients;
    final values.
    """


def plain_trace() -> Trace:
    model = PlainGPT()
    trace = Trace(
        initial={name: value.clone() for name, value in model.state_dict().items()}, steps=[]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=EPS)
    for step in range(STEPS):
        inputs, pos, mask, targets = batch_of(step)
        logits = model(inputs, pos, mask)
        loss = (
            nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            / inputs.numel()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        trace["steps"].append((loss.item(), norm.item(), gradients))
    trace["final"] = model.state_dict()
    return trace


def sharded_trace(zero_level: int, use_checkpoint: bool, num_micro_batches: int) -> Trace:
    model = GPT(**SIZES, dtype=torch.float32, use_checkpoint=use_checkpoint, zero_level=zero_level)
    torch.manual_seed(3)
    bmt.init_parameters(model)
    trace = Trace(
        initial={name: value.clone() for name, value in model.state_dict().items()}, steps=[]
    )
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
                loss = (
                    loss_func(model(inputs, pos, mask).flatten(0, 1), targets.flatten())
                    / own[0].numel()
                )
                manager.backward(loss)
            total += loss.detach()
        gradients = {
            name: gathered_gradient(parameter) for name, parameter in model.named_parameters()
        }
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
        (2, 1, 1, True, 2),
        (2, 1, 0, False, 4),
        (2, 2, 2, False, 1),
        (4, 1, 3, False, 2),
        (4, 2, 3, True, 2),
    ],
)
def test_gpt_trains_as_in_plain_torch(
    plain: Trace,
    world_size: int,
    tp_size: int,
    zero_level: int,
    use_checkpoint: bool,
    num_micro_batches: int,
) -> None:
    init = {"tp_size": tp_size}
    traces = run_ranks(
        sharded_trace, world_size, zero_level, use_checkpoint, num_micro_batches, init=init
    )
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
        assert {
            name: value for name, value in values.items() if not torch.equal(value, expected[name])
        } == {}


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


# --- evaluation and generation ---


def evaluation_and_sample(num_windows: int) -> tuple[float, bytes]:
    model = GPT(**{**SIZES, "vocab_size": 256}, dtype=torch.float32)
    bmt.init_parameters(model)
    text = torch.randint(
        256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    evaluate = Evaluation(Windows(text, LENGTH), num_windows)
    assert evaluate(model) == evaluate(model)
    # Cold, so that the logits and not the random numbers decide.
    return evaluate(model), generate(model, b"ab", length=20, context=LENGTH, temperature=0.05)


def test_evaluation_and_sample_are_identical_on_any_number_of_ranks() -> None:
    # 150 windows are 5 batches, the last one smaller: on 4 ranks three have none left in the
    # second round.
    results = [
        result for ranks in (1, 2, 4) for result in run_ranks(evaluation_and_sample, ranks, 150)
    ]
    assert len(set(results)) == 1
    loss, sample = results[0]
    assert loss == pytest.approx(5.5, abs=0.3)
    assert sample.startswith(b"ab")
    assert len(sample) == 22
    along_tp = [
        result
        for ranks in (2, 4)
        for result in run_ranks(evaluation_and_sample, ranks, 150, init={"tp_size": 2})
    ]
    assert len(set(along_tp)) == 1
    assert along_tp[0] == (pytest.approx(loss, rel=1e-6), sample)
    assert set(run_ranks(evaluation_and_sample, 4, 150, init={"pipe_size": 2})) == {results[0]}


def test_drawn_trainings_match() -> None:
    names = ["--loss", "next_token_loss", "--parallelize", "as_example"]
    sizes = ["--world", "2", "--examples", "3", "--steps", "2"]
    command = ["verify", "verified_example:PlainGPT", *names, *sizes]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
