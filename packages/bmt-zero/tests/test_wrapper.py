"""``BMTrainModelWrapper``: whole plain models become distributed in place."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Model, batch, full_gradient, loss_of, plain, train

import bmt_checkpoint
from bmt_core.errors import ConfigError
from bmt_core.modules.distributed_module import DistributedModule
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class Mixture(nn.Module):
    """A nested list, a parameter tied across two blocks, a buffer, a direct parameter, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])
        self.layers[1].experts[0].weight = self.layers[0].experts[2].weight  # type: ignore[union-attr, index]
        self.bias = nn.Parameter(torch.zeros(4))
        self.lonely = nn.Parameter(torch.ones(3))
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.factor
        return x + self.bias + self.bias * 2


def wrapped() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Mixture()
    names = [name for name, _ in model.named_parameters()]
    values = copy.deepcopy(model.state_dict())
    same = BMTrainModelWrapper(model)
    assert same is model and isinstance(model, DistributedModule) and isinstance(model, Mixture)
    assert all(isinstance(p, DistributedParameter) for p in model.parameters())
    assert [name for name, _ in model.named_parameters()] == names
    assert [isinstance(layer, Block) for layer in model.layers] == [True, True]
    assert not any(isinstance(e, Block) for layer in model.layers for e in layer.experts)  # type: ignore[union-attr]
    torch.testing.assert_close(dict(model.state_dict()), dict(values))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 16).view(4, 4).chunk(runtime.world_size())[runtime.rank()]
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nested_lists_ties_across_blocks_and_buffers_train_like_plain_torch(world_size: int) -> None:
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 16).view(4, 4)).square().sum().backward()
        optimizer.step()
    for state in run_ranks(wrapped, world_size):
        torch.testing.assert_close(state, dict(model.state_dict()))


def wrapped_loss() -> Any:
    model = BMTrainModelWrapper(Model())
    assert model.head.weight.shape == (11, 7)  # gathered when read
    assert model._parameters == {} and model.head._parameters["weight"] is model.embedding._parameters["weight"]
    return train(model, 5, lambda part: part)


def test_a_whole_model_with_tied_embedding_equals_plain_torch() -> None:
    expected = plain()
    for result in run_ranks(wrapped_loss, 1):
        torch.testing.assert_close(result["state"], dict(expected["state"]))
        torch.testing.assert_close(result["loss"], expected["loss"])


def copied() -> None:
    model = BMTrainModelWrapper(Model())
    twin = copy.deepcopy(model)
    tokens, targets = batch(0)
    torch.testing.assert_close(twin(tokens), model(tokens))
    loss_of(twin(tokens), targets).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_a_wrapped_model_can_be_copied() -> None:
    run_ranks(copied, 2)


def found_by_name() -> bool:
    model = BMTrainModelWrapper(Model())
    return all(model.get_parameter(name) is parameter for name, parameter in model.named_parameters())


def test_parameters_are_found_by_name() -> None:
    assert run_ranks(found_by_name, 2) == [True, True]


def gradients(model: nn.Module, compiled: Callable[..., torch.Tensor]) -> list[Any]:
    for step in range(2):
        tokens, targets = batch(step)
        loss_of(compiled(tokens), targets).backward()
    return [full_gradient(parameter) for parameter in model.parameters()]


def compiled_as_a_whole() -> list[Any]:
    torch.manual_seed(0)
    model = BMTrainModelWrapper(Model())
    return gradients(model, torch.compile(model, backend="aot_eager"))


