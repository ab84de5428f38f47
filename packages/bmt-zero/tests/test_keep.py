"""What a Block keeps of its forward is not computed again, and changes no bit of its gradients."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from keep_models import (
    ATTENTION,
    BATCHED,
    BOTH,
    LINEAR,
    WIDTH,
    Attends,
    Calls,
    assert_equal,
    blocks_of,
    inputs,
    train,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from zero_models import all_weights, full_gradient, grads_of

from bmt_core.errors import BmtError, ConfigError
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList
from cells import cells


def chosen(operation: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return operation in (F.linear, F.gelu, F.dropout, torch.Tensor.transpose)


def is_gelu(operation: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return operation is F.gelu


def is_attention(operation: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return operation is F.scaled_dot_product_attention


def is_up(operation: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return operation is F.linear and len(args[1]) == 32


@contextmanager
def weights(direct: bool) -> Iterator[None]:
    """Inside, the gradients of all weights or of none are written directly."""
    if not direct:
        yield
        return
    with all_weights:
        yield


# keep, level, dropout, other products, autocast, gradients written directly, waiting calls
CASES = [
    ("attention", 3, 0.0, False, None, False, 1),
    ("attention", 2, 0.3, True, torch.bfloat16, True, 2),
    ("products", 3, 0.3, False, None, True, 2),
    ("products", 2, 0.0, True, torch.bfloat16, False, 1),
    (BOTH, 3, 0.3, True, torch.bfloat16, True, 1),
    (BOTH, 2, 0.0, False, None, False, 2),
    (5_000, 3, 0.3, True, None, True, 2),
    (9_000, 2, 0.0, False, torch.bfloat16, False, 1),
    (10**9, 3, 0.3, False, torch.bfloat16, False, 2),
    (10**9, 2, 0.0, True, None, True, 1),
    (chosen, 3, 0.3, False, torch.bfloat16, True, 1),
    (chosen, 0, 0.3, True, None, False, 2),
]


@on_ranks(2, timeout=120)
@cells(("keep", "level", "dropout", "mixes", "dtype", "direct", "waiting"), CASES)
def test_losses_and_gradients_are_those_of_full_recomputation_in_every_bit(
    keep: Any, level: int, dropout: float, mixes: bool, dtype: Any, direct: bool, waiting: int
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Attends(dropout, mixes=mixes) for _ in range(3)]
    with weights(direct):
        expected, every = train(blocks_of(layers, None, level), dtype, waiting=waiting)
        found, fewer = train(blocks_of(layers, keep, level), dtype, waiting=waiting)
    assert_equal(found, expected)
    assert fewer.total() < every.total()


@on_ranks(1)
@cells(
    ("keep", "gone"),
    [
        ("attention", {ATTENTION: 1}),
        ("products", {LINEAR: 3}),
        (BOTH, {ATTENTION: 1, LINEAR: 3}),
        (10**9, {ATTENTION: 1, LINEAR: 3}),
        (is_gelu, {"gelu": 1}),
        (is_up, {LINEAR: 1}),
        (is_attention, {ATTENTION: 1}),
    ],
)
def test_what_is_kept_is_not_computed_again(keep: Any, gone: dict[str, int]) -> None:
    for direct in (False, True):
        torch.manual_seed(0)
        with weights(direct):
            _, every = train(blocks_of([Attends()], None))
            _, fewer = train(blocks_of([Attends()], keep))
        # The last linear layer is never computed again.
        assert every[LINEAR] == 3 and every[ATTENTION] == 1
        assert every - fewer == Counter(gone) and not fewer - every


@on_ranks(1)
def test_calls_that_only_the_mode_sees_cost_it_in_their_blocks_alone() -> None:
    torch.manual_seed(0)
    plain, mixed = (
        blocks_of([Attends()], "products")[0],
        blocks_of([Attends(mixes=True)], "products")[0],
    )
    for block, needs in ((plain, False), (mixed, True)):
        _, calls = train([block])
        assert block._bmt_block.keep._needs_mode is needs  # type: ignore[union-attr]
        assert calls[LINEAR] == 0
    _, every = train(blocks_of([Attends(mixes=True)], None))
    assert (every - calls)[BATCHED] == 2  # that of baddbmm, and the einsum's


@on_ranks(2)
def test_a_budget_is_never_exceeded_and_what_costs_most_per_byte_comes_first() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Attends() for _ in range(3)]
    _, every = train(blocks_of(layers, None))
    # Of a linear layer the operations per byte are its inputs'. The last one has most of them, and
    # is not kept, because it is never computed again.
    of_up, of_heads, of_out = (
        2 * 6 * 32 * 4,
        2 * 6 * 48 * 4,
        2 * 6 * 16 * 4,
    )
    for budget, linear, attention in (
        (of_heads, 1, 0),
        (3 * (of_heads + of_out + of_up), 9, 0),
        (10**6, 9, 3),
    ):
        blocks = TransformerBlockList([copy.deepcopy(layer) for layer in layers], keep=budget)
        choice = blocks[0]._bmt_block.keep.choice
        train([*blocks])
        assert choice.held == 0
        y: Any = blocks(inputs().requires_grad_())
        assert 0 < choice.held <= budget
        assert choice is blocks[2]._bmt_block.keep.choice
        with Calls() as calls:
            y.sum().backward()
        assert every[LINEAR] - calls.count[LINEAR] == linear
        assert every[ATTENTION] - calls.count[ATTENTION] == attention
        assert choice.held == 0


@on_ranks(1)
def test_a_budget_is_of_all_calls_that_wait_for_backward() -> None:
    torch.manual_seed(0)
    (block,) = blocks_of([Attends()], 10**6)
    train([block])
    choice = block._bmt_block.keep.choice  # type: ignore[union-attr]
    y = block(inputs().requires_grad_())
    of_call = choice.held
    y.sum().backward()
    (block,) = blocks_of([Attends()], 2 * of_call)
    choice = block._bmt_block.keep.choice  # type: ignore[union-attr]
    for _ in range(3):
        held, waiting = [], []
        for micro in range(4):
            waiting.append(block(inputs(micro).requires_grad_()))
            held.append(choice.held)
        for y in waiting:
            y.sum().backward()
    # Each of the four keeps what costs most, and not the first two all of it.
    assert held[-1] <= 2 * of_call
    assert all(later > earlier for earlier, later in zip([0, *held], held, strict=False))
    y = block(inputs())
    assert choice.held > 0
    del y
    assert choice.held == 0


@on_ranks(1)
def test_a_budget_is_planned_once_for_arguments_of_equal_shapes() -> None:
    (block,) = blocks_of([Attends()], 10**6)
    choice: Any = block._bmt_block.keep.choice  # type: ignore[union-attr]
    held = []
    for length in (6, 4, 6, 4):
        y = block(inputs(length=length))
        held.append(choice.held)
        y.sum().backward()
        del y
    assert held[:2] == [0, 0] and held[2] > held[3] > 0


class Repeats(nn.Module):
    """Computes as many rows as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.times = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x.repeat(self.times, 1, 1))))
        return y.tanh()


