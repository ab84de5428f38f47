"""Parts of a block that ``torch.utils.checkpoint`` calls again in backward, compared with
plain torch.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from zero_models import Interrupt, Product, grads_of, of_all_ranks

from bmt_core.run.runtime import rank, world_size
from bmt_params import DistributedParameter
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, no_sync
from cells import cells
from pairwise import pairwise

WIDTH = 6
HOWS = ["frames", "reentrant", "wrapped"]
"""How a part is called again: by checkpoint(use_reentrant=False), checkpoint(use_reentrant=True),
or checkpoint_wrapper.
"""


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
    """``how`` its second part is called again: one of ``HOWS``, or "not"."""

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


def batch(number: int, of_rank: int) -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(100 * number + of_rank))


def by_name(tensors: dict[str, Any]) -> list[Any]:
    """In an order that ``checkpoint_wrapper``, which puts a name in between, does not change."""
    return [tensor for _, tensor in sorted(tensors.items())]


def assert_trains_like(
    plain: nn.Module, model: nn.Module, *, uses: int = 1, lr: float = 0.1
) -> None:
    """Train ``plain`` on the data of all ranks and ``model`` on that of this one: two steps of two
    micro-batches each.

    The first micro-batch is held back. ``uses`` is how often the model is called in a graph.
    """
    assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    optimizers = [torch.optim.SGD(module.parameters(), lr=lr) for module in (plain, model)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro_batch in range(2):
            batches = [batch(10 * step + micro_batch, of_rank) for of_rank in range(world_size())]
            inputs = [torch.cat(batches).requires_grad_(), batches[rank()].clone().requires_grad_()]
            losses = []
            for module, x in zip((plain, model), inputs, strict=True):
                y = x
                for _ in range(uses):
                    y = module(y)
                losses.append(y.square().sum() / batches[0].numel())
            losses[0].backward()
            with no_sync(model) if micro_batch == 0 else torch.enable_grad():
                losses[1].backward()
            whole, own = inputs
            assert whole.grad is not None
            assert_close(own.grad, whole.grad.chunk(world_size())[rank()])
            assert_close(sum(of_all_ranks(losses[1].detach())), losses[0].detach())
        assert_close(by_name(grads_of(model)), by_name(grads_of(plain)))
        for optimizer in optimizers:
            optimizer.step()
    assert_close(by_name(model.state_dict()), by_name(plain.state_dict()))
    assert all(isinstance(parameter, DistributedParameter) for parameter in model.parameters())


OPTIONS: dict[int, Any] = {
    1: list(itertools.product((False, True), range(4))),
    2: [(False, 2), (True, 3)],
    4: [(False, 3)],
}


@on_ranks(1, 2, 4)
@cells("how", ["not", *HOWS])
def test_training_equals_plain_torch(how: str, world_size: int) -> None:
    for use_checkpoint, level in OPTIONS[world_size]:
        assert_trains_like(Layer("not"), Block(Layer(how), use_checkpoint, level), uses=2)


@on_ranks(1)
@cells("use_checkpoint", [False, True])
@cells("how", HOWS)
def test_random_numbers_are_those_of_forward(how: str, use_checkpoint: bool) -> None:
    found = []
    for block in (Block(Layer(each, drop=0.5), use_checkpoint, 3) for each in ("not", how)):
        torch.manual_seed(3)
        x = batch(0, 0).requires_grad_()
        block(x).square().mean().backward()
        found.append([x.grad, *by_name(grads_of(block))])
    torch.testing.assert_close(found[1], found[0])


class Around(nn.Module):
    """Calls a block again, while its own backward runs, too."""

    def __init__(self, block: nn.Module, other: nn.Module, use_reentrant: bool | None) -> None:
        super().__init__()
        self.block, self.other, self.use_reentrant = block, other, use_reentrant

    def calls(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(self.other(self.block(x)))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return self.calls(x)
        out: torch.Tensor = checkpoint(self.calls, x, use_reentrant=self.use_reentrant)
        return out


@on_ranks(2)
@cells(
    ("level", "how", "use_checkpoint", "use_reentrant"),
    pairwise([1, 3], HOWS, [False, True], [False, True]),
)
def test_a_checkpoint_around_the_block_changes_nothing(
    level: int, how: str, use_checkpoint: bool, use_reentrant: bool
) -> None:
    plain = Around(Layer("not"), Layer("not"), None)
    blocks = Block(Layer(how), use_checkpoint, level), Block(Layer("not"), zero_level=level)
    assert_trains_like(plain, Around(*blocks, use_reentrant))


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
        out: torch.Tensor = checkpoint(
            self.part, x, torch.ones(WIDTH), use_reentrant=self.how == "reentrant"
        )
        return x + out


@on_ranks(2)
@cells("use_checkpoint", [False, True])
@cells("how", ["frames", "reentrant"])
@cells("trains", [False, True])
def test_parts_without_layers_train_alike(trains: bool, how: str, use_checkpoint: bool) -> None:
    block = Block(Scaled(how), use_checkpoint, 3)
    assert_trains_like(Scaled("not").requires_grad_(trains), block.requires_grad_(trains), lr=1e-6)


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


@on_ranks(2)
def test_a_part_that_was_traced_is_found() -> None:
    assert_trains_like(WithTraced(False), Block(WithTraced(True), zero_level=3))


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


def tied_blocks(how: str, use_checkpoint: bool) -> nn.Module:
    model = BMTrainModelWrapper(Tied(how))
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer._use_checkpoint = use_checkpoint
    return model


@on_ranks(2)
@cells("use_checkpoint", [False, True])
@cells("how", HOWS)
def test_parts_with_weights_of_other_blocks_train_alike(how: str, use_checkpoint: bool) -> None:
    assert_trains_like(Tied("not"), tied_blocks(how, use_checkpoint), uses=2)


@on_ranks(2, init={"timeout": 20})
@cells("use_checkpoint", [False, True])
def test_a_part_that_one_rank_alone_calls_again_hangs_nobody(use_checkpoint: bool) -> None:
    assert_trains_like(
        Tied("not"), tied_blocks("frames" if rank() == 0 else "not", use_checkpoint), uses=2
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


@on_ranks(2)
@cells("how", ["frames", "reentrant"])
def test_parts_with_nothing_but_weights_of_other_blocks_are_found(how: str) -> None:
    assert_trains_like(TiedScales("not"), BMTrainModelWrapper(TiedScales(how)))


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


@on_ranks(1)
@cells("use_checkpoint", [False, True])
@cells(("how", "most_graphs"), [("not", 0), ("module", 1), ("in place", 1), ("function", 2)])
def test_parts_that_are_compiled_by_themselves_stay_whole(
    how: str, most_graphs: int, use_checkpoint: bool
) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    plain, block = WithCompiledPart("not"), Block(WithCompiledPart(how), use_checkpoint, 3)
    for number in range(3):
        inputs = [batch(number, 0).requires_grad_() for _ in range(2)]
        for module, x in zip((plain, block), inputs, strict=True):
            module(x).square().mean().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        torch.testing.assert_close(grads_of(block)["part.up.weight"], plain.part.up.weight.grad)
    assert min(1, most_graphs) <= graphs["unique_graphs"] - before <= most_graphs


@on_ranks(2)
@cells("level", [0, 3])
@cells("how", ["not", *HOWS])
def test_a_backward_pass_that_fails_leaves_the_parameters_where_they_were(
    how: str, level: int
) -> None:
    block: Any = Block(Layer(how), False, level)
    before = {name: value.clone() for name, value in block.state_dict().items()}
    during: set[str] = set()

    def interrupt(grad: torch.Tensor) -> None:
        during.update(type(parameter).__name__ for parameter in block.parameters())
        # In the middle of a backward pass.
        torch.testing.assert_close(dict(block.state_dict()), before)
        raise Interrupt

    x = batch(0, rank())
    handle = block.first.norm.register_forward_hook(
        lambda module, inputs, output: output.register_hook(interrupt) and None
    )
    loss = block(x).square().mean()
    with pytest.raises(Interrupt):
        loss.backward()
    assert during == {"Tensor"}
    # While the graph still lives.
    torch.testing.assert_close(dict(block.state_dict()), before, rtol=0, atol=0)
    handle.remove()
    block(x).square().mean().backward()
    del loss
    assert all(isinstance(parameter, DistributedParameter) for parameter in block.parameters())


@on_ranks(2)
@cells("which", ["up", "second", "all"])
@cells("how", HOWS)
def test_frozen_parameters_get_no_gradient(how: str, which: str) -> None:
    plain, layer = Layer("not"), Layer(how)
    for module in (plain, layer):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(which not in name and which != "all")
    assert_trains_like(plain, Block(layer, False, 3))