def test_a_model_that_is_compiled_as_a_whole_has_the_gradients_of_plain_torch() -> None:
    torch.manual_seed(0)
    model = Model()
    expected = [2 * grad for grad in gradients(model, model)]
    for found in run_ranks(compiled_as_a_whole, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class ReadsOldCheckpoints(nn.Linear):
    """Its weight was called kernel and saved transposed: an override transposes, a pre-hook renames."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_load_state_dict_pre_hook(rename)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}kernel"] = state[f"{prefix}kernel"].t()
        super()._load_from_state_dict(state, prefix, *args)


def rename(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


def negate(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}weight"] = -state[f"{prefix}weight"]


def rename_child(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state[f"{prefix}head.kernel"] = state.pop(f"{prefix}old.kernel")


class ReadsOldModel(nn.Module):
    """Layers that read old checkpoints inside of a Block, one of them under two names, as a Block, and outside of Blocks."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6, bias=False))
        inside = nn.ModuleDict({"one": ReadsOldCheckpoints(), "normed": normed})
        inside["same"] = inside["one"]
        self.layers, self.head = nn.ModuleList([inside, ReadsOldCheckpoints()]), ReadsOldCheckpoints()
        self.register_load_state_dict_pre_hook(rename_child)

    def negate(self) -> ReadsOldModel:
        """Register a further hook with every layer."""
        for module in [module for module in self.modules() if isinstance(module, ReadsOldCheckpoints)]:
            module.register_load_state_dict_pre_hook(negate)
        return self

    @staticmethod
    def old_state(seed: int) -> dict[str, torch.Tensor]:
        """Return a state dict of old names, with the entries of the old ``weight_norm``."""
        torch.manual_seed(seed)
        state = {"layers.0.normed.weight_g": torch.rand(6, 1), "layers.0.normed.weight_v": torch.randn(6, 6)}
        for path in ("layers.0.one", "layers.1", "head"):
            kernel = "old.kernel" if path == "head" else f"{path}.kernel"
            state |= {kernel: torch.randn(6, 6), f"{path}.bias": torch.randn(6)}
        return {**state, **{f"layers.0.same.{key}": state[f"layers.0.one.{key}"] for key in ("kernel", "bias")}}


def unpickled(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def same_after_load(model: nn.Module, reference: nn.Module, seed: int, **options: Any) -> None:
    model.load_state_dict(ReadsOldModel.old_state(seed), **options)
    reference.load_state_dict(ReadsOldModel.old_state(seed))
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=0, atol=0)


def load_old_state() -> None:
    model, reference = BMTrainModelWrapper(ReadsOldModel()), ReadsOldModel()
    same_after_load(model, reference, 1)
    same_after_load(model, reference, 2, strict=False)
    same_after_load(copy.deepcopy(model).negate(), ReadsOldModel().negate(), 3)  # hooks registered after a load
    same_after_load(model, reference, 4)
    layer, old = unpickled(model.layers[1]), torch.randn(6, 6, generator=torch.Generator().manual_seed(5))
    layer.register_load_state_dict_pre_hook(negate)
    layer.load_state_dict({"kernel": old, "bias": torch.zeros(6)})
    torch.testing.assert_close(layer.state_dict()["weight"], -old.t(), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_and_overrides_that_read_old_checkpoints_see_whole_tensors(world_size: int) -> None:
    run_ranks(load_old_state, world_size)


def load_after_a_failure() -> list[str]:
    model, reference = BMTrainModelWrapper(ReadsOldModel()), ReadsOldModel()
    state = ReadsOldModel.old_state(1)
    with pytest.raises(KeyError, match=r"layers\.1\.kernel"):  # after the first Block was loaded
        model.load_state_dict({key: value for key, value in state.items() if key != "layers.1.kernel"})
    same_after_load(model.negate(), reference.negate(), 2)
    with pytest.raises(ConfigError, match="assign=True"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ConfigError, match="assign=True"):
        model.layers[0]["one"].load_state_dict({"kernel": torch.ones(6, 6), "bias": torch.ones(6)}, assign=True)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict({**state, "layers.0.one.kernel": torch.ones(3, 2)})
    same_after_load(model, reference, 3)
    return str(caught.value).split("\n\t")[1:]


def test_after_a_load_that_failed_the_next_one_is_right() -> None:
    shown = "layers.0.one.weight: the checkpoint has shape (2, 3), the model (6, 6)."
    missing = 'Missing key(s) in state_dict: "layers.0.one.weight". '
    assert run_ranks(load_after_a_failure, 2) == [[missing, shown]] * 2


def load_both_ways(path: str) -> None:
    torch.manual_seed(1)
    states = [Model().state_dict() for _ in range(2)]
    model = BMTrainModelWrapper(Model())
    model.load_state_dict(states[0])
    torch.testing.assert_close(dict(model.state_dict()), dict(states[0]), rtol=0, atol=0)
    if runtime.rank() == 0:
        torch.save(states[1], path)
    bmt_checkpoint.load(model, path)
    torch.testing.assert_close(dict(model.state_dict()), dict(states[1]), rtol=0, atol=0)


def test_a_file_loads_after_a_state_dict(tmp_path: Path) -> None:
    run_ranks(load_both_ways, 2, str(tmp_path / "model.pt"))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden).square().sum()


def words() -> Words:
    torch.manual_seed(0)
    return Words().double()


def stepped(model: nn.Module, steps: int = 2) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        parts = torch.arange(8).chunk(runtime.world_size())
        model(parts[runtime.rank()]).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def tied_after_wrapping() -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    messages, states = [], []
    for steps_before in (0, 1):
        model = BMTrainModelWrapper(words())
        stepped(model, steps_before)
        with pytest.raises(TypeError) as raised:
            model.head.weight = model.embedding.weight
        messages.append(str(raised.value))
        with pytest.raises(ConfigError) as refused:
            model.layers[1].weight = model.layers[0].weight
            model(torch.arange(2))
        messages.append(str(refused.value))
        model = BMTrainModelWrapper(words())
        stepped(model, steps_before)
        model.head.weight = model.get_parameter("embedding.weight")  # type: ignore[assignment]
        states.append(stepped(model))
    return messages, states


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_weights_tied_after_wrapping_train_as_one_or_the_way_to_tie_them_is_said(world_size: int) -> None:
    expected = []
    for steps_before in (0, 1):
        model = words()
        stepped(model, steps_before)
        model.head.weight = model.embedding.weight
        expected.append(stepped(model))
    for messages, states in run_ranks(tied_after_wrapping, world_size):
        torch.testing.assert_close(states, expected)
        for of_outside, of_blocks in (messages[:2], messages[2:]):
            assert (
                "Linear.weight is a parameter" in of_outside and "model.get_parameter('embedding.weight')" in of_outside
            )
            assert "tie it before BMTrainModelWrapper wraps the whole model" in of_blocks
