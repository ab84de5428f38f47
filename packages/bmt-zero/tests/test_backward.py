"""What may be asked of backward: some gradients only, gradients inside of forward, hooks; and what
is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zero_models import Auxiliary, Layer, X, grads_of, line

from bmt_core import BmtError, ConfigError
from bmt_core.run.runtime import rank
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, gathered_memory
from cells import cells


def plain_and_blocks(level: int, use_checkpoint: bool) -> tuple[nn.Sequential, nn.Sequential]:
    """Four layers, and Blocks with the same values."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Layer(6, 9) for _ in range(4)])
    blocks = [Block(layer, use_checkpoint, level) for layer in copy.deepcopy(plain)]
    return plain, nn.Sequential(*blocks)


def data() -> torch.Tensor:
    return torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))


@on_ranks(2)
@cells("level", range(4))
def test_backward_twice_through_a_retained_graph_adds_twice(level: int) -> None:
    plain, blocks = plain_and_blocks(level, bool(level % 2))
    plain(data()).square().sum().backward()
    loss = blocks(data()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    # Two ranks, two backwards.
    torch.testing.assert_close(grads_of(blocks), grads_of(plain, times=4))


@on_ranks(2)
@cells("level", range(4))
@cells("use_checkpoint", [False, True])
def test_autograd_grad_returns_shards_and_leaves_grad_alone(
    level: int, use_checkpoint: bool
) -> None:
    plain, blocks = plain_and_blocks(level, use_checkpoint)
    x = data().requires_grad_()
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    parameters: list[Any] = list(blocks.parameters())
    of_input, *grads = torch.autograd.grad(blocks(x).square().sum(), [x, *parameters])
    torch.testing.assert_close(of_input, expected[0])
    wholes = [
        parameter.gather_like(grad) for parameter, grad in zip(parameters, grads, strict=True)
    ]
    torch.testing.assert_close(wholes, [2 * grad for grad in expected[1:]])
    (only_input,) = torch.autograd.grad(blocks(x).square().sum(), x)
    torch.testing.assert_close(only_input, expected[0])
    assert all(parameter.grad is None for parameter in parameters)


@on_ranks(2)
@cells("dtype", [torch.float32, torch.bfloat16])
@cells("level", [0, 1, 3])
def test_backward_for_some_parameters_leaves_the_others_alone(
    dtype: torch.dtype, level: int
) -> None:
    block: Any = Block(line().to(dtype), zero_level=level)
    block(X.to(dtype)).sum().backward()
    block(X.to(dtype)).sum().backward(inputs=[block.weight])
    block(X.to(dtype)).sum().backward(inputs=[block.bias])
    grads = grads_of(block)
    assert grads["weight"].tolist() == [[4.0, 4.0]] * 2 and grads["bias"].tolist() == [4.0, 4.0]


class GradientInside(nn.Module):
    """Uses a gradient in its forward, as energy models do, and its layers before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.first = line(3.0)
        self.second = line(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(self.norm(x)))
        energy = torch.tanh(self.second(h))
        of_h, of_weight = torch.autograd.grad(
            energy.sum(), (h, self.second.weight), retain_graph=True
        )
        y: torch.Tensor = energy + torch.tanh(self.second(self.first(h))) * of_h * of_weight.sum()
        return y


@on_ranks(2)
@cells("use_checkpoint", [False, True])
@cells("level", [1, 2, 3])
def test_forward_may_ask_for_gradients_of_its_own(level: int, use_checkpoint: bool) -> None:
    plain = nn.Sequential(GradientInside(), GradientInside())
    blocks = nn.Sequential(*[Block(GradientInside(), use_checkpoint, level) for _ in range(2)])
    for model in (plain, blocks):
        model(torch.linspace(-1, 2, 6).view(3, 2)).square().sum().backward()
    torch.testing.assert_close(grads_of(blocks), grads_of(plain, times=2))
    torch.testing.assert_close(dict(blocks.named_buffers()), dict(plain.named_buffers()))


@on_ranks(2)
@cells("level", range(4))
def test_one_rank_alone_may_watch_gradients(level: int) -> None:
    sums = []
    for watches in (True, False):
        torch.manual_seed(0)
        blocks: Any = nn.Sequential(*[Block(nn.Linear(4, 4), zero_level=level) for _ in range(3)])
        if watches and rank() == 0:
            blocks[0].weight.register_hook(lambda gradient: None)
            blocks[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        for _ in range(2):
            blocks(torch.ones(2, 4)).sum().backward()
        sums.append([block.weight.gather_like(block.weight.grad).sum().item() for block in blocks])
    watched, unwatched = sums
    assert watched == unwatched


@on_ranks(2)
def test_hooks_do_not_pile_up_on_a_leaf_before_a_frozen_block() -> None:
    block = Block(line().requires_grad_(False), zero_level=3)
    prompt = X.clone().requires_grad_()
    for _ in range(5):
        block(prompt).sum().backward()
    (grad,) = torch.autograd.grad(block(prompt).sum(), prompt)
    assert torch.equal(grad, torch.full((1, 2), 2.0)) and gathered_memory.current == 0
    assert not prompt._backward_hooks
    assert prompt.grad is not None and torch.equal(prompt.grad, torch.full((1, 2), 10.0))


class ModifiesSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = line()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x))
        y.mul_(2)  # sigmoid saved its result
        return y.exp()


@on_ranks(2)
@cells("use_checkpoint", [False, True])
def test_modifying_what_backward_needs_is_an_error_as_in_plain_torch(use_checkpoint: bool) -> None:
    block = Block(ModifiesSaved(), zero_level=3, use_checkpoint=use_checkpoint)
    with pytest.raises((BmtError, RuntimeError), match=r"modified by an in-?place operation"):
        block(X).sum().backward()


@on_ranks(2)
def test_an_input_that_was_modified_is_not_recomputed_from() -> None:
    block = Block(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), use_checkpoint=True)
    x = torch.ones(3, 2)
    loss = block(x).sum()
    x.mul_(2)
    with pytest.raises(BmtError, match="An input of a block was modified in place"):
        loss.backward()


@on_ranks(2)
@cells("use_checkpoint", [False, True])
@cells("level", [0, 3])
def test_second_derivatives_are_refused_before_they_are_wrong(
    level: int, use_checkpoint: bool
) -> None:
    first, second = (
        Block(line(), zero_level=level, use_checkpoint=use_checkpoint) for _ in range(2)
    )
    frozen = Block(line().requires_grad_(False), zero_level=level, use_checkpoint=use_checkpoint)
    aside: Any = Block(Auxiliary(), zero_level=level, use_checkpoint=use_checkpoint)
    for loss in (
        # The gradients that come in are constants.
        lambda x: (second(first(x)) * torch.tensor([1.0, 3.0])).sum(),
        lambda x: frozen(x).sum(),
        lambda x: first(x).square().sum(),
        lambda x: aside(x).sum() * 0 + aside.aux,
    ):
        x = X.clone().requires_grad_()
        with pytest.raises(BmtError, match="no second derivatives"):
            torch.autograd.grad(loss(x), x, create_graph=True)
        x = X.clone().requires_grad_()
        torch.autograd.grad(loss(x), x)  # nothing was left behind


class Transforming(nn.Module):
    """Calls its layer inside of a transform; ``reads_before`` says whether it does so outside of
    one before.
    """

    def __init__(self, layer: nn.Module, reads_before: bool) -> None:
        super().__init__()
        self.layer, self.reads_before = layer, reads_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) if self.reads_before else x
        return out + torch.func.vmap(self.layer)(x)


TRANSFORMS: list[Callable[[nn.Module], Any]] = [
    lambda module: torch.func.grad(lambda x: module(x).sum())(X),
    lambda module: torch.func.jacrev(module)(X),
    lambda module: torch.func.jvp(module, (X,), (X,)),
    lambda module: torch.func.vmap(module)(X),
    lambda module: Transforming(module, reads_before=False)(X),
]


@on_ranks(2)
def test_use_in_transforms_of_torch_func_is_refused_and_breaks_nothing() -> None:
    plain = nn.Sequential(line(0.5), nn.Tanh())
    for wrap in (BMTrainModelWrapper, Block):
        for transform in TRANSFORMS:
            module = wrap(copy.deepcopy(plain))
            with pytest.raises(ConfigError, match="used inside of a transform"):
                transform(module)
            module(X).sum().backward()  # which crashed
            jacobian = torch.autograd.functional.jacobian
            torch.testing.assert_close(jacobian(module, X), jacobian(plain, X))


@on_ranks(2)
def test_in_a_transform_a_wrapped_model_may_use_a_layer_that_it_read_before_and_no_block() -> None:
    with pytest.raises(ConfigError, match="Linear was used inside of a transform"):
        BMTrainModelWrapper(Transforming(Block(line()), reads_before=True))(X)
    plain, model = Transforming(line(), reads_before=True), Transforming(line(), reads_before=True)
    for module in (plain, BMTrainModelWrapper(model)):
        module(X).square().sum().backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain, times=2))
