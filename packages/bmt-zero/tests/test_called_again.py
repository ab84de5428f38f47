"""Parts of a block that ``torch.utils.checkpoint`` calls again in backward, compared with plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from zero_models import Product, full_gradient

from bmt_core.run.runtime import rank
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, no_sync

WIDTH = 6


class Part(nn.Module):
    """Layers that write their gradients themselves, and layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH, bias=False)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        return out


class Layer(nn.Module):
    """``how`` its second part is called again: "not", "frames" (use_reentrant=False), "reentrant" or "wrapped"."""

    def __init__(self, how: str, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.last = Part(), Part(), nn.Linear(WIDTH, WIDTH)
        self.second.drop.p = drop
        self.how = how
        if how == "wrapped":
            wrapped = checkpoint_wrapper(self.second, checkpoint_impl=CheckpointImpl.NO_REENTRANT)  # type: ignore[no-untyped-call]
            self.second = wrapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        if self.how in ("frames", "reentrant"):
            x = x + checkpoint(lambda y: self.second(y), x, use_reentrant=self.how == "reentrant")
        else:
            x = x + self.second(x)
        out: torch.Tensor = self.last(x)
        return out


def batch(number: int, of: int) -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(100 * number + of))


def train(model: nn.Module, ranks: list[int], hold_back: Any) -> list[torch.Tensor]:
    """Two steps of two micro-batches each, on the batches of ``ranks``; return losses, then gradients and weights by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.cat([batch(10 * step + micro, of) for of in ranks]).requires_grad_()
            loss = model(model(x)).square().mean()  # the block is used twice in one graph
            with hold_back(model) if micro == 0 else no_hold():
                loss.backward()
            assert x.grad is not None
            found += [loss.detach(), x.grad]
        found += [full_gradient(parameter) for _, parameter in sorted(model.named_parameters())]
        optimizer.step()
    return found + [value.clone() for _, value in sorted(model.state_dict().items())]


def no_hold() -> Any:
    return torch.enable_grad()


def sharded(how: str, level: int, recomputes: bool) -> list[torch.Tensor]:
    block = Block(Layer(how), zero_level=level, use_checkpoint=recomputes)
    found = train(block, [rank()], no_sync)
    assert all(type(parameter).__name__ == "DistributedParameter" for parameter in block.parameters())
    return found


HOWS = ["frames", "reentrant", "wrapped"]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("how", ["not", *HOWS])
def test_training_equals_plain_torch(how: str, level: int, recomputes: bool) -> None:
    expected = train(Layer("not"), [0], lambda model: no_hold())
    (found,) = run_ranks(sharded, 1, how, level, recomputes)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("world_size", "level", "recomputes"), [(2, 2, False), (2, 3, True), (4, 3, False)])
def test_on_several_ranks_it_changes_nothing(world_size: int, level: int, recomputes: bool) -> None:
    expected = run_ranks(sharded, world_size, "not", level, recomputes)
    for how in HOWS:
        torch.testing.assert_close(
            run_ranks(sharded, world_size, how, level, recomputes), expected, rtol=1e-5, atol=1e-6
        )


def with_dropout(how: str, recomputes: bool) -> list[torch.Tensor]:
    block = Block(Layer(how, drop=0.5), zero_level=3, use_checkpoint=recomputes)
    torch.manual_seed(3)
    x = batch(0, 0).requires_grad_()
    block(x).square().mean().backward()
    assert x.grad is not None
    return [x.grad, *(full_gradient(parameter) for _, parameter in sorted(block.named_parameters()))]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_random_numbers_are_those_of_forward(how: str, recomputes: bool) -> None:
    expected = run_ranks(with_dropout, 1, "not", recomputes)
    torch.testing.assert_close(run_ranks(with_dropout, 1, how, recomputes), expected)


def in_another_checkpoint(how: str, recomputes: bool, outer_reentrant: bool) -> list[torch.Tensor]:
    """The block itself is called again, while its own backward runs, too."""
    block = Block(Layer(how), zero_level=3, use_checkpoint=recomputes)
    other = Block(Layer("not"), zero_level=3)
    x = batch(0, rank()).requires_grad_()
    checkpoint(lambda y: block(other(block(y))), x, use_reentrant=outer_reentrant).square().mean().backward()
    assert x.grad is not None
    return [x.grad, *(full_gradient(parameter) for _, parameter in sorted(block.named_parameters()))]


@pytest.mark.parametrize("outer_reentrant", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_checkpoint_around_the_block_changes_nothing(how: str, recomputes: bool, outer_reentrant: bool) -> None:
    expected = run_ranks(in_another_checkpoint, 2, "not", True, False)
    found = run_ranks(in_another_checkpoint, 2, how, recomputes, outer_reentrant)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Sum(torch.autograd.Function):
    """``x + weight.sum()``, in torch's other style."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + weight.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0].sum().expand_as(ctx.saved_tensors[0])


