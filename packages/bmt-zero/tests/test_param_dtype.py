"""``param_dtype``: parameters, gradients and optimizers in float32, gathers and computation in
bfloat16. What a training computes is what one process of plain torch computes that casts float32
parameters as part of the graph, on the ranks' parts of a batch one after the other.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from dtype_models import (
    HALF,
    Layer,
    Model,
    Router,
    Tied,
    assert_equal,
    batch,
    built,
    cast_arguments,
    train_plainly,
    train_sharded,
)
from hypothesis import given
from torch import nn
from zero_models import all_weights

from bmt_core import ConfigError
from bmt_core.comm.torch_backend import TorchGroup
from bmt_core.run.runtime import rank, world_size
from bmt_params import DistributedParameter
from bmt_testing import (
    TrainingSettings,
    assert_matches_single,
    on_ranks,
    property_settings,
    training_settings,
)
from bmt_zero import (
    Block,
    BMTrainModelWrapper,
    TransformerBlockList,
    gathered_memory,
    no_sync,
)
from bmt_zero.param_dtype import check_param_dtype, kept_by_hugging_face
from cells import cells

LEVELS = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)]


def loss_of(call: Any, step: int, part: int, parts: int) -> torch.Tensor:
    loss: torch.Tensor = call(batch(step).chunk(parts)[part])
    return loss


def plainly(parts: int, *, keeps_routers: bool = True) -> dict[str, Any]:
    model = built()
    cast_arguments(model.layers)
    routers = {layer.router.weight for layer in model.layers if keeps_routers}
    return train_plainly(model, routers, partial(loss_of, parts=parts), parts)


def sharded(
    levels: tuple[int, ...], recomputes: bool, *, keeps_routers: bool = True, **options: Any
) -> Model:
    model = built(keeps_routers=keeps_routers)
    for layer, level in zip(model.layers, levels, strict=True):
        Block(layer, recomputes, level, param_dtype=HALF, **options)
    return BMTrainModelWrapper(model, param_dtype=HALF)


def trained(model: nn.Module) -> dict[str, Any]:
    return train_sharded(model, partial(loss_of, parts=world_size()), rank())


@on_ranks(1, 2, 4, init={"gradients": "mean"})
@cells("number", range(5))
def test_training_equals_plain_torch_bit_for_bit(number: int, world_size: int) -> None:
    levels = [*LEVELS, (0, 3, 1)][number]
    recomputes = (number + world_size // 2) % 2 == 0  # on two ranks the other way round
    expected, model = plainly(world_size), sharded(levels, recomputes)
    with all_weights:
        found = trained(model)
    assert_equal(found, expected, rank())
    if world_size == 1:
        assert all(v is None or torch.equal(v, expected[name]) for name, v in found.items())
    assert found["gradient 2 layers.0.up.weight"].abs().max() > 1e-3


# Sums over ranks in bfloat16 are off by a rounding of it, and pairs of settings are tried.
TRAININGS = [
    TrainingSettings(ranks=2, levels=(0, 1, 2, 3), recompute=(True, False), micro_batches=2),
    TrainingSettings(ranks=2, levels=(1, 0), micro_batches=3, no_sync=True, prefetch_bytes=0),
    TrainingSettings(ranks=2, levels=(3, 2), frozen=((1, 3), (2,)), gradients="sum", max_norm=0.1),
    TrainingSettings(ranks=2, levels=(3,), reload=True, optimizer="adam", reduce_dtype="fp32"),
    TrainingSettings(ranks=4, shard_size=2, levels=(3, 1, 0), micro_batches=2, no_sync=True),
    TrainingSettings(ranks=4, shard_size=1, levels=(2, 3), reduce_dtype="param", reload=True),
    TrainingSettings(ranks=4, shard_size=2, optimizer_shards="all", levels=(3, 1, 2)),
    TrainingSettings(
        ranks=4, shard_size=2, optimizer_shards="all", levels=(1, 3), micro_batches=3, no_sync=True,
        recompute=(True,), gradients="sum", max_norm=0.1, optimizer="adam",
    ),
    TrainingSettings(ranks=4, levels=(0, 3), reduce_dtype="param", frozen=((2, 5),), seed=1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "dtypes"),
    [*zip(TRAININGS, itertools.cycle([("float64", "float32"), ("float32", "bfloat16")]))],
    ids=str,
)
def test_training_of_any_kind_equals_plain_torch(
    settings: TrainingSettings, dtypes: tuple[Any, Any]
) -> None:
    dtype, param_dtype = dtypes
    drawn = dataclasses.replace(settings, dtype=dtype, param_dtype=param_dtype)
    assert_matches_single(Model, batch, settings=drawn, reference="parts")


@property_settings(6)
@given(
    training_settings(dtypes=("float64",), param_dtypes=("float32",))
    | training_settings(dtypes=("float32",), param_dtypes=("bfloat16",))
)
def test_a_drawn_training_equals_plain_torch(settings: TrainingSettings) -> None:
    assert_matches_single(Tied, batch, settings=settings, reference="parts")


class Net(nn.Module):
    """Layers of one width, nothing of which is kept or tied."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width)
            )
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


