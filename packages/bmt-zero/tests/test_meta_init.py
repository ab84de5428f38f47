"""Models built on the meta device become sharded, initialised block by block, and train as
any other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_models import (
    Layer,
    MemoryMeter,
    Model,
    Scale,
    kept_bytes,
    whole_bytes,
    without_sums_of_first_values,
)
from torch import nn
from zero_models import adam, batch, loss_of, my_part, of_all_ranks, train

from bmt_checkpoint import load, save
from bmt_core import ConfigError
from bmt_core.run.runtime import rank
from bmt_params import DistributedModule, DistributedParameter
from bmt_params.init.parameter_init import ParameterInitializer, init_parameters
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList
from cells import cells


def freeze(model: nn.Module, beginnings: tuple[str, ...]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(beginnings))
    return model


FROZEN = ("embedding", "layers.0", "layers.1.up.bias", "layers.2.norm", "norm.weight")

# By the number of ranks: how the model is wrapped, the levels of its Blocks, whether they
# recompute, and what is frozen.
WAYS: dict[int, list[tuple[str, tuple[int, ...], bool, tuple[str, ...]]]] = {
    1: [("wrapper", (3, 3, 3), True, ()), ("blocks", (0, 3, 0), False, FROZEN)],
    2: [
        ("wrapper", (3, 2, 1), True, ()),
        ("inside", (3, 3, 2), False, ()),
        ("wrapper", (3, 1, 2), False, FROZEN),
        ("blocks", (0, 0, 0), True, ()),
        ("blocks", (0, 3, 3), True, FROZEN),
    ],
    4: [
        ("parameters", (1, 3, 3), False, ()),
        ("inside", (3, 3, 3), True, FROZEN),
        ("blocks", (3, 0, 2), False, ()),
    ],
}


@on_ranks(1, 2, 4)
def test_training_equals_plain_torch(world_size: int) -> None:
    """The optimizer is built while the parameters are on the meta device, and goes on
    holding them.
    """
    for way, levels, use_checkpoint, frozen in WAYS[world_size]:
        ties = way != "blocks"  # Blocks made one by one share no parameters
        torch.manual_seed(0)
        expected = train(freeze(Model(ties=ties), frozen), 3, lambda part: part, optimizer=adam)
        torch.manual_seed(0)
        with torch.device("meta"):
            model: Any = freeze(Model(ties=ties), frozen)
            optimizer = adam(model.parameters())
            if way == "inside":
                BMTrainModelWrapper(model)
        if way == "blocks":
            for layer, level in zip(model.layers, levels, strict=True):
                Block(layer, use_checkpoint, level)
        if way in ("wrapper", "blocks"):
            BMTrainModelWrapper(model)
        if way == "parameters":
            BMTrainModelWrapper(model, init=False)
            init_parameters(model)
        for layer, level in zip(model.layers, levels, strict=True):
            assert isinstance(layer, Block)
            layer._zero_level, layer._use_checkpoint = level, use_checkpoint
        assert not any(p.is_meta for p in (*model.parameters(), *model.buffers())), way
        found = train(model, 3, my_part, optimizer=lambda parameters, made=optimizer: made)
        found["loss"] = sum(of_all_ranks(found["loss"]))
        what = f"{way} {levels} use_checkpoint={use_checkpoint} {frozen}"
        torch.testing.assert_close(found, expected, msg=lambda text, what=what: f"{what}: {text}")


class Torch(nn.Module):
    """Modules of torch that write to the parameters of others, keep weak references to their own,
    have running statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=1)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 3), nn.BatchNorm1d(3)]
        )
        self.attention = nn.MultiheadAttention(4, 2)
        self.bilinear = nn.Bilinear(2, 3, 4, dtype=torch.bfloat16)
        self.convolution = nn.Conv1d(2, 3, 3)


