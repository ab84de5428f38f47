"""Graphs that are no straight line: every case trains like plain torch on one process.

Each case is a function (model of plain layers -> loss per step); it runs once on raw modules with the whole batch and
once on Blocks with this rank's part of it, and gradients and parameters must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Layer, full_gradient

from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_core.testing import run_ranks
from bmt_zero import Block, TransformerBlockList, no_sync

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


def accumulate(level: int, micro_batches: int, dtype: torch.dtype, held: bool) -> list[float]:
    """Every micro-batch has the gradient 1 for every element."""
    block = Block(nn.Linear(3, 5, bias=False, dtype=dtype), zero_level=level, use_checkpoint=False)
    x = torch.ones(1, 3, dtype=dtype) / runtime.world_size()
    for micro in range(micro_batches):
        if held and micro < micro_batches - 1:
            with no_sync(block):
                block(x).sum().backward()
        else:
            block(x).sum().backward()
    (parameter,) = block.parameters()
    assert isinstance(parameter, DistributedParameter)
    assert parameter.grad is not None and parameter.grad.dtype == dtype
    return parameter.gather_like(parameter.grad).flatten().tolist()


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_gradients_accumulate_in_float32(world_size: int, level: int, held: bool) -> None:
    for values in run_ranks(accumulate, world_size, level, 300, torch.bfloat16, held):
        assert values == [300.0] * 15


def cleared(level: int, set_to_none: bool, held: bool) -> list[float]:
    block = Block(nn.Linear(3, 5, bias=False, dtype=torch.bfloat16), zero_level=level)
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
    for _ in range(3):
        if held:
            with no_sync(block):
                block(x).sum().backward()
        else:
            block(x).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    block(x).sum().backward()
    (parameter,) = block.parameters()
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_zero_grad_of_either_kind_clears_everything(level: int, set_to_none: bool, held: bool) -> None:
    for values in run_ranks(cleared, 2, level, set_to_none, held):
        assert values == [2.0] * 15


def held_back_beside_others(level: int) -> tuple[list[float], list[float]]:
    """Every micro-batch has the gradient 1 for every element, a penalty on the shards 3, and one pass fails."""
    block = Block(nn.Linear(3, 5, bias=False), zero_level=level)
    (parameter,) = block.parameters()
    assert isinstance(parameter, DistributedParameter)
    x = torch.ones(1, 3) / runtime.world_size()

    def fail(grad: torch.Tensor) -> None:
        raise InterruptedError

    with no_sync(block):
        failing = x.clone().requires_grad_()
        failing.register_hook(fail)
        with pytest.raises(InterruptedError):
            block(failing).sum().backward()
        block.zero_grad()
        (block(x).sum() + 3 * parameter.sum()).backward()
        (asked,) = torch.autograd.grad(block(x).sum(), [parameter])
    block(x).sum().backward()
    assert parameter.grad is not None
    return parameter.gather_like(asked).flatten().tolist(), parameter.gather_like(parameter.grad).flatten().tolist()


@pytest.mark.parametrize("level", [0, 1])
def test_gradients_held_back_stay_whatever_else_is_differentiated(level: int) -> None:
    for asked, sums in run_ranks(held_back_beside_others, 2, level):
        assert asked == [1.0] * 15 and sums == [5.0] * 15


def left_by_a_frozen_parameter(level: int, held: bool) -> list[float]:
    block = Block(nn.Linear(3, 3), zero_level=level)
    weight, bias = block.parameters()
    x = torch.ones(1, 3)
    block(x).sum().backward()
    bias.requires_grad_(False)  # its gradient stays, as in torch
    weight.grad = None
    with no_sync(block) if held else nullcontext():
        block(x).sum().backward()
    if held:
        block(x).sum().backward()
    return [*weight.gather_like(weight.grad).flatten().tolist(), bias.grad is not None]  # type: ignore[operator]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("held", [False, True])
def test_a_gradient_left_by_a_parameter_that_was_frozen_is_in_nobodys_way(level: int, held: bool) -> None:
    for values in run_ranks(left_by_a_frozen_parameter, 2, level, held):
        assert values == [4.0 if held else 2.0] * 9 + [True]


class TwoScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x).sum() + (self.b * x).sum()


def gradients_after(
    actions: str, model: TwoScales, hold: Callable[[], Any], factor: float
) -> list[torch.Tensor | None]:
    """h: a backward pass under ``hold``; s: one without it; n, z: an optimizer of b clears; f, u: b is frozen, unfrozen."""
    optimizer = torch.optim.SGD([model.b], lr=0.0)
    for number, action in enumerate(actions):
        if action in "hs":
            with hold() if action == "h" else nullcontext():
                model(torch.tensor(factor * 2.0**number)).backward()
        elif action in "nz":
            optimizer.zero_grad(set_to_none=action == "n")
        else:
            model.b.requires_grad_(action == "u")
    return [model.a.grad, model.b.grad]


def gradients_of_shards_after(actions: str, level: int) -> list[torch.Tensor | None]:
    block = Block(TwoScales(), False, level)
    gradients_after(actions, block, lambda: no_sync(block), 1 / runtime.world_size())  # type: ignore[arg-type]
    return [full_gradient(parameter) for parameter in block.parameters()]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("level", [0, 1])
def test_gradients_held_back_are_those_of_torch_though_one_parameter_is_cleared_or_frozen(
    world_size: int, level: int
) -> None:
    for actions in ("hnhs", "hzhs", "hnhnhs", "hfs", "hfhs", "hfhus", "hfsnus", "hfnus", "hnfhs", "shns"):
        expected = gradients_after(actions, TwoScales(), nullcontext, 1.0)
        for found in run_ranks(gradients_of_shards_after, world_size, actions, level):
            torch.testing.assert_close(found, expected, msg=f"{actions}: {found}, not {expected}")


def cleared_while_frozen(level: int, dtype: torch.dtype) -> list[float]:
    block = Block(nn.Linear(3, 3, dtype=dtype), zero_level=level)
    weight, bias = block.parameters()
    x = torch.ones(1, 3, dtype=dtype) / runtime.world_size()
    block(x).sum().backward()
    bias.requires_grad_(False)
    block(x).sum().backward()
    bias.grad = None  # another optimizer's zero_grad
    bias.requires_grad_(True)
    block(x).sum().backward()
    return [*weight.gather_like(weight.grad).flatten().tolist(), *bias.gather_like(bias.grad).tolist()]  # type: ignore[operator]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_cleared_while_its_parameter_is_frozen_does_not_come_back(level: int, dtype: torch.dtype) -> None:
    for values in run_ranks(cleared_while_frozen, 2, level, dtype):
        assert values == [3.0] * 9 + [2.0] * 3  # the gradient of the bias is 1 on each rank


def frozen_in_the_first_call(level: int, use_checkpoint: bool) -> list[float]:
    """In the first of two calls of a backward pass the bias was frozen."""
    block = Block(nn.Linear(3, 3), use_checkpoint, level)
    weight, bias = block.parameters()
    x = torch.ones(1, 3) / runtime.world_size()
    bias.requires_grad_(False)
    first = block(x).sum()
    bias.requires_grad_(True)
    (first + block(x).sum()).backward()
    return [*weight.gather_like(weight.grad).flatten().tolist(), *bias.gather_like(bias.grad).tolist()]  # type: ignore[operator]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_a_parameter_frozen_in_one_of_two_calls_has_the_gradient_of_the_other(level: int, use_checkpoint: bool) -> None:
    for values in run_ranks(frozen_in_the_first_call, 2, level, use_checkpoint):
        assert values == [2.0] * 9 + [2.0] * 3  # the gradient of the bias is 1 on each rank


class Scaled(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def large_and_small(level: int, reduce_dtype: Any) -> list[float]:
    """Of each element one rank has the gradient 256, another one for each, and the others 1."""
    block = Block(Scaled(), False, level, reduce_dtype=reduce_dtype)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    x[:, runtime.rank()] = 256
    block(x.flatten()).float().sum().backward()
    (parameter,) = block.parameters()
    return parameter.gather_like(parameter.grad).tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce_dtype", ["fp32-sum", "fp32"])
def test_half_gradients_are_summed_over_ranks_in_float32(level: int, reduce_dtype: str) -> None:
    # 259, rounded once. In bfloat16 256 + 1 is 256: whatever the order of the sums, some element would come to less.
    for values in run_ranks(large_and_small, 4, level, reduce_dtype):
        assert values == [260.0] * 8


def held_and_not(level: int, is_first_held: bool) -> list[float]:
    """One backward pass of two calls, of which one was held back. Every call has the gradient 1 for every element."""
    block = Block(nn.Linear(3, 5, bias=False), zero_level=level)
    (parameter,) = block.parameters()
    x = torch.ones(1, 3) / runtime.world_size()
    with no_sync(block) if is_first_held else nullcontext():
        first = block(x).sum()
    with nullcontext() if is_first_held else no_sync(block):
        second = block(x).sum()
    (first + second).backward()
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("is_first_held", [False, True])
def test_a_pass_that_reduces_leaves_nothing_held_back(level: int, is_first_held: bool) -> None:
    for values in run_ranks(held_and_not, 2, level, is_first_held):
        assert values == [2.0] * 15


def watched_from_the_second_pass(level: int) -> tuple[list[float], list[float]]:
    """The first pass is held back, and then somebody begins to watch. Every pass has the gradient 1 for every element."""
    block = Block(nn.Linear(3, 5, bias=False), zero_level=level)
    (parameter,) = block.parameters()
    x, seen = torch.ones(1, 3) / runtime.world_size(), []
    with no_sync(block):
        block(x).sum().backward()
    parameter.register_hook(lambda grad: seen.append(grad.clone()))
    block(x).sum().backward()
    return [parameter.gather_like(grad).flatten().tolist() for grad in (*seen, parameter.grad)]  # type: ignore[attr-defined,return-value]


@pytest.mark.parametrize("level", [0, 1])
def test_who_begins_to_watch_sees_what_was_held_back(level: int) -> None:
    for seen, grad in run_ranks(watched_from_the_second_pass, 2, level):
        assert seen == grad == [2.0] * 15


def failed_while_held(level: int) -> list[list[float]]:
    """A held-back pass fails when the second of two blocks has held its gradients back; the first one never does."""
    blocks = [Block(nn.Linear(3, 3, bias=False), zero_level=level) for _ in range(2)]
    for block in blocks:
        with torch.no_grad():
            block.load_state_dict({"weight": torch.eye(3)})
    x = torch.ones(1, 3) / runtime.world_size()

    def fail(grad: torch.Tensor) -> None:
        raise InterruptedError

    with no_sync(nn.ModuleList(blocks)):
        between = blocks[0](x) * 1
        passed = blocks[1](between * 1)
        between.register_hook(fail)
        with pytest.raises(InterruptedError):
            passed.sum().backward()
    blocks[1](blocks[0](x)).sum().backward()
    return [block.weight.gather_like(block.weight.grad).unique().tolist() for block in blocks]


@pytest.mark.parametrize("level", [0, 1])
def test_what_a_failed_pass_held_back_is_dropped(level: int) -> None:
    for found in run_ranks(failed_while_held, 2, level):
        assert found == [[1.0], [1.0]]


def never_reduced(level: int) -> list[float]:
    """All micro-batches of a step are held back, and an optimizer of torch steps without a manager."""
    block = Block(nn.Linear(3, 3, bias=False), zero_level=level)
    block.load_state_dict({"weight": torch.zeros(3, 3)})
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    with no_sync(block):
        for _ in range(3):
            block(torch.ones(1, 3) / runtime.world_size()).sum().backward()
    optimizer.step()
    return block.weight.gather().flatten().tolist()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_step_after_nothing_but_held_back_passes_uses_them(level: int) -> None:
    for values in run_ranks(never_reduced, 2, level):
        assert values == [-1.5] * 9


def penalty_in_every_pass(level: int) -> list[float]:
    """Every pass has the gradient 1 for every element, and a penalty on the shards 3."""
    block = Block(nn.Linear(3, 5, bias=False, dtype=torch.bfloat16), zero_level=level)
    (parameter,) = block.parameters()
    x = torch.ones(1, 3, dtype=torch.bfloat16) / runtime.world_size()
    for _ in range(3):
        (block(x).sum() + 3 * parameter.sum()).backward()
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_penalty_on_half_shards_adds_to_the_sum_of_every_pass(level: int) -> None:
    for values in run_ranks(penalty_in_every_pass, 2, level):
        assert values == [12.0] * 15


def asked_for_some(level: int) -> list[float]:
    """Every micro-batch has the gradient 1 for every element, and all but the last are held back."""
    block = Block(nn.Linear(3, 5, bias=False, dtype=torch.bfloat16), zero_level=level, use_checkpoint=False)
    (parameter,) = block.parameters()
    x = torch.ones(1, 3, dtype=torch.bfloat16) / runtime.world_size()
    for micro in range(300):
        with no_sync(block) if micro < 299 else nullcontext():
            block(x).sum().backward(inputs=[parameter])
    return parameter.gather_like(parameter.grad).flatten().tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1])
def test_what_backward_is_asked_for_is_held_back_in_float32_too(level: int) -> None:
    for values in run_ranks(asked_for_some, 2, level):
        assert values == [300.0] * 15


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
    blocks(data(runtime.rank())).square().sum().backward()
    return len(list(blocks.parameters())), {n: full_gradient(p) for n, p in blocks.named_parameters()}


def test_same_module_twice_in_a_list_shares_parameters_and_gradients() -> None:
    torch.manual_seed(0)
    layer = Layer(WIDTH, 9)
    layers = nn.ModuleList([layer, Layer(WIDTH, 9), layer])
    sum(straight(list(layers), data(rank), 0) for rank in range(2)).backward()
    for count, grads in run_ranks(same_module_twice, 2):
        assert count == len(list(layers.parameters()))
        for name, parameter in layers.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)