class Scaled(nn.Module):
    """Has a part without any layer; ``how`` it is called again: "not", "frames" or "reentrant"."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 1 + WIDTH * WIDTH).view(WIDTH, WIDTH) / 10)
        self.how = how

    def part(self, x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.scale.mT) @ self.scale.mT + constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Sum.apply(Product.apply(x, self.scale), self.scale)  # type: ignore[no-untyped-call]
        if self.how == "not":
            return x + self.part(x, torch.ones(WIDTH))
        out: torch.Tensor = checkpoint(self.part, x, torch.ones(WIDTH), use_reentrant=self.how == "reentrant")
        return x + out


def scaled(how: str, recomputes: bool, trains: bool) -> list[Any]:
    block = Block(Scaled(how), zero_level=3, use_checkpoint=recomputes)
    block.requires_grad_(trains)
    found = []
    for number in range(3):
        x = batch(number, rank()).requires_grad_()
        block(x).square().mean().backward()
        assert x.grad is not None
        found += [x.grad, full_gradient(block.scale) if trains else None]
    return found


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_parts_without_layers_train_alike(trains: bool, recomputes: bool) -> None:
    expected = run_ranks(scaled, 2, "not", recomputes, trains)
    for how in ("frames", "reentrant"):
        torch.testing.assert_close(run_ranks(scaled, 2, how, recomputes, trains), expected)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 1 + WIDTH * WIDTH).view(WIDTH, WIDTH) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.scale)


class WithTraced(nn.Module):
    """Its part is code that was generated, which has no module's name."""

    def __init__(self, is_traced: bool) -> None:
        super().__init__()
        self.part = torch.fx.symbolic_trace(Bare()) if is_traced else Bare()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.part, x, use_reentrant=True)
        return x + out


def traced(is_traced: bool) -> list[torch.Tensor]:
    block = Block(WithTraced(is_traced), zero_level=3)
    x = batch(0, rank()).requires_grad_()
    block(x).square().mean().backward()
    assert x.grad is not None
    return [x.grad, *(full_gradient(parameter) for parameter in block.parameters())]


def test_a_part_that_was_traced_is_found() -> None:
    torch.testing.assert_close(run_ranks(traced, 2, True), run_ranks(traced, 2, False))