# --- what is read in which dtype, and sent in how many bytes ---


@on_ranks(1, 2)
@cells("level", [0, 3])
def test_modules_read_param_dtype_except_those_that_keep_theirs(level: int) -> None:
    model = sharded((level,) * 3, recomputes=True)
    model(batch(0)).backward()
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    names = [name for name, _ in layer.named_parameters() if name != "router.weight"]
    cast = {(name, HALF) for name in [*names, "x", "shift"]}
    assert layer.seen == cast | {("router.weight", torch.float32), ("places", torch.float32)}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert model.head.weight.dtype == torch.float32  # read outside of a forward
    with torch.no_grad():
        torch.testing.assert_close(model(batch(1)), sharded((level,) * 3, False)(batch(1)))


@on_ranks(2)
def test_gathers_and_reductions_have_half_of_the_bytes() -> None:
    sent: list[int] = []

    def bytes_of_a_step(param_dtype: torch.dtype | None) -> tuple[int, int]:
        model = BMTrainModelWrapper(Net(512), param_dtype=param_dtype)
        sent.clear()
        gathered_memory.reset_peak()
        model(torch.ones(1, 512)).backward()
        return sum(sent), gathered_memory.peak

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter"):
            own = getattr(TorchGroup, name)

            def noted(self: Any, output: Any, input: Any, *op: Any, own: Any = own) -> Any:
                sent.append(input.nbytes)
                return own(self, output, input, *op)

            patch.setattr(TorchGroup, name, noted)
        whole, half = map(bytes_of_a_step, (None, HALF))
    # Small parameters are filled up to 512 bytes in both dtypes.
    assert all(0.5 * a <= b < 0.52 * a for a, b in zip(whole, half, strict=True))


@on_ranks(2)
def test_no_block_keeps_more_than_its_part() -> None:
    model = sharded((3, 3, 3), recomputes=True)
    model(batch(0)).backward()
    assert gathered_memory.current == 0


# --- models that change, are copied, saved and loaded ---


class Added(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.side = inner, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) + self.side(x)
        return y


@on_ranks(2)
def test_what_is_added_to_a_block_is_cast_too() -> None:
    torch.manual_seed(0)
    block: Any = Block(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), param_dtype=HALF)
    block(torch.ones(2, 6))
    block[0] = Added(block[0])
    kept = block[1].side = Router()
    kept.param_dtype = torch.float32  # type: ignore[assignment]
    block(torch.ones(2, 6)).sum().backward()
    dtypes = {name: parameter._compute_dtype for name, parameter in block.named_parameters()}
    assert dtypes.pop("1.side.weight") == torch.float32
    assert set(dtypes.values()) == {HALF} and "0.side.weight" in dtypes
    assert all(p.dtype == torch.float32 for p in block.parameters())


