"""``Block``: what it keeps of the module that it wraps, which changes of it are followed, and what
is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from zero_models import Layer, X, full_gradient, line, of_all_ranks

from bmt_core import ConfigError, NotInitializedError
from bmt_core.run.runtime import rank, world_size
from bmt_params import DistributedModule, DistributedParameter
from bmt_params.modules.block_use import Scheduled
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, CheckpointBlock
from cells import cells


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.own = nn.Parameter(torch.randn(2, 3))
        self.label = "raw"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) + self.own.sum(0)
        return y


@on_ranks(2)
def test_block_is_transparent_to_names_attributes_and_modes() -> None:
    def names(module: nn.Module) -> list[list[str]]:
        found = module.named_modules(), module.named_parameters()
        return [*([name for name, _ in pairs] for pairs in found), list(module.state_dict())]

    torch.manual_seed(1)
    raw: Any = Nested()
    names_before, values = (
        names(raw),
        {key: value.clone() for key, value in raw.state_dict().items()},
    )
    block: Any = Block(raw, zero_level=3)
    assert (
        isinstance(block, Block)
        and isinstance(block, Nested)
        and CheckpointBlock is Block
        and block._module is raw
    )
    assert names(block) == names_before
    torch.testing.assert_close(dict(block.state_dict()), values)
    assert {parameter.dim() for parameter in block.parameters()} == {1}
    assert repr(block).startswith("Block[Nested](")
    assert block._get_name() == "Nested"  # transformers compares it with names of classes
    block.label = "set"
    block.eval()
    visited: list[nn.Module] = []
    block.apply(visited.append)
    assert (
        raw.label == "set" and not raw.training and not raw.first[1].training and len(visited) == 4
    )


class Own(nn.Linear):
    def init_parameters(self, value: float) -> None:
        nn.init.constant_(self.weight, value)


@on_ranks(2)
def test_a_block_has_bmtrains_methods_unless_the_inner_module_has_its_own() -> None:
    inner = DistributedModule()
    inner.weight = DistributedParameter(
        torch.zeros(3, 2), init_method=torch.nn.init.ones_, group="some"
    )
    block, own = Block(inner), Block(Own(2, 3))
    block.init_parameters()
    own.init_parameters(4.0)
    assert block.state_dict()["weight"].tolist() == [[1, 1]] * 3
    assert own.state_dict()["weight"].unique().tolist() == [4]
    assert [(label, len(parameters)) for label, parameters in block.grouped_parameters()] == [
        ("some", 1)
    ]
    assert isinstance(block, Scheduled)
    own.gradient_checkpointing = False  # Hugging Face's switch
    assert not own._use_checkpoint and block._use_checkpoint and not block.gradient_checkpointing


@on_ranks(2, timeout=30)
@cells("wrap", [Block, BMTrainModelWrapper])
def test_printing_on_one_rank_alone_does_not_hang(wrap: Any) -> None:
    model = wrap(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    if rank() == 0:
        assert "in_features=3, out_features=3, bias=True" in repr(model)
        assert "DistributedParameter(shape=(3, 3)" in str(next(model.parameters()))


class LowRank(nn.Module):
    """LoRA, as its libraries put it in: a frozen layer inside a new one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return y


@on_ranks(2)
@cells("level", range(4))
def test_adapters_added_after_wrapping_train(level: int) -> None:
    states, of_inputs = [], []
    for wraps in (False, True):
        torch.manual_seed(0)
        layer: Any = Layer(6, 9).requires_grad_(False)
        if wraps:
            Block(layer, zero_level=level)
        layer.down = LowRank(layer.down)
        optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.1)
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        for _ in range(3):
            optimizer.zero_grad()
            (layer(x).square().sum() * (1 if wraps else world_size())).backward()
            optimizer.step()
        states.append(dict(layer.state_dict()))
        of_inputs.append(x.grad)
    torch.testing.assert_close(states[1], states[0])
    torch.testing.assert_close(world_size() * of_inputs[1], of_inputs[0])
    assert not states[1]["down.a"].eq(0.1).any()