class Tied(nn.Module):
    """Two blocks that share the weights of a part."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(how), Layer("not")])
        self.layers[1].first.up.weight = self.layers[0].second.up.weight
        self.layers[0].second.down.weight = self.layers[1].first.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tied(how: str, recomputes: bool) -> list[torch.Tensor]:
    model = BMTrainModelWrapper(Tied(how))
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer._use_checkpoint = recomputes
    return train(model, [rank()], no_sync)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_parts_with_weights_of_other_blocks_train_alike(how: str, recomputes: bool) -> None:
    expected = train(Tied("not"), [0], lambda model: no_hold())
    torch.testing.assert_close(run_ranks(tied, 1, how, recomputes)[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        run_ranks(tied, 2, how, recomputes), run_ranks(tied, 2, "not", True), rtol=1e-5, atol=1e-6
    )


class TiedScales(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(how), Scaled(how)])
        self.layers[1].scale = self.layers[0].scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def tied_scales(how: str) -> list[torch.Tensor]:
    model = BMTrainModelWrapper(TiedScales(how))
    x = batch(0, rank()).requires_grad_()
    model(x).square().mean().backward()
    assert x.grad is not None
    return [x.grad, *(full_gradient(parameter) for parameter in model.parameters())]


def test_parts_with_nothing_but_weights_of_other_blocks_are_found() -> None:
    expected = run_ranks(tied_scales, 2, "not")
    for how in ("frames", "reentrant"):
        torch.testing.assert_close(run_ranks(tied_scales, 2, how), expected)


def tied_and_called_again_on_one_rank(recomputes: bool) -> list[torch.Tensor]:
    return tied("frames" if rank() == 0 else "not", recomputes)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_part_that_one_rank_alone_calls_again_hangs_nobody(recomputes: bool) -> None:
    found = run_ranks(tied_and_called_again_on_one_rank, 2, recomputes, init={"timeout": 20})
    torch.testing.assert_close(found, run_ranks(tied, 2, "not", True), rtol=1e-5, atol=1e-6)


class WithCompiledPart(nn.Module):
    """``how`` it is compiled: "not", as a module, in place, or as a function."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.part = Part()
        compiled = partial(torch.compile, fullgraph=True, backend="eager")
        if how == "module":
            self.call = compiled(self.part)
        elif how == "function":
            self.call = compiled(lambda x: self.part(x))
        else:
            self.call = self.part
            if how == "in place":
                self.part.compile(fullgraph=True, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.call(x)
        return out


def with_compiled_part(how: str, recomputes: bool) -> tuple[list[torch.Tensor], int]:
    """Return gradients, and how many graphs were compiled."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    block = Block(WithCompiledPart(how), zero_level=3, use_checkpoint=recomputes)
    found = []
    for number in range(3):
        x = batch(number, rank()).requires_grad_()
        block(x).square().mean().backward()
        assert x.grad is not None
        found += [x.grad, full_gradient(block.part.up.weight)]
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("recomputes", [False, True])
def test_parts_that_are_compiled_by_themselves_stay_whole(recomputes: bool) -> None:
    ((expected, none),) = run_ranks(with_compiled_part, 1, "not", recomputes)
    assert none == 0
    for how, most in (("module", 1), ("in place", 1), ("function", 2)):
        ((found, graphs),) = run_ranks(with_compiled_part, 1, how, recomputes)
        torch.testing.assert_close(found, expected)
        assert 1 <= graphs <= most


class Fails(Exception):
    """What a backward pass is made to raise."""


def fails_in_backward(how: str, level: int) -> tuple[bool, bool, list[str]]:
    block = Block(Layer(how), zero_level=level, use_checkpoint=False)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    during: list[str] = []

    def fail(grad: torch.Tensor) -> None:
        during.extend(sorted({type(parameter).__name__ for parameter in block.parameters()}))
        torch.testing.assert_close(dict(block.state_dict()), before)  # in the middle of a backward pass
        raise Fails

    x = batch(0, rank())

    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    x = batch(0, rank())
    handle = block.first.norm.register_forward_hook(watch)
    loss = block(x).square().mean()
    with pytest.raises(Fails):
        loss.backward()
    kept = all(torch.equal(value, before[name]) for name, value in block.state_dict().items())  # the graph still lives
    handle.remove()
    block(x).square().mean().backward()
    del loss
    is_whole = all(type(parameter).__name__ == "DistributedParameter" for parameter in block.parameters())
    return kept, is_whole, during


@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("how", ["not", *HOWS])
def test_a_backward_pass_that_fails_leaves_the_parameters_where_they_were(how: str, level: int) -> None:
    for kept, is_whole, during in run_ranks(fails_in_backward, 2, how, level):
        assert kept and is_whole
        assert during == ["Tensor"]


def frozen(how: str, which: str) -> list[torch.Tensor]:
    layer = Layer(how)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(which not in name and which != "all")
    block = Block(layer, zero_level=3, use_checkpoint=False)
    x = batch(0, rank()).requires_grad_()
    block(x).square().mean().backward()
    assert x.grad is not None
    trained = [parameter for _, parameter in sorted(block.named_parameters()) if parameter.requires_grad]
    return [x.grad, *(full_gradient(parameter) for parameter in trained)]


@pytest.mark.parametrize("which", ["up", "second", "all"])
@pytest.mark.parametrize("how", HOWS)
def test_frozen_parameters_get_no_gradient(how: str, which: str) -> None:
    expected = run_ranks(frozen, 2, "not", which)
    torch.testing.assert_close(run_ranks(frozen, 2, how, which), expected)