@on_ranks(2, init={"gradients": "mean"})
def test_a_copy_trains_as_the_model_itself() -> None:
    model = sharded((3, 1, 0), recomputes=True)
    model(batch(5)).backward()
    model.zero_grad()
    copied = copy.deepcopy(model)
    found, expected = trained(copied), trained(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_equal(found, plainly(2), rank())


@on_ranks(2)
def test_values_are_saved_and_loaded_in_their_own_dtype() -> None:
    model = sharded((3, 1, 0), recomputes=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(before, built().state_dict(), rtol=0, atol=0)
    model(batch(0))
    model.load_state_dict({name: value + 2**-20 for name, value in before.items()})
    after = model.state_dict()
    assert all(torch.equal(after[name], value + 2**-20) for name, value in before.items())
    other = built()
    other.load_state_dict(after)
    cast_arguments(other.layers)
    expected = torch.func.functional_call(
        other,
        {n: p if "router" in n else p.to(HALF) for n, p in other.named_parameters()},
        batch(1),
    )
    torch.testing.assert_close(model(batch(1)), expected)


@on_ranks(2)
def test_gradients_held_back_and_taken_by_hooks_or_returned_are_float32() -> None:
    model = sharded((1, 1, 1), recomputes=False)
    with no_sync(model):
        model(batch(0)).backward()
    model(batch(1)).backward()
    weight: Any = model.layers[0].up.weight  # type: ignore[union-attr]
    held, seen = weight.grad.clone(), []
    model.zero_grad()
    for seed in (0, 1):
        model(batch(seed)).backward()
    torch.testing.assert_close(weight.grad, held, rtol=1e-6, atol=1e-7)
    model.zero_grad()
    (returned,) = torch.autograd.grad(model(batch(0)), [weight])
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    model(batch(0)).backward()
    assert returned.dtype == seen[0].dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(seen[0], returned, rtol=0, atol=0)
    torch.testing.assert_close(weight.grad, returned, rtol=0, atol=0)


# --- models of other dtypes, and mistakes ---


@on_ranks(2, init={"gradients": "mean"})
def test_a_block_that_casts_nothing_leaves_its_arguments() -> None:
    seen: list[torch.dtype] = []
    for layer in (nn.Linear(6, 6).to(HALF), nn.Linear(6, 6)):
        if layer.weight.dtype == torch.float32:
            layer.param_dtype = torch.float32  # type: ignore[assignment]
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        block = Block(layer, param_dtype=HALF)
        with suppress(RuntimeError):  # of torch, for float32 and a weight of bfloat16
            block(torch.ones(2, 6))
    assert seen == [torch.float32] * 2


@on_ranks(1)
def test_mistakes_are_said() -> None:
    for wrong in (torch.int32, torch.float8_e4m3fn, "bfloat16", torch.complex64):
        with pytest.raises(ConfigError, match="param_dtype is the dtype in which parameters"):
            Block(nn.Linear(2, 2), param_dtype=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="param_dtype is the dtype in which parameters"):
            BMTrainModelWrapper(nn.Linear(2, 2), param_dtype=wrong)  # type: ignore[arg-type]
    assert check_param_dtype(torch.float64) == torch.float64
    for own in (None, torch.float16):
        model = nn.Sequential(nn.Linear(2, 2), Block(nn.Linear(2, 2), param_dtype=own))
        with pytest.raises(ConfigError, match=rf"1 is a Block with param_dtype={own}, and the"):
            BMTrainModelWrapper(model, param_dtype=HALF)
        with pytest.raises(ConfigError, match=rf"param_dtype={own}, and this list has"):
            TransformerBlockList(
                [Block(nn.Linear(2, 2), param_dtype=own), nn.Linear(2, 2)], param_dtype=HALF
            )
    listed = TransformerBlockList([nn.Linear(2, 2), nn.Linear(2, 2)], param_dtype=HALF)
    assert listed(torch.ones(1, 2)).dtype == HALF


@on_ranks(1)
def test_what_a_model_of_hugging_face_names_keeps_its_dtype() -> None:
    model: Any = Model()
    model._keep_in_fp32_modules = ["router"]
    model._keep_in_fp32_modules_strict = {"up.wei*", "layers.*.norm.bias"}
    kept = {name for _, name in kept_by_hugging_face(model)}
    named = ("router.weight", "up.weight", "norm.bias")
    assert kept == {f"layers.{i}.{name}" for i in range(3) for name in named}
    made = copy.deepcopy(model)
    Block(made.layers[1], param_dtype=HALF)
    with pytest.raises(ConfigError, match=r"layers.1.\w+.\w+ stays torch.float32 by _keep_in_fp32"):
        BMTrainModelWrapper(made, param_dtype=HALF)
    BMTrainModelWrapper(model, param_dtype=HALF)
    read = {name: p._compute_dtype for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert {name for name, dtype in read.items() if dtype == torch.float32} == kept
    assert all(isinstance(p, DistributedParameter) for p in model.parameters())