@on_ranks(2)
def test_parameters_taken_away_or_replaced_are_taken_over_or_refused() -> None:
    block: Any = Block(nn.Sequential(line()))
    assert block(X).tolist() == [[2.0, 2.0]]
    block[0].bias = None
    assert block(X).tolist() == [[2.0, 2.0]] and block[0].bias is None
    block[0].weight = nn.Parameter(torch.full((2, 2), 3.0))
    assert block(X).tolist() == [[6.0, 6.0]]
    block(X).sum().backward()
    assert full_gradient(block[0].weight) is not None
    with pytest.raises(ConfigError, match="was replaced by a plain tensor"):
        torch.func.functional_call(block, {"0.weight": torch.zeros(2, 2)}, (X,))


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(2), torch.ones(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales[1:]:
            x = x * scale
        return x


@on_ranks(2)
@cells("wrap", [Block, BMTrainModelWrapper])
def test_a_slice_of_a_parameter_list_is_an_error_and_no_new_leaf(wrap: Any) -> None:
    with pytest.raises(ConfigError, match="index it"):
        wrap(Sliced())(X)


@on_ranks(1)
@cells(("wrap", "kind"), [(Block, nn.Embedding), (BMTrainModelWrapper, nn.EmbeddingBag)])
def test_modules_that_write_their_parameters_in_forward_are_refused(wrap: Any, kind: Any) -> None:
    model = nn.Sequential(kind(4, 2, max_norm=1.0), nn.Linear(2, 2))
    with pytest.raises(
        ConfigError,
        match=rf"0 is an nn\.{kind.__name__} with max_norm=1\.0, .*Set max_norm to None",
    ):
        wrap(model)
    # Nothing has changed.
    assert type(model) is nn.Sequential and type(model[1].weight) is nn.Parameter


@on_ranks(2)
def test_a_parameter_in_two_blocks_is_refused() -> None:
    shared = nn.Linear(4, 4)
    first = Block(nn.Sequential(shared))
    with pytest.raises(ConfigError, match="'weight' is shared with another Block") as caught:
        Block(nn.Sequential(nn.ReLU(), shared))
    assert first is not None and of_all_ranks(str(caught.value)) == [str(caught.value)] * 2
    rest = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="is shared with another Block"):
        Block(refused := nn.Sequential(rest, shared))
    torch.optim.SGD(rest.parameters())  # asks the Blocks, of which it is none
    assert type(refused) is nn.Sequential


@on_ranks(2)
def test_misuse_is_named() -> None:
    with pytest.raises(TypeError, match=r"made of an nn\.Module, not of int"):
        Block(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a Block already"):
        Block(Block(nn.Linear(2, 2)))
    linear = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"zero_level must be one of \(0, 1, 2, 3\), not 4"):
        Block(linear, zero_level=4)
    assert type(linear) is nn.Linear and linear(X).shape == X.shape
    assert isinstance(Block(linear), Block)
    with pytest.raises(ConfigError, match="mode must be 'BLOCK' or 'PIPE', not 'pipe'"):
        Block(nn.Linear(2, 2), mode="pipe")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        Block(nn.Linear(2, 2))(torch.ones(1, 3))


@on_ranks(1)
def test_a_forward_with_fake_tensors_leaves_nothing_for_a_real_one() -> None:
    block, x = Block(nn.Linear(3, 3), initialized=True), torch.ones(2, 3)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        assert type(block(x)) is FakeTensor
    block(x).sum().backward()
    weight = next(block.parameters())
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 9


def test_a_block_before_init_says_what_to_call() -> None:
    with pytest.raises(NotInitializedError, match=r"Call init_distributed\(\) first"):
        Block(nn.Linear(2, 2))
