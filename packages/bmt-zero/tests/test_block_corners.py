"""Graphs that are no straight line: every case trains like plain torch on one process.

Each case is a function (model of plain layers -> loss per step); it runs once on raw modules with the whole batch and
once on Blocks with this rank's part of it, and gradients and parameters must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Layer, full_gradient

from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_zero import Block, TransformerBlockList

WIDTH = 6
Case = Callable[[list[nn.Module], torch.Tensor, int], torch.Tensor]


def data(step: int) -> torch.Tensor:
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(step))


def build(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Layer(WIDTH, 9) for _ in range(4)]


def straight(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum()


def frozen_prefix(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return straight(layers, x, step)


def frozen_middle(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    layers[1].requires_grad_(False)
    return straight(layers, x, step)


def frozen_then_unfrozen(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    layers[2].requires_grad_(step >= 2)
    return straight(layers, x, step)


def partly_frozen(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        layer.up.requires_grad_(step % 2 == 0)  # type: ignore[union-attr]
    return straight(layers, x, step)


def skipped(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    return straight([layer for i, layer in enumerate(layers) if (i + step) % 3], x, step)


def early_exit(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    return straight(layers[: 2 + step % 2], x, step)


def output_unused(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    layers[3](x)
    return straight(layers[:3], x, step)


def used_twice(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    return straight([layers[0], layers[1], layers[0], layers[2], layers[0]], x, step)


def two_forwards(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    return straight(layers, x, step) + straight(layers[::-1], x * 0.5, step)


def parallel_branches(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    h = layers[0](x)
    return (layers[3](layers[1](h) + layers[2](h))).square().sum()


def in_place_around(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x * 1.0)
        x += 0.25
        x.mul_(0.5)
    return x.square().sum()


def without_input_gradient(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x.detach())
    return x.square().sum()


def concatenated_weights(layers: list[nn.Module], x: torch.Tensor, step: int) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum() + sum(layer(x).sum() for layer in layers[:2])


CASES: list[Case] = [
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


def loop(case: Case, model: nn.ModuleList, part: Callable[[torch.Tensor], torch.Tensor]) -> list[dict[str, Any]]:
    """Train, and return gradients and values of all parameters after each step: on Blocks this rank's parts of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    history = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        case(list(model), part(data(step)), step).backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        history.append({"grad": grads, "value": {name: p.detach().clone() for name, p in model.named_parameters()}})
    return history