@on_ranks(1)
@cells("is_cast", [False, True])
def test_of_a_product_the_result_alone_is_kept_if_it_fits(is_cast: bool) -> None:
    of_up, of_down = (2 * 6 * width * (2 if is_cast else 4) for width in (32, WIDTH))
    block = Block(Repeats(), keep=of_up + of_down)
    choice = block._bmt_block.keep.choice
    held = []
    for block.times in (1, 1, 2, 3):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            y = block(inputs())
        held.append(choice.held)
        y.float().sum().backward()
        del y
    # Twice the first result does not fit, twice the second does.
    assert held == [0, of_up + of_down, 2 * of_down, 3 * of_down]


class Experts(nn.Module):
    """Two groups of rows, each with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, 32, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.randn(2, 32, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([8, 12], dtype=torch.int32)
        hidden = F.silu(F.grouped_mm(x, self.up, offs=ends))
        return torch.tanh(F.grouped_mm(hidden, self.down, offs=ends))


@on_ranks(2)
def test_products_of_groups_of_rows_are_kept() -> None:
    torch.manual_seed(0)
    layer, grads = Experts(), []
    x = inputs().flatten(0, 1).bfloat16()
    for block in (*blocks_of([layer], None), *blocks_of([layer], 10**6)):
        for _ in range(2):
            block.zero_grad()
            y = block(x)
            keep = block._bmt_block.keep  # type: ignore[union-attr]
            held = 0 if keep is None else keep.choice.held
            y.float().square().sum().backward()
        grads.append([full_gradient(p) for p in block.parameters()])
    assert_equal(*grads)
    assert held == 12 * (32 + WIDTH) * 2


class GivesBoth(Attends):
    """Returns a result that later code writes to."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.up(x)
        return hidden, self.down(torch.tanh(hidden))


