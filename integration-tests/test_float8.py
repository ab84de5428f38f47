"""Layers of torchao that compute in float8, in Blocks: as in one process of plain torch with the
same layers.

Parameters are in float64 where trainings of several steps are compared: sums in another order then
differ by less than what changes the rounding to float8, which one unit of float32 may do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="float8 layers are torchao's")

import bmt_recording
import float8_models as models
from compile_models import CompiledGpt, Training, from_new, gpt, graphs, result
from float8_models import (
    WIDTH,
    Gpt,
    Layer,
    batch,
    gathered,
    in_float8,
    rowwise,
    tensorwise,
    tied,
    tied_gathered,
)
from float8_trainings import check_tied, trained_in_runs

import bmtrain as bmt
from bmt_core.errors import ConfigError
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks, run_ranks
from bmt_tp import Column, Plan, Row, parallelize
from bmt_zero import Block, BMTrainModelWrapper
from bmt_zero.float8_gathers import unwrap_float8_weights
from cells import cells

ALL_LEVELS = (0, 1, 2, 3)
RECORDING = {"comm_backend": "recording"}
LONG = TrainingSettings(
    ranks=2,
    levels=ALL_LEVELS,
    recompute=(False, True, True),
    micro_batches=3,
    no_sync=True,
    optimizer="adam",
    reload=True,
)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (
            tensorwise,
            TrainingSettings(
                ranks=4, levels=ALL_LEVELS, recompute=(True, False), gradients="sum", max_norm=0.5
            ),
        ),
        (tied, LONG),
        (tied, TrainingSettings(ranks=2, levels=(3,), frozen=((1, 3), (2,)))),
        (rowwise, TrainingSettings(ranks=2, levels=ALL_LEVELS, recompute=(True, False))),
        (
            models.rowwise_with_gw_hp,
            TrainingSettings(ranks=2, levels=ALL_LEVELS, recompute=(True, False)),
        ),
        (gathered, TrainingSettings(levels=ALL_LEVELS)),
        (gathered, TrainingSettings(ranks=4, levels=(3, 2, 1, 3), gradients="sum", max_norm=0.5)),
        (tied_gathered, LONG),
        (gathered, TrainingSettings(ranks=2, levels=(3,), frozen=((1, 3), (2,)))),
        (
            gathered,
            TrainingSettings(
                ranks=4,
                shard_size=2,
                optimizer_shards="all",
                levels=(3, 1),
                recompute=(True, False),
            ),
        ),
        (gathered, TrainingSettings(ranks=2, levels=(3, 1), dtype="bfloat16")),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_training_equals_plain_torch_with_the_same_layers(
    model: Callable[[], Gpt], settings: TrainingSettings
) -> None:
    # Scales are those of a rank's own rows.
    assert_matches_single(model, batch, settings=settings, reference="parts")


@pytest.mark.parametrize(("model", "ranks"), [(tensorwise, 2), (gathered, 4)])
def test_stages_of_a_pipeline_train_like_plain_torch(model: Callable[[], Gpt], ranks: int) -> None:
    settings = TrainingSettings(ranks=ranks, axes={"pp": 2}, levels=(3,), recompute=(True, False))
    assert_matches_single(model, batch, settings=settings, pipeline="layers", reference="parts")


def values_of_training(level: int | None, recomputes: bool) -> dict[str, Any]:
    """Train a GPT in float8: compiled Blocks of ``level``, or plain torch for None."""
    with from_new("aot_eager") as kind:
        model = gpt(2, kind=kind, dtype=torch.float64)
        in_float8(model.layers)
        sharded = model if level is None else CompiledGpt(model, level, recomputes)
        values = result(Training(sharded, partial(torch.optim.SGD, lr=0.3)), 3)
        assert graphs() == (0 if level is None else 1)
    return values


@on_ranks(1, timeout=120)
@pytest.mark.parametrize(
    "recomputes", [pytest.param(False, marks=pytest.mark.slow("bmt-zero")), True]
)
def test_compiled_blocks_train_like_plain_torch_and_all_share_a_graph(recomputes: bool) -> None:
    expected = values_of_training(None, recomputes)
    for level in (1, 3):
        found = values_of_training(level, recomputes)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


# --- what is sent and kept ---


@on_ranks(2, init=RECORDING)
def test_ranks_send_what_they_send_without_float8() -> None:
    calls = []
    for converted in (True, False):
        torch.manual_seed(0)
        model = Gpt().bfloat16()
        if converted:
            in_float8(model.layers)
        BMTrainModelWrapper(model)
        bmt_recording.clear()
        model(batch(0)).backward()
        calls.append(list(bmt_recording.calls))
    assert calls[0] == calls[1] and torch.bfloat16 in {call.dtype for call in calls[1]}


@on_ranks(2)
@cells("recipe, groups", [("tensorwise", 1), ("gathered", 2)])
def test_level_3_keeps_no_whole_weights_for_backward(recipe: str, groups: int) -> None:
    """Float8 layers save their weight, which is gathered again."""
    layers = [
        Block(in_float8(Layer(), recipe), use_checkpoint=False, zero_level=3) for _ in range(6)
    ]
    bmt.TransformerBlockList(layers)
    buffers = [group.buffer for block in layers for group in block._bmt_block.state.groups]
    assert len(buffers) == 6 * groups
    x = torch.ones(16, WIDTH, requires_grad=True)
    for block in layers:
        x = block(x)
    present = [buffer.tensor.untyped_storage().nbytes() > 0 for buffer in buffers]
    assert not any(present[: -2 * groups])
    x.sum().backward()
    assert all(p.grad is not None for block in layers for p in block.parameters())


# --- gathers in float8 ---


def trained_blocks(
    recipe: str, level: int, recomputes: bool, compile: bool, dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor], bool]:
    """Train Blocks; return the losses, the weights, and whether weights were gathered in float8."""
    torch.manual_seed(0)
    layers = [in_float8(Layer(tied=n == 1).to(dtype), recipe) for n in range(3)]
    model = bmt.TransformerBlockList(
        [
            Block(each, use_checkpoint=recomputes, zero_level=level, compile=compile)
            for each in layers
        ]
    )
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
    losses = []
    for step in range(4):
        for _ in range(2):
            x = torch.randn(
                8, WIDTH, generator=torch.Generator().manual_seed(2 * step + bmt.rank())
            )
            loss = model(x.to(dtype)).square().mean()
            manager.backward(loss)
            losses.append(loss.item())
        manager.step()
        manager.zero_grad()
    groups = [group for block in model for group in block._bmt_block.state.groups]
    return losses, model.state_dict(), True in [g.buffer.tensor.itemsize == 1 for g in groups]


def check_bits(*settings: Any) -> None:
    with from_new("aot_eager"):
        losses, weights, are_gathered = trained_blocks("gathered", *settings)
        expected, expected_weights, _ = trained_blocks("tensorwise", *settings)
    assert are_gathered and losses == expected
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("level", "recomputes", "compile", "dtype"),
    [
        (1, False, False, torch.bfloat16),
        (2, True, False, torch.float32),
        (3, False, False, torch.float64),
        (3, True, False, torch.float32),
        # A compiled Block gathers as others do.
        pytest.param(3, True, True, torch.bfloat16, marks=pytest.mark.slow("bmt-zero")),
    ],
)
def test_gathered_weights_are_to_the_bit_those_that_a_layer_rounds_itself(
    level: int, recomputes: bool, compile: bool, dtype: torch.dtype
) -> None:
    # Of two ranks, because sums of more depend on how tensors are grouped.
    run_ranks(check_bits, 2, level, recomputes, compile, dtype, timeout=120)


def calls_of_two_steps(recipe: str) -> list[tuple[str, torch.dtype, int]]:
    """Return the gathers and all-reduces of a Block in two steps, and their bytes."""
    block = Block(in_float8(Layer().bfloat16(), recipe), zero_level=3)
    optimizer = bmt.optim.AdamOptimizer(block.parameters(), lr=1e-2)
    for step in range(3):
        if step == 1:
            bmt_recording.clear()
        block(torch.ones(8, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kinds = ("all_gather", "all_reduce")
    return [(each.op, each.dtype, each.bytes) for each in bmt_recording.calls if each.op in kinds]


@on_ranks(2, init={**RECORDING, "gradients": "mean"})
def test_ranks_send_half_of_the_bytes_and_agree_on_scales_once_per_step() -> None:
    without, found = calls_of_two_steps("tensorwise"), calls_of_two_steps("gathered")
    weights, others = 3 * 2 * WIDTH * WIDTH, 4 * 512  # four vectors, aligned
    assert {*without} == {("all_gather", torch.bfloat16, 2 * weights + others)}
    in_float8 = "all_gather", torch.float8_e4m3fn, weights
    rest = "all_gather", torch.bfloat16, others
    agreement = "all_reduce", torch.bfloat16, 3 * 2
    assert Counter(found) == {in_float8: len(without), rest: len(without), agreement: 2}


@on_ranks(2)
def test_weights_that_another_layer_uses_are_gathered_as_they_are() -> None:
    layer = Layer()
    in_float8(layer, "gathered")
    layer.norm = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    layer.norm.weight = layer.up.weight._tensor
    block = Block(layer, zero_level=3)
    dtypes = {
        name: group.buffer.tensor.dtype
        for group in block._bmt_block.state.groups
        for name in [parameter.label for parameter in group.parameters]
    }
    assert dtypes["down.weight"] == dtypes["gate.weight"] == torch.float8_e4m3fn
    assert dtypes["norm.weight"] == torch.float32 and block.up.weight is block.norm.weight


@on_ranks(2)
def test_a_weight_whose_layer_is_replaced_is_gathered_as_it_is() -> None:
    block = Block(in_float8(Layer(), "gathered"), zero_level=3)
    x = torch.ones(8, WIDTH)
    block(x)
    plain = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    plain.weight = block.gate.weight
    block.gate = plain
    block(x).sum().backward()
    dtypes = [group.buffer.tensor.dtype for group in block._bmt_block.state.groups]
    assert sorted(map(str, dtypes)) == ["torch.float32", "torch.float32", "torch.float8_e4m3fn"]
    assert all(p.grad is not None for p in block.parameters())


@on_ranks(2)
def test_weights_that_were_first_gathered_in_inference_mode_train() -> None:
    block = Block(in_float8(Layer(), "gathered"), zero_level=3)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    x = torch.ones(8, WIDTH)
    with torch.inference_mode():
        outputs = [block(x)]
    for _ in range(2):
        outputs.append(block(x))
        outputs[-1].sum().backward()
        optimizer.step()
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_a_weight_that_was_frozen_before_or_after_conversion_stays_frozen() -> None:
    for first in (True, False):
        layer = Layer(tied=True)
        if first:
            layer.up.weight.requires_grad_(False)
        in_float8(layer, "gathered")
        if not first:
            layer.up.weight._tensor.requires_grad_(False)
        unwrap_float8_weights(layer.modules())
        assert not layer.up.weight.requires_grad and layer.down.weight.requires_grad
        assert layer.gate.weight is layer.up.weight


# --- checkpoints ---


@pytest.mark.parametrize("recipe", ["tensorwise", "gathered"])
def test_a_training_goes_on_on_any_number_of_ranks(recipe: str, tmp_path: Path) -> None:
    settings = (recipe, torch.float64, "cpu")
    expected, values = trained_in_runs(tmp_path / "whole", [(1, 6)], *settings)
    losses, found = trained_in_runs(tmp_path / "parts", [(2, 2), (4, 2), (1, 2)], *settings)
    assert losses == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-6)


def test_weights_are_saved_as_those_of_the_model_without_float8(tmp_path: Path) -> None:
    trained_in_runs(tmp_path, [(2, 2)], "tensorwise", torch.float64, "cpu")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    plain = Gpt().double()
    plain.load_state_dict(saved)
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    assert {value.dtype for value in saved.values()} == {torch.float64}
    converted = tensorwise().double()
    converted.load_state_dict(saved)
    losses = [model(batch(9)).item() for model in (converted, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05) and losses[0] != losses[1]


# --- in bfloat16, as on GPUs ---


@pytest.mark.parametrize("recipe", ["tensorwise", "gathered"])
def test_bfloat16_layers_with_tied_weights_train_like_plain_torch(recipe: str) -> None:
    run_ranks(check_tied, 2, recipe)


# --- what is refused ---


class PlanLayer(nn.Module):
    """A feed-forward layer that a plan splits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


@on_ranks(2, init={"tp_size": 2})
def test_layers_that_tensor_parallelism_splits_are_refused_in_both_orders() -> None:
    plan = Plan(
        parameters={"*.up": Column(gather="sequence_first"), "*.down": Row(input="sequence_first")},
        layers="*",
        last="1.norm",
    )
    layers = [nn.Sequential(PlanLayer(), PlanLayer()) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"is a style of nn\.Linear"):
        parallelize(in_float8(layers[0]), plan)
    split = parallelize(layers[1], plan)
    with pytest.raises(ConfigError, match=r"was given a copy .* as its own 'weight'"):
        in_float8(split)
