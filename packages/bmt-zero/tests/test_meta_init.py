"""Models built on the meta device become sharded, initialised block by block, and train as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from meta_models import Layer, MemoryMeter, Model, Scale, kept_bytes, whole_bytes, without_sums_of_first_values
from torch import nn
from zero_models import adam, batch, loss_of, my_part, train

from bmt_checkpoint import load, save
from bmt_core.errors import ConfigError
from bmt_core.init.parameter_init import ParameterInitializer, init_parameters
from bmt_core.modules.distributed_module import DistributedModule
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList


def plain(ties: bool, frozen: tuple[str, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    return train(freeze(Model(ties=ties), frozen), 3, lambda part: part, optimizer=adam)


def freeze(model: nn.Module, beginnings: tuple[str, ...]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(beginnings))
    return model


def built_on_meta(
    way: str, levels: tuple[int, ...], use_checkpoint: bool, frozen: tuple[str, ...] = ()
) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = freeze(Model(ties=way != "blocks"), frozen)
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
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    return train(model, 3, my_part, optimizer=lambda parameters: optimizer)


FROZEN = ("embedding", "layers.0", "layers.1.up.bias", "layers.2.norm", "norm.weight")


@pytest.mark.parametrize(
    ("world_size", "way", "levels", "use_checkpoint", "frozen"),
    [
        (1, "wrapper", (3, 3, 3), True, ()),
        (2, "wrapper", (3, 2, 1), True, ()),
        (2, "inside", (3, 3, 2), False, ()),
        (2, "wrapper", (3, 1, 2), False, FROZEN),
        (4, "parameters", (1, 3, 3), False, ()),
        (4, "inside", (3, 3, 3), True, FROZEN),
        (1, "blocks", (0, 3, 0), False, FROZEN),
        (2, "blocks", (0, 0, 0), True, ()),
        (2, "blocks", (0, 3, 3), True, FROZEN),
        (4, "blocks", (3, 0, 2), False, ()),
    ],
)
def test_training_equals_plain_torch(
    world_size: int, way: str, levels: tuple[int, ...], use_checkpoint: bool, frozen: tuple[str, ...]
) -> None:
    # The optimizer is built while the parameters are on the meta device, and goes on holding them.
    expected = plain(way != "blocks", frozen)  # Blocks made one by one share no parameters
    results = run_ranks(built_on_meta, world_size, way, levels, use_checkpoint, frozen)
    torch.testing.assert_close(sum(result["loss"] for result in results), expected["loss"])
    for result in results:
        torch.testing.assert_close(result["grad"], expected["grad"])
        torch.testing.assert_close(result["state"], dict(expected["state"]))


class Torch(nn.Module):
    """Modules of torch that write to the parameters of others, keep weak references to their own, have running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=1)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 3), nn.BatchNorm1d(3)])
        self.attention = nn.MultiheadAttention(4, 2)
        self.bilinear = nn.Bilinear(2, 3, 4, dtype=torch.bfloat16)
        self.convolution = nn.Conv1d(2, 3, 3)


def states(kind: type[nn.Module]) -> Any:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = kind()
    BMTrainModelWrapper(model)
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    return {**model.state_dict(), **dict(model.named_buffers())}, torch.rand(2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", [Model, Torch])
def test_values_are_those_of_construction_in_one_process(kind: type[nn.Module], world_size: int) -> None:
    torch.manual_seed(3)
    model = kind()
    expected = {**model.state_dict(), **dict(model.named_buffers())}, torch.rand(2)
    for result in run_ranks(states, world_size, kind):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


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


def shared_tables() -> list[Any]:
    with torch.device("meta"):
        model = SharedTable()
    BMTrainModelWrapper(model)
    holders = [model, *model.layers]
    assert all(isinstance(layer, Block) for layer in model.layers)
    assert len({id(holder.table) for holder in holders}) == 1
    return [holder.table.tolist() for holder in holders]


def test_a_buffer_that_several_blocks_hold_stays_one() -> None:
    assert run_ranks(shared_tables, 2) == [[[0.0, 1.0, 2.0, 3.0]] * 3] * 2


def update_in_backward(model: nn.Module) -> None:
    """Step each parameter as soon as its gradient is there; those hooks must outlive the meta device."""

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def hooked() -> Any:
    torch.manual_seed(5)
    with torch.device("meta"):
        model = Model()
        update_in_backward(model)
    BMTrainModelWrapper(model)
    tokens, targets = (my_part(part) for part in batch(0))
    loss_of(model(tokens), targets).backward()
    return dict(model.state_dict())


def test_hooks_registered_on_the_meta_device_run() -> None:
    torch.manual_seed(5)
    model = Model()
    update_in_backward(model)
    loss_of(model(batch(0)[0]), batch(0)[1]).backward()
    for result in run_ranks(hooked, 2):
        torch.testing.assert_close(result, dict(model.state_dict()))


def memory(way: str) -> tuple[float, float]:
    with without_sums_of_first_values(), MemoryMeter() as meter:
        with torch.device("meta"):
            model = Model(6, 64, 256)
        if way == "load":
            BMTrainModelWrapper(model, init=False)
        else:
            BMTrainModelWrapper(model, init=whole_model if way == "whole model" else True)
    blocks = [whole_bytes(layer) for layer in model.layers]
    own = kept_bytes(model)
    assert meter.current >= own
    return (meter.peak - own) / max(blocks), whole_bytes(model) / max(blocks)


def whole_model(module: nn.Module) -> None:
    """Initialise everything at once, as a model with one loop over ``parameters()`` does."""
    if isinstance(module, Model):
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1)
    elif isinstance(module, Scale):
        module.reset_parameters()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("way", ["init", "load", "whole model"])