@on_ranks(1)
def test_results_that_are_overwritten_outside_are_computed_again() -> None:
    layer, grads = GivesBoth(), []
    for block in (*blocks_of([layer], None), *blocks_of([layer], "products")):
        hidden, y = block(inputs())
        with torch.no_grad():
            hidden.mul_(3)
        y.square().sum().backward()
        grads.append([full_gradient(p) for p in block.parameters()])
    assert_equal(*grads)


@on_ranks(1)
@cells("keep", [BOTH, chosen])
def test_backward_may_run_twice(keep: Any) -> None:
    torch.manual_seed(0)
    blocks = [*blocks_of([Attends(0.3)], None), *blocks_of([Attends(0.3)], keep)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    grads = []
    for block in blocks:
        torch.manual_seed(1)
        y = block(inputs())
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        grads.append([full_gradient(p) for p in block.parameters()])
    assert_equal(*grads)


class Overwrites(Attends):
    """Writes to the results of linear layers, in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.heads(x).mul_(0.5)[..., :WIDTH]
        y: torch.Tensor = self.down(F.relu(self.up(heads), inplace=True))
        return y.tanh()


class PartOfTorch(Attends):
    """A part is recomputed by torch's checkpoint, another without gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = super().forward(x)
        y: torch.Tensor = checkpoint(super().forward, x + shift, use_reentrant=False)
        return y + self.out(y)


class Differentiates(Attends):
    """Asks for a gradient in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.out(x))
        y = super().forward(h)
        (slope,) = torch.autograd.grad(y.square().sum(), h, retain_graph=True)
        return y * slope + self.out(y)


class SeesLastRows(Attends):
    """Gives torch's attention a ``CausalBias``, which knows torch's function by identity."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        rows, length = x.shape[1] // 2, x.shape[1]
        y = F.scaled_dot_product_attention(
            query[..., -rows:, :], key, value, causal_lower_right(rows, length)
        )
        return torch.cat([x[:, :-rows], self.out(y.transpose(1, 2).flatten(2))], 1)


@on_ranks(2)
@cells("keep", [BOTH, 10**6, chosen])
@cells("kind", [Overwrites, PartOfTorch, Differentiates])
def test_forwards_that_write_recompute_or_differentiate_give_the_same(
    kind: type[nn.Module], keep: Any
) -> None:
    torch.manual_seed(0)
    layers = [kind() for _ in range(2)]
    expected, _ = train(blocks_of(layers, None))
    found, _ = train(blocks_of(layers, keep))
    assert_equal(found, expected)


@on_ranks(1)
@cells("keep", [None, BOTH, chosen])
def test_attention_with_a_causal_bias_may_be_kept(keep: Any) -> None:
    layer, x = SeesLastRows(), inputs()
    found = []
    for module in (layer, *blocks_of([layer], keep)):
        module(x).square().sum().backward()
        found.append([full_gradient(p) for p in (module.heads.weight, module.out.weight)])
    torch.testing.assert_close(*found)


@on_ranks(1)
def test_overwritten_results_are_not_held() -> None:
    (block,) = blocks_of([Overwrites()], "products")
    kept = []
    engine = block._bmt_block  # type: ignore[union-attr]
    learn = engine.keep.end_forward
    engine.keep.end_forward = lambda kept_results, *args: (
        learn(kept_results, *args),
        kept.append(kept_results),
    )
    block(inputs())
    assert [call[1] is None for call in kept[0]._calls[None]] == [True, True, False]


class Changes(nn.Module):
    """Calls other layers when it is recomputed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.how, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        is_again = self.calls % 2 == 0
        if is_again and self.how == "shape":
            x = torch.cat([x, x])
        if is_again and self.how == "layer":
            return torch.tanh(self.one(torch.tanh(self.two(x))))
        if is_again and self.how == "operation":
            return torch.tanh(x @ self.one.weight)
        return torch.tanh(self.two(torch.tanh(self.one(x))))


@on_ranks(2)
@cells("how", ["shape", "layer", "operation"])
def test_another_recomputation_is_an_error(how: str) -> None:
    block = Block(Changes(how), keep="products")
    y = block(torch.ones(2, 4))
    expected = "matmul of|linear of" if how == "operation" else "linear of"
    with pytest.raises(BmtError, match=rf"Call 1 of a Block with keep.* was ({expected})"):
        y.sum().backward()


@on_ranks(1)
def test_wrong_values_are_errors() -> None:
    for value in (
        "attentions",
        (),
        ("attention", "linear"),
        0,
        -1,
        True,
        1.5,
        nn.Linear,
        ["products"],
        (["products"],),
    ):
        layers = nn.ModuleList([Attends()])
        for make, what in (
            (Block, Attends()),
            (TransformerBlockList, layers),
            (BMTrainModelWrapper, layers),
        ):
            with pytest.raises(ConfigError, match="keep must be 'attention', 'products'"):
                make(what, keep=value)  # type: ignore[operator]
        assert not isinstance(layers[0], Block)
    with pytest.raises(ConfigError, match="use_checkpoint=False nothing is"):
        Block(Attends(), use_checkpoint=False, keep="attention")
    block = Block(Attends(), keep=lambda operation, args: 1)
    with pytest.raises(TypeError, match=r"returned 1 for .*It must return True"):
        block(inputs())


@on_ranks(1)
def test_a_block_without_attention_says_so_once() -> None:
    block = Block(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), keep=BOTH)
    with pytest.warns(UserWarning, match="Sequential keeps no 'attention'"):
        block(inputs()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block(inputs()).sum().backward()


@on_ranks(1)
def test_functions_of_torch_are_put_back_when_the_run_ends() -> None:
    from bmt_core import init_distributed, shutdown

    Block(Attends(), keep="attention")
    during = F.scaled_dot_product_attention
    shutdown()
    assert F.scaled_dot_product_attention is not during
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    init_distributed()


@on_ranks(2)
def test_the_wrapper_leaves_blocks_as_they_were_made() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Attends() for _ in range(4)])
    Block(layers[1], use_checkpoint=False)
    Block(layers[2], keep="attention")
    BMTrainModelWrapper(layers, keep=10**6)
    engines = [layer._bmt_block for layer in layers]
    assert engines[0].keep.choice is engines[3].keep.choice
    assert engines[1].keep is None and engines[2].keep.choice == {"attention"}
    copied = copy.deepcopy(layers)
    of_copies = [layer._bmt_block.keep for layer in copied]
    assert of_copies[0].choice is of_copies[3].choice is not engines[0].keep.choice
    _, calls = train([*copied])
    assert calls[LINEAR] == 3 and not calls[ATTENTION]  # of the third


@on_ranks(2)
def test_a_model_of_hugging_face_keeps_bytes() -> None:
    from hf_models import llama

    grads, counts = [], []
    for keep in (None, BOTH, 10**6):
        torch.manual_seed(0)
        model = BMTrainModelWrapper(llama(), keep=keep)  # type: ignore[arg-type]
        for _ in range(2):
            model.zero_grad()
            tokens = torch.arange(16).view(2, 8)
            loss = model(input_ids=tokens, labels=tokens).loss
            with Calls() as calls:
                loss.backward()
        grads.append(grads_of(model))
        counts.append(calls.count[ATTENTION])
    assert_equal(grads[1], grads[0])
    assert_equal(grads[2], grads[0])
    assert counts == [2, 0, 0]


class TwoProducts(nn.Module):
    """Two products of one input, which may be dropped out at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.down, self.dropout = nn.Linear(32, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.down(self.gate(x) * self.up(x)))
        return y


@on_ranks(1)
def test_a_budget_is_planned_for_training_apart_from_evaluation() -> None:
    block = Block(TwoProducts(), keep=10**6)
    for is_training in (False, True, True):
        block.train(is_training)
        y = block(inputs().requires_grad_())
        with Calls() as calls:
            y.square().sum().backward()
    assert calls.count[LINEAR] == 0  # the mask of dropout needs the last product, which is kept
