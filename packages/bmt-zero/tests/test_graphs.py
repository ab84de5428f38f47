"""Which blocks a step uses, how often, in which order and on which ranks: every graph trains like
plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from zero_models import Auxiliary, Layer, X, grads_of, line, of_all_ranks

from bmt_core.run.runtime import rank, world_size
from bmt_params import DistributedParameter
from bmt_testing import on_ranks
from bmt_zero import Block
from cells import cells

WIDTH = 6
Layers = Any
"""A list of four modules of the class Layer."""


def data(step: int) -> torch.Tensor:
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(step))


def straight(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum()


def frozen_prefix(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return straight(layers, x, step)


def frozen_middle(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    layers[1].requires_grad_(False)
    return straight(layers, x, step)


def frozen_then_unfrozen(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    layers[2].requires_grad_(step >= 2)
    return straight(layers, x, step)


def partly_frozen(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        layer.up.requires_grad_(step % 2 == 0)
    return straight(layers, x, step)


def skipped(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    return straight([layer for i, layer in enumerate(layers) if (i + step) % 3], x, step)


def early_exit(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    return straight(layers[: 2 + step % 2], x, step)


def output_unused(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    layers[3](x)
    return straight(layers[:3], x, step)


def used_twice(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    return straight([layers[0], layers[1], layers[0], layers[2], layers[0]], x, step)


def two_forwards(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    return straight(layers, x, step) + straight(layers[::-1], x * 0.5, step)


def parallel_branches(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    h = layers[0](x)
    return straight([layers[3]], layers[1](h) + layers[2](h), step)


def in_place_around(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x * 1.0)
        x += 0.25
        x.mul_(0.5)
    return x.square().sum()


def without_input_gradient(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x.detach())
    return x.square().sum()


def concatenated_weights(layers: Layers, x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum() + sum(layer(x).sum() for layer in layers[:2])


GRAPHS = [
    straight,
    frozen_prefix,
    frozen_middle,
    frozen_then_unfrozen,
    partly_frozen,
    skipped,
    early_exit,
    output_unused,
    used_twice,
    two_forwards,
    parallel_branches,
    in_place_around,
    without_input_gradient,
    concatenated_weights,
]


def trained(
    graph: Callable[[Layers, torch.Tensor, int], torch.Tensor], model: nn.ModuleList
) -> list[Any]:
    """Gradients and values of all parameters after each step: on Blocks this rank's parts of them,
    from its part of the data.
    """
    is_sharded = isinstance(model[0], Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    history = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        graph(
            list(model), data(step).chunk(world_size())[rank()] if is_sharded else data(step), step
        ).backward()
        grads = {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
        optimizer.step()
        history.append((grads, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return history


# Four ranks for the mixture of levels, which has blocks of each; the random trainings draw
# the others.
OPTIONS = {2: [((3, 3, 3, 3), True), ((2, 2, 2, 2), False)], 4: [((0, 1, 2, 3), False)]}


@on_ranks(2, 4, timeout=240)
def test_every_graph_trains_like_plain_torch(world_size: int) -> None:
    def assert_close(found: torch.Tensor, expected: torch.Tensor, *where: object) -> None:
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{where}: {text}"
        )

    for graph in GRAPHS:
        torch.manual_seed(0)
        plain = nn.ModuleList([Layer(WIDTH, 9) for _ in range(4)])
        models = [copy.deepcopy(plain) for _ in OPTIONS[world_size]]
        expected = trained(graph, plain)
        for model, (levels, use_checkpoint) in zip(models, OPTIONS[world_size], strict=True):
            for layer, level in zip(model, levels, strict=True):
                Block(layer, use_checkpoint=use_checkpoint, zero_level=level)
            found = trained(graph, model)
            what = (graph.__name__, levels)
            for name, value in model.state_dict().items():
                assert_close(value, plain.state_dict()[name], what, name)
            for step, ((grads, values), (whole_grads, whole_values)) in enumerate(
                zip(found, expected, strict=True)
            ):
                for name, parameter in model.named_parameters():
                    assert isinstance(parameter, DistributedParameter)
                    assert_close(
                        values[name], parameter.local_part(whole_values[name]), what, name, step
                    )
                    # A gradient that nobody has is None or zero, on every rank alike.
                    grad, whole = grads[name], whole_grads[name]
                    if grad is not None or whole is not None:
                        local = parameter.local_part(
                            torch.zeros(parameter.full_shape) if whole is None else whole
                        )
                        assert_close(
                            torch.zeros_like(local) if grad is None else grad,
                            local,
                            what,
                            name,
                            step,
                        )
            are_none = [{name: grad is None for name, grad in grads.items()} for grads, _ in found]
            assert of_all_ranks(are_none) == [are_none] * world_size, what


class Expressions(nn.Module):
    """Gradients arrive as views with offsets, expanded, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Parameter(torch.randn(3, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH - 3, WIDTH))
        self.c = nn.Parameter(torch.randn(WIDTH))
        self.d = nn.Parameter(torch.randn(WIDTH, WIDTH).t().contiguous().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x @ torch.cat([self.a, self.b]) + self.c.expand_as(x) + x @ self.d.t()
        return y + self.a.sum()


@on_ranks(2)
@cells("level", range(4))
def test_gradients_with_offsets_strides_and_expansions(level: int) -> None:
    plain, block = Expressions(), Block(Expressions(), zero_level=level)
    sum(plain(data(number)).square().sum() for number in range(2)).backward()
    block(data(rank())).square().sum().backward()
    torch.testing.assert_close(grads_of(block), grads_of(plain))


class OnePerRank(nn.Module):
    """Which expert works depends on the rank, as with routed tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts[rank()](x)
        return x if rank() == 1 else y  # rank 1 lets its expert's result fall


@on_ranks(2)
@cells("level", range(4))
@cells("input_needs_gradient", [False, True])
def test_parameters_unused_on_some_ranks_have_one_gradient_everywhere(
    level: int, input_needs_gradient: bool
) -> None:
    plain, block = OnePerRank(), Block(OnePerRank(), zero_level=level)
    plain.experts[0](data(0)).square().sum().backward()
    for parameter in plain.experts[1:].parameters():  # type: ignore[union-attr]
        parameter.grad = torch.zeros_like(parameter)
    block(data(0).requires_grad_(input_needs_gradient)).square().sum().backward()
    torch.testing.assert_close(grads_of(block), grads_of(plain))


class OnRankZeroOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = line()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if rank() == 0 else x.clone()


@on_ranks(2, timeout=30)
@cells("level", range(4))
def test_a_first_block_without_part_on_one_rank_reduces_with_the_others(level: int) -> None:
    first, second = Block(OnRankZeroOnly(), zero_level=level), Block(line(), zero_level=level)
    second(first(X)).sum().backward()
    assert grads_of(first)["linear.weight"].tolist() == [[2.0, 2.0]] * 2


@on_ranks(2)
@cells("use_checkpoint", [False, True])
@cells("level", range(4))
def test_a_loss_that_is_kept_beside_the_result_has_its_gradients(
    level: int, use_checkpoint: bool
) -> None:
    block: Any = Block(Auxiliary(), zero_level=level, use_checkpoint=use_checkpoint)
    block(X)
    block.aux.backward()
    # Two ranks x (2 w + 2 y).
    assert grads_of(block)["linear.weight"].tolist() == [[36.0, 36.0]] * 2
    block.zero_grad()
    (block(X).sum() + block.aux).backward()
    assert grads_of(block)["linear.weight"].tolist() == [[38.0, 38.0]] * 2


@on_ranks(2)
def test_a_graph_of_before_wrapping_lives_on_and_what_was_frozen_since_forward_takes_nothing() -> (
    None
):
    layer = line()
    kept = layer(X).sum()
    block = Block(layer)
    block(X).sum().backward()
    assert kept.grad_fn is not None and grads_of(block)["weight"].tolist() == [[2.0, 2.0]] * 2
    loss = block(X).sum()
    block.requires_grad_(False)
    loss.backward()  # as in plain torch
    assert grads_of(block)["weight"].tolist() == [[2.0, 2.0]] * 2