def compare_all_graphs(levels: tuple[int, ...], use_checkpoint: bool) -> dict[str, list[dict[str, bool]]]:
    """Compare every case with plain torch; return which gradients there are after each step."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(runtime.world_size())[runtime.rank()]

    def close(found: torch.Tensor, wanted: torch.Tensor, *where: object) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda text: f"{where}: {text}")

    presence = {}
    for case in CASES:
        plain, model = nn.ModuleList(build()), nn.ModuleList(build())
        wanted = loop(case, plain, lambda x: x)
        for layer, level in zip(model, levels, strict=True):
            Block(layer, use_checkpoint=use_checkpoint, zero_level=level)
        found = loop(case, model, part)
        for name, value in model.state_dict().items():
            close(value, plain.state_dict()[name], case.__name__, name)
        for step in range(4):
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DistributedParameter)
                close(
                    found[step]["value"][name],
                    parameter.local_part(wanted[step]["value"][name]),
                    case.__name__,
                    name,
                    step,
                )
                # A gradient that nobody has is None or zero, on every rank alike.
                grad, whole = found[step]["grad"][name], wanted[step]["grad"][name]
                if grad is not None or whole is not None:
                    zero = torch.zeros(parameter.full_shape)
                    local = parameter.local_part(zero if whole is None else whole)
                    close(torch.zeros_like(local) if grad is None else grad, local, case.__name__, name, step)
        presence[case.__name__] = [{name: grad is None for name, grad in done["grad"].items()} for done in found]
    return presence


# Four ranks for the mixture of levels, which has blocks of each; the random trainings draw the others.
@pytest.mark.parametrize(
    ("levels", "world_size", "use_checkpoint"),
    [((3, 3, 3, 3), 2, True), ((2, 2, 2, 2), 2, False), ((0, 1, 2, 3), 4, False)],
    ids=str,
)
def test_every_graph_trains_like_plain_torch(world_size: int, levels: tuple[int, ...], use_checkpoint: bool) -> None:
    ranks = run_ranks(compare_all_graphs, world_size, levels, use_checkpoint, timeout=120)
    assert len(ranks[0]) == len(CASES)
    assert all(presence == ranks[0] for presence in ranks)


def retained_graph(level: int) -> dict[str, torch.Tensor]:
    layers = build()
    blocks = [Block(layer, use_checkpoint=bool(level % 2), zero_level=level) for layer in layers]
    loss = straight(layers, data(0), 0)
    loss.backward(retain_graph=True)
    loss.backward()
    return {n: full_gradient(p) for n, p in nn.ModuleList(blocks).named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_backward_twice_through_a_retained_graph_adds_twice(level: int) -> None:
    layers = build()
    straight(layers, data(0), 0).backward()
    for grads in run_ranks(retained_graph, 2, level):
        for name, parameter in nn.ModuleList(layers).named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(grads[name], parameter.grad * 4)  # two ranks, two backwards


def asked_gradients(level: int, use_checkpoint: bool) -> Any:
    layers = build()
    for layer in layers:
        Block(layer, use_checkpoint=use_checkpoint, zero_level=level)
    model = nn.ModuleList(layers)
    x = data(0).requires_grad_()
    parameters = list(model.parameters())
    grads = torch.autograd.grad(straight(layers, x, 0), [x, *parameters])
    wholes = [p.gather_like(g) for p, g in zip(parameters, grads[1:], strict=True)]  # type: ignore[attr-defined]
    only_input = torch.autograd.grad(straight(layers, x, 0), x)[0]
    return grads[0], wholes, only_input, [p.grad is None for p in parameters]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_autograd_grad_returns_shards_and_leaves_grad_alone(level: int, use_checkpoint: bool) -> None:
    layers = build()
    x = data(0).requires_grad_()
    parameters = list(nn.ModuleList(layers).parameters())
    expected = torch.autograd.grad(straight(layers, x, 0), [x, *parameters])
    for of_input, wholes, only_input, untouched in run_ranks(asked_gradients, 2, level, use_checkpoint):
        torch.testing.assert_close(of_input, expected[0])
        torch.testing.assert_close(only_input, expected[0])
        for got, want in zip(wholes, expected[1:], strict=True):
            torch.testing.assert_close(got, want * 2)
        assert all(untouched)


class CatWeights(nn.Module):
    """Gradients arrive as views with offsets, expanded, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, WIDTH))
        self.b = nn.Parameter(torch.randn(WIDTH - 3, WIDTH))
        self.c = nn.Parameter(torch.randn(WIDTH))
        self.d = nn.Parameter(torch.randn(WIDTH, WIDTH).t().contiguous().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x @ torch.cat([self.a, self.b]) + self.c.expand_as(x) + x @ self.d.t()
        return y + self.a.sum()


def cat_weights(level: int) -> dict[str, Any]:
    torch.manual_seed(3)
    block = Block(CatWeights(), zero_level=level)
    block(data(runtime.rank())).square().sum().backward()
    return {name: full_gradient(p) for name, p in block.named_parameters()}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_gradients_with_offsets_strides_and_expansions(level: int) -> None:
    torch.manual_seed(3)
    module = CatWeights()
    sum(module(data(rank)).square().sum() for rank in range(2)).backward()
    for grads in run_ranks(cat_weights, 2, level):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


def unused_after_a_step() -> tuple[float, list[bool]]:
    """What weight decay left of a parameter that its Block did not use; whether those of a Block not called have no gradient."""
    called, not_called = Block(HalfUsed()), Block(HalfUsed())
    before = called.unused.weight.gather().clone()
    optimizer = torch.optim.AdamW([*called.parameters(), *not_called.parameters()], lr=0.1, weight_decay=0.5)
    called(data(0)).sum().backward()
    optimizer.step()
    after = called.unused.weight.gather()
    return float((after / before).mean()), [p.grad is None for p in not_called.parameters()]


@pytest.mark.filterwarnings("ignore:AdamW takes a step with gradients that are sums")
def test_weight_decay_reaches_what_a_called_block_did_not_use_as_the_readme_says() -> None:
    for left, are_none in run_ranks(unused_after_a_step, 2):
        assert left == pytest.approx(1 - 0.1 * 0.5)
        assert all(are_none)


class OnePerRank(nn.Module):
    """Which expert works depends on the rank, as with routed tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts[runtime.rank()](x)
        return x if runtime.rank() == 1 else y  # rank 1 lets its expert's result fall


def routed(level: int, input_needs_gradient: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    block = Block(OnePerRank(), zero_level=level)
    x = data(0).requires_grad_(input_needs_gradient)
    block(x).square().sum().backward()
    return {name: full_gradient(p) for name, p in block.named_parameters()}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("input_needs_gradient", [False, True])
def test_parameters_unused_on_some_ranks_have_one_gradient_everywhere(level: int, input_needs_gradient: bool) -> None:
    torch.manual_seed(3)
    module = OnePerRank()
    module.experts[0](data(0)).square().sum().backward()
    for grads in run_ranks(routed, 2, level, input_needs_gradient):
        for name, parameter in module.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grads[name], expected)


class SkipsEmpty(torch.optim.Optimizer):
    """Passes over empty parameters, as it may."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() and parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


def tiny_block(level: int, sharded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module: nn.Module = nn.Linear(2, 2)
    if sharded:
        Block(module, zero_level=level)
    optimizer = SkipsEmpty(module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        (module(torch.ones(1, 2)).square().sum() / runtime.world_size()).backward()
        optimizer.step()
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_ranks_without_elements_agree_about_gathering_again(level: int) -> None:
    expected = tiny_block(level, sharded=False)
    for state in run_ranks(tiny_block, 4, level, True, timeout=30):
        torch.testing.assert_close(state, expected)


def stepped_twice(level: int, sharded: bool) -> list[torch.Tensor]:
    """Outputs after two steps with the same gradients."""
    torch.manual_seed(0)
    module: nn.Module = nn.Linear(2, 2)
    if sharded:
        Block(module, zero_level=level)
    optimizer = SkipsEmpty(module.parameters())
    (module(torch.ones(1, 2)).square().sum() / runtime.world_size()).backward()
    outputs = []
    for _ in range(2):
        optimizer.step()
        with torch.no_grad():
            outputs.append(module(torch.ones(1, 2)))
    return outputs


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_ranks_without_elements_gather_again_after_a_step_without_a_reduction(level: int) -> None:
    expected = stepped_twice(level, sharded=False)
    for outputs in run_ranks(stepped_twice, 4, level, True, timeout=30):
        torch.testing.assert_close(outputs, expected)


def same_module_twice() -> Any:
    torch.manual_seed(0)
    layer = Layer(WIDTH, 9)
    blocks = TransformerBlockList([layer, Layer(WIDTH, 9), layer])
    assert len(blocks) == 3 and blocks[0] is blocks[2] is layer
    blocks(data(runtime.rank())).square().sum().backward()
    return len(list(blocks.parameters())), {n: full_gradient(p) for n, p in blocks.named_parameters()}


@pytest.mark.parametrize("level", range(4))
def test_same_module_twice_in_a_list_shares_parameters_and_gradients(level: int) -> None:
    torch.manual_seed(0)
    layer = Layer(WIDTH, 9)
    layers = nn.ModuleList([layer, Layer(WIDTH, 9), layer])
    sum(straight(list(layers), data(rank), 0) for rank in range(2)).backward()
    for count, grads in run_ranks(same_module_twice, 2, init={"zero_level": level}):
        assert count == len(list(layers.parameters()))
        for name, parameter in layers.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)