@on_ranks(4)
@cells("kind", [Model, Torch])
def test_values_are_those_of_construction_in_one_process(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    plain = kind()
    expected = {**plain.state_dict(), **dict(plain.named_buffers())}, torch.rand(2)
    torch.manual_seed(3)
    with torch.device("meta"):
        model = kind()
    BMTrainModelWrapper(model)
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    found = {**model.state_dict(), **dict(model.named_buffers())}, torch.rand(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class SharedTable(nn.Module):
    """A buffer that two blocks and the model itself hold, computed by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scale(), Scale()])
        self.register_buffer("table", torch.empty(4), persistent=False)
        for layer in self.layers:
            layer.register_buffer("table", self.table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4))


@on_ranks(2)
def test_a_buffer_that_several_blocks_hold_stays_one() -> None:
    with torch.device("meta"):
        model = SharedTable()
    BMTrainModelWrapper(model)
    holders: list[Any] = [model, *model.layers]
    assert all(isinstance(layer, Block) for layer in model.layers)
    assert len({id(holder.table) for holder in holders}) == 1
    assert model.table.tolist() == [0.0, 1.0, 2.0, 3.0]


def update_in_backward(model: nn.Module) -> None:
    """Step each parameter as soon as its gradient is there; those hooks must outlive the
    meta device.
    """

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@on_ranks(2)
def test_hooks_registered_on_the_meta_device_run() -> None:
    torch.manual_seed(5)
    plain = Model()
    update_in_backward(plain)
    torch.manual_seed(5)
    with torch.device("meta"):
        model = Model()
        update_in_backward(model)
    BMTrainModelWrapper(model)
    tokens, targets = batch(0)
    loss_of(plain(tokens), targets).backward()
    loss_of(model(my_part(tokens)), my_part(targets)).backward()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def whole_model(module: nn.Module) -> None:
    """Initialise everything at once, as a model with one loop over ``parameters()`` does."""
    if isinstance(module, Model):
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
    elif isinstance(module, Scale):
        module.reset_parameters()


WAYS_TO_FILL: list[bool | Callable[[nn.Module], None]] = [True, False, whole_model]


@on_ranks(4)
@cells("init", WAYS_TO_FILL)
def test_one_block_is_whole_at_a_time(init: bool | Callable[[nn.Module], None]) -> None:
    with without_sums_of_first_values(), MemoryMeter() as meter:
        with torch.device("meta"):
            model = Model(6, 64, 256)
        BMTrainModelWrapper(model, init=init)
    block, kept = max(whole_bytes(layer) for layer in model.layers), kept_bytes(model)
    assert meter.current >= kept and whole_bytes(model) > 5 * block
    assert meter.peak - kept < 1.1 * block
    assert not init or meter.peak - kept > 0.9 * block  # the meter sees what it should


@on_ranks(2)
def test_a_function_has_the_last_word_as_if_applied_after_construction() -> None:
    torch.manual_seed(4)
    plain = Model()
    plain.apply(whole_model)
    torch.manual_seed(4)
    with torch.device("meta"):
        model = BMTrainModelWrapper(Model(), init=whole_model)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


class Scaled(Model):
    """As older GPT-2 models: what matters is drawn again in a loop over the names inside, of one
    module and of all.
    """

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.1)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        for name, parameter in module.named_parameters():
            if name.endswith("down.weight"):
                parameter.data.normal_(std=0.01)


@on_ranks(4)
def test_init_weights_may_reach_into_blocks_by_name() -> None:
    plain = Scaled(ties=False)
    torch.manual_seed(4)
    plain.apply(plain._init_weights)
    expected = dict(plain.state_dict()), torch.rand(2)
    with torch.device("meta"):
        model = Scaled(ties=False)
    torch.manual_seed(4)
    found = dict(BMTrainModelWrapper(model).state_dict()), torch.rand(2)
    for state, _ in (found, expected):  # apply() draws the tied weight twice and keeps the second
        state.pop("embedding.weight"), state.pop("head.weight")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def all_at_once(module: nn.Module) -> None:
    if isinstance(module, Model):
        for parameter in list(module.parameters()):
            nn.init.uniform_(parameter)


def all_data_at_once(module: nn.Module) -> None:
    if isinstance(module, Model):
        for data in [parameter.data for parameter in module.parameters()]:
            data.uniform_()


def copied_outside(module: nn.Module) -> None:
    """Initialise one parameter outside of blocks from another one: both are whole."""
    if isinstance(module, Model):
        module.norm.weight.copy_(module.embedding.weight.mean(0))


@on_ranks(2)
@cells(
    ("init", "said"),
    [
        (all_at_once, r"^Initialisation wrote to a parameter, by Model, when it was not whole\."),
        (
            all_data_at_once,
            r"^Initialisation wrote to layers\.0\.norm\.weight, layers\.0\.norm\.bias, ",
        ),
    ],
)
def test_a_write_to_a_block_that_is_not_whole_any_more_raises(
    init: Callable[[nn.Module], None], said: str
) -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ConfigError, match=said):
        BMTrainModelWrapper(model, init=init)
    assert all(parameter.dim() == 1 for parameter in model.parameters())


@on_ranks(2)
def test_parameters_outside_of_blocks_are_whole_together() -> None:
    with torch.device("meta"):
        model = BMTrainModelWrapper(Model(), init=copied_outside)
    torch.testing.assert_close(model.norm.weight, model.embedding.weight.mean(0))


class Unlucky(nn.Module):
    """Fails at first."""

    failures = 1

    def reset_parameters(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ValueError("no luck")
        self.factor.fill_(2.0)


@on_ranks(2)
def test_what_a_failing_initialisation_had_drawn_is_drawn_again() -> None:
    with torch.device("meta"):
        inner = nn.Sequential(nn.Linear(4, 3), Unlucky())
        inner[1].register_buffer("factor", torch.empty(2))
        block = Block(inner)
    with pytest.raises(ValueError, match="no luck"):
        init_parameters(block)
    torch.manual_seed(9)
    init_parameters(block)
    torch.manual_seed(9)
    expected = {f"0.{name}": value for name, value in nn.Linear(4, 3).state_dict().items()}
    expected["1.factor"] = torch.full((2,), 2.0)
    torch.testing.assert_close(dict(block.state_dict()), expected, rtol=0, atol=0)


class Lost(nn.Module):
    """What __init__ computes is lost on the meta device, and nothing here computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("rotation", torch.arange(4.0), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x * self.gain * self.rotation * self.mask
        return out


class Losing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Lost()])
        self.last = Lost()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.last(x)
        return out


@on_ranks(4)
def test_what_would_have_no_values_is_named_when_wrapping_and_at_the_first_use() -> None:
    with pytest.raises(ConfigError) as caught, torch.device("meta"):
        BMTrainModelWrapper(Losing())
    said = str(caught.value)
    assert said.startswith(
        "Parameters layers.1.gain, last.gain and buffers layers.1.rotation, layers.1.mask,"
        " last.rotation, last.mask have no values after initialisation."
    )
    assert "reset_parameters()" in said and "init=False" in said
    with torch.device("meta"):
        model = BMTrainModelWrapper(Losing(), init=False)
    for module, beginning in (
        (
            model,
            (
                r"Parameters layers\.0\.weight, layers\.0\.bias, layers\.1\.gain, last\.gain"
                r" and buffers"
            ),
        ),
        (model.layers[0], "Parameters weight, bias of Linear have no values"),
        (model.layers[1], "Parameters gain and buffers rotation, mask of Lost have no values"),
        (model.last, r"A parameter of shape \(4,\) has no values"),
    ):
        with pytest.raises(ConfigError, match="^" + beginning):
            module(torch.ones(4))


@on_ranks(4)  # one rank has no part of the smallest parameters
@cells("how", ["load", "load_state_dict"])
def test_a_checkpoint_fills_a_model_without_values(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Model()
    path, saved = str(tmp_path / "model.pt"), str(tmp_path / "saved.pt")
    if rank() == 0:
        torch.save(plain.state_dict(), path)
    with torch.device("meta"):
        model = BMTrainModelWrapper(Model(), init=False)
    with pytest.raises(ConfigError, match="have no values"):
        model(batch(0)[0])
    if how == "load":
        load(model, path)
    else:
        model.load_state_dict(plain.state_dict())
    save(model, saved)
    losses = [loss_of(each(batch(0)[0]), batch(0)[1]) for each in (model, plain)]
    losses[0].backward()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    if rank() == 0:
        torch.testing.assert_close(torch.load(saved), plain.state_dict())


class Distributed(DistributedModule):
    """As BMTrain's users write it: init methods, and a list of blocks made in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        init = ParameterInitializer(nn.init.normal_, std=0.5)
        self.embedding = DistributedParameter(torch.empty(11, 7), init_method=init)
        self.layers = TransformerBlockList([Block(Layer(7, 13), zero_level=2), Layer(7, 13)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layers(nn.functional.embedding(tokens, self.embedding))
        return h @ self.embedding.T


@on_ranks(2)
def test_init_methods_and_modules_of_a_block_list_initialise() -> None:
    torch.manual_seed(6)
    with torch.device("meta"):
        model = Distributed()
    with pytest.raises(ConfigError, match="have no values"):
        model.layers(torch.ones(2, 7))
    init_parameters(model)
    filled = Distributed()
    torch.manual_seed(6)  # the same draws in the same order, on what is there
    part: Any = filled._parameters["embedding"]
    with torch.no_grad():
        part.copy_(part.local_part(torch.randn(11, 7) * 0.5))
    for layer in filled.layers:
        layer.load_state_dict(Layer(7, 13).state_dict())
    found, expected = (train(each, 2, my_part, optimizer=adam)["state"] for each in (model, filled))
    torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_a_block_promised_to_be_initialised_is_left_to_be_loaded() -> None:
    with torch.device("meta"):
        block = Block(nn.Linear(4, 4), initialized=True)
    init_parameters(block)
    with pytest.raises(ConfigError, match="Parameters weight, bias of"):
        block(torch.ones(4))
    plain = nn.Linear(4, 4)
    block.load_state_dict(plain.state_dict())
    init_parameters(block)
    torch.testing.assert_close(block(torch.ones(4)), plain(torch.ones(4)))


@on_ranks(2)
def test_a_replicated_block_is_initialised_too() -> None:
    torch.manual_seed(8)
    expected = nn.Linear(5, 3).state_dict()
    torch.manual_seed(8)
    with torch.device("meta"):
        block = Block(nn.Linear(5, 3), zero_level=0)
    init_parameters(block)
    torch.testing.assert_close(dict(block.state_dict()), dict(expected), rtol=0, atol=0)