def test_one_block_is_whole_at_a_time(way: str, world_size: int) -> None:
    for blocks, model in run_ranks(memory, world_size, way):
        assert model > 5
        assert blocks < 1.1
        assert way == "load" or blocks > 0.9  # the meter sees what it should


def whole_model_values() -> Any:
    torch.manual_seed(4)
    with torch.device("meta"):
        model = BMTrainModelWrapper(Model(), init=whole_model)
    return dict(model.state_dict())


def test_a_function_has_the_last_word_as_if_applied_after_construction() -> None:
    torch.manual_seed(4)
    model = Model()
    model.apply(whole_model)
    for result in run_ranks(whole_model_values, 2):
        torch.testing.assert_close(result, dict(model.state_dict()), rtol=0, atol=0)


class Scaled(Model):
    """As older GPT-2 models: what matters is drawn again in a loop over the names inside, of one module and of all."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.1)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)
        for name, parameter in module.named_parameters():
            if name.endswith("down.weight"):
                parameter.data.normal_(std=0.01)


def scaled() -> Any:
    with torch.device("meta"):
        model = Scaled(ties=False)
    torch.manual_seed(4)
    return dict(BMTrainModelWrapper(model).state_dict()), torch.rand(2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_init_weights_may_reach_into_blocks_by_name(world_size: int) -> None:
    model = Scaled(ties=False)
    torch.manual_seed(4)
    model.apply(model._init_weights)
    expected = dict(model.state_dict()), torch.rand(2)
    for result in run_ranks(scaled, world_size):
        for state in (result[0], expected[0]):  # apply() draws the tied weight twice and keeps the second
            state.pop("embedding.weight", None), state.pop("head.weight", None)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


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


def several_blocks() -> list[Any]:
    found: list[Any] = []
    for function in (all_at_once, all_data_at_once):
        with torch.device("meta"):
            model = Model()
        with pytest.raises(ConfigError) as caught:
            BMTrainModelWrapper(model, init=function)
        found.append(str(caught.value))
        assert all(p.dim() == 1 for p in model.parameters())
    with torch.device("meta"):
        model = BMTrainModelWrapper(Model(), init=copied_outside)
    return [*found, model.norm.weight, model.embedding.weight.mean(0)]


def test_a_write_to_a_block_that_is_not_whole_any_more_raises() -> None:
    for whole, data, norm, mean in run_ranks(several_blocks, 2):
        assert whole.startswith("Initialisation wrote to a parameter, by Model, when it was not whole.")
        assert data.startswith("Initialisation wrote to layers.0.norm.weight, layers.0.norm.bias, ")
        torch.testing.assert_close(norm, mean)


class Unlucky(nn.Module):
    """Fails at first."""

    failures = 1

    def reset_parameters(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ValueError("no luck")
        self.factor.fill_(2.0)


def tried_again() -> Any:
    with torch.device("meta"):
        inner = nn.Sequential(nn.Linear(4, 3), Unlucky())
        inner[1].register_buffer("factor", torch.empty(2))
        block = Block(inner)
    with pytest.raises(ValueError, match="no luck"):
        init_parameters(block)
    torch.manual_seed(9)
    init_parameters(block)
    return dict(block.state_dict())


def test_what_a_failing_initialisation_had_drawn_is_drawn_again() -> None:
    torch.manual_seed(9)
    expected = {f"0.{name}": value for name, value in nn.Linear(4, 3).state_dict().items()}
    for result in run_ranks(tried_again, 2):
        assert result.pop("1.factor").tolist() == [2.0, 2.0]
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


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


def losses() -> list[str]:
    messages = []
    with pytest.raises(ConfigError) as caught, torch.device("meta"):
        BMTrainModelWrapper(Losing())
    messages.append(str(caught.value))
    with torch.device("meta"):
        model = BMTrainModelWrapper(Losing(), init=False)
    for module in (model, model.layers[0], model.layers[1], model.last):
        with pytest.raises(ConfigError) as caught:
            module(torch.ones(4))
        messages.append(str(caught.value))
    return messages


def test_what_would_have_no_values_is_named_when_wrapping_and_at_the_first_use() -> None:
    for wrapped, called, first, second, outside in run_ranks(losses, 4):
        assert wrapped.startswith(
            "Parameters layers.1.gain, last.gain and buffers layers.1.rotation, layers.1.mask, last.rotation, last.mask"
            " have no values after initialisation."
        )
        assert "reset_parameters()" in wrapped and "init=False" in wrapped
        assert called.startswith("Parameters layers.0.weight, layers.0.bias, layers.1.gain, last.gain and buffers")
        assert first.startswith("Parameters weight, bias of Linear have no values")
        assert second.startswith("Parameters gain and buffers rotation, mask of Lost have no values")
        assert outside.startswith("A parameter of shape (4,) has no values")


def loads(path: str, how: str) -> Any:
    with torch.device("meta"):
        model = BMTrainModelWrapper(Model(), init=False)
    with pytest.raises(ConfigError, match="have no values"):
        model(batch(0)[0])
    if how == "load":
        load(model, path)
    else:
        model.load_state_dict(torch.load(path))
    save(model, path + f".{how}")
    loss = loss_of(model(batch(0)[0]), batch(0)[1])
    loss.backward()
    return loss.detach(), dict(model.state_dict())


@pytest.mark.parametrize("how", ["load", "load_state_dict"])
def test_a_checkpoint_fills_a_model_without_values(how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    model = Model()
    torch.save(model.state_dict(), path)
    expected = loss_of(model(batch(0)[0]), batch(0)[1]).detach(), dict(model.state_dict())
    for result in run_ranks(loads, 4, path, how):  # 4: one rank has no part of the smallest parameters
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.load(path + f".{how}"), model.state_dict())


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


def distributed(on_meta: bool) -> Any:
    torch.manual_seed(6)
    with torch.device("meta" if on_meta else "cpu"):
        model = Distributed()
    if on_meta:
        with pytest.raises(ConfigError, match="have no values"):
            model.layers(torch.ones(2, 7))
        init_parameters(model)
    else:  # the same draws in the same order, on what is there
        torch.manual_seed(6)
        with torch.no_grad():
            model._parameters["embedding"].copy_(model._parameters["embedding"].local_part(torch.randn(11, 7) * 0.5))  # type: ignore[union-attr, operator]
        for layer in model.layers:
            layer.load_state_dict(Layer(7, 13).state_dict())
    return train(model, 2, my_part, optimizer=adam)["state"]


def test_init_methods_and_modules_of_a_block_list_initialise() -> None:
    for on_meta, expected in zip(run_ranks(distributed, 2, True), run_ranks(distributed, 2, False), strict=True):
        torch.testing.assert_close(on_meta, expected)


def promised() -> float:
    with torch.device("meta"):
        block = Block(nn.Linear(4, 4), initialized=True)
    init_parameters(block)
    with pytest.raises(ConfigError, match="Parameters weight, bias of"):
        block(torch.ones(4))
    block.load_state_dict(nn.Linear(4, 4).state_dict())
    init_parameters(block)
    return float(block(torch.ones(4)).sum()) * 0 + runtime.world_size()


def test_a_block_promised_to_be_initialised_is_left_to_be_loaded() -> None:
    assert run_ranks(promised, 2) == [2.0, 2.0]


def level_0() -> Any:
    torch.manual_seed(8)
    with torch.device("meta"):
        block = Block(nn.Linear(5, 3), zero_level=0)
    init_parameters(block)
    return dict(block.state_dict())


def test_a_replicated_block_is_initialised_too() -> None:
    torch.manual_seed(8)
    expected = dict(nn.Linear(5, 3).state_dict())
    for result in run_ranks(level_0, 2):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
