"""Weight gradients that are computed after the backward pass: what it leaves, what it costs, and
what goes wrong.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_models import Interrupt, Uses, all_weights, grads_of, interrupt

from bmt_core import BmtError, rank
from bmt_core.run.runtime import current, world_size
from bmt_params import BlockUse, PostponedGradients, postpone_weight_gradients
from bmt_testing import on_ranks
from bmt_zero import Block
from bmt_zero.block_call import BlockCall
from bmt_zero.direct_linear import WeightGradient
from cells import cells


def data(number: int = 0) -> torch.Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(number))


def uses() -> Uses:
    torch.manual_seed(0)
    return Uses()


def grads_of_plain(passes: int) -> dict[str, Any]:
    """The sum over two ranks after passes over the data of each number."""
    plain = uses()
    for number in range(passes):
        plain(data(number)).square().sum().backward()
    return grads_of(plain, times=2)


def layers(use_checkpoint: bool, level: int) -> Any:
    torch.manual_seed(0)
    return Block(
        nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6, bias=False)),
        use_checkpoint,
        level,
    )


def postponed_backward(loss: torch.Tensor) -> PostponedGradients:
    with postpone_weight_gradients() as postponed:
        loss.backward()
    return postponed


class Products(TorchDispatchMode):
    """The shapes of matrix products, and of sums over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            self.shapes[tuple(args[-2].shape), tuple(args[-1].shape)] += 1
        return func(*args, **(kwargs or {}))


@on_ranks(2)
@cells("level", [0, 3])
@cells("use_checkpoint", [False, True])
@all_weights
def test_each_product_is_computed_once_and_those_for_weights_are_left(
    level: int, use_checkpoint: bool
) -> None:
    block = layers(use_checkpoint, level)
    x = data().requires_grad_()
    ordinary, split = block(x).square().sum(), block(x).square().sum()
    with Products() as of_ordinary:
        ordinary.backward()
    with Products() as of_inputs:
        postponed = postponed_backward(split)
    with Products() as left:
        postponed.compute()
        postponed.compute()  # does nothing
    assert left.shapes == {((9, 8), (8, 6)): 1, ((6, 8), (8, 9)): 1}
    assert of_inputs.shapes + left.shapes == of_ordinary.shapes


@on_ranks(2)
@cells(
    ("level", "use", "are_postponed"),
    [
        (3, BlockUse(), False),
        (1, BlockUse(), True),
        (3, BlockUse(last_backward=False), True),
        (3, BlockUse(first_backward=False, last_backward=False), True),
        (3, BlockUse(first_backward=False), True),
    ],
)
def test_products_of_small_weights_are_left_where_a_block_has_several_micro_batches(
    level: int, use: BlockUse, are_postponed: bool
) -> None:
    """And at levels 0 and 1. Elsewhere autograd computes them at once."""
    block = layers(False, level)
    block.set_use(use)
    postponed = postponed_backward(block(data()).square().sum())
    with Products() as left:
        postponed.compute()
    assert left.shapes == ({((9, 8), (8, 6)): 1, ((6, 8), (8, 9)): 1} if are_postponed else {})


@on_ranks(2)
@all_weights
def test_joined_gradients_are_one_product_for_each_layer() -> None:
    block, ordinary = (layers(False, 3).double() for _ in range(2))
    left = []
    for micro_batch in range(2):
        for each in (block, ordinary):
            each.set_use(BlockUse(last_backward=micro_batch == 1))
        left.append(postponed_backward(block(data(micro_batch).double()).square().sum()))
        ordinary(data(micro_batch).double()).square().sum().backward()
    with Products() as products:
        PostponedGradients.joined(left).compute()
    assert products.shapes == {((9, 16), (16, 6)): 1, ((6, 16), (16, 9)): 1}
    torch.testing.assert_close(grads_of(block), grads_of(ordinary))


# In the last order, what comes after the last micro-batch is reduced by the optimizer's step.
@on_ranks(2)
@cells("order", [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
@cells(("level", "use_checkpoint"), [(0, False), (1, True), (2, False), (3, True)])
@all_weights
def test_gradients_may_be_computed_in_any_order(
    level: int, use_checkpoint: bool, order: list[int]
) -> None:
    """Of three micro-batches the last is reduced with what was held back of the others."""
    block = Block(uses(), use_checkpoint, level)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
    left = []
    for micro_batch in range(3):
        block.set_use(BlockUse(last_backward=micro_batch == 2))
        left.append(postponed_backward(block(data(micro_batch)).square().sum()))
    for micro_batch in order:
        left[micro_batch].compute()
    optimizer.step()
    torch.testing.assert_close(grads_of(block), grads_of_plain(3))


def check_joined_in_half_precision(level: int) -> None:
    """Five micro-batches: joined in twos, while those of a later one are postponed; and one after
    the other.
    """
    device = current().device
    block, ordinary = (Block(uses(), False, level).bfloat16().to(device) for _ in range(2))
    left, due = {}, []
    for micro_batch in range(5):
        x = data(micro_batch).bfloat16().to(device)
        for each in (block, ordinary):
            each.set_use(BlockUse(last_backward=micro_batch == 4))
        ordinary(x).float().square().sum().backward()
        left[micro_batch] = postponed_backward(block(x).float().square().sum())
        if micro_batch > 0:
            due.append(left.pop(micro_batch - 1))
        if len(due) == 2:
            PostponedGradients.joined(due).compute()
            due.clear()
    left.pop(4).compute()
    torch.testing.assert_close(grads_of(block), grads_of(ordinary), rtol=0.02, atol=0.02)
    for each in (block, ordinary):
        ledger = each._bmt_block.state.groups[0].ledger
        assert ledger._placeholders == []  # what stood for held-back gradients is gone
        # With no gradient to which they are added, reduced ones need no second sum.
        assert ledger.sum._total is None


@on_ranks(2)
@cells("level", [0, 1, 3])
@all_weights
def test_in_half_precision_products_of_several_micro_batches_are_one(level: int) -> None:
    check_joined_in_half_precision(level)


@pytest.mark.gpu
@on_ranks(2, init={"device": "cuda"})
@pytest.mark.parametrize("level", [0, 1, 3])
@all_weights
def test_on_gpus_in_half_precision_products_of_several_micro_batches_are_one(level: int) -> None:
    check_joined_in_half_precision(level)


def layer_and_gradients_left(
    passes: int, rows: int, linear: bool = True
) -> tuple[Any, list[PostponedGradients]]:
    """A Block of a weight of 64 x 64 in bfloat16, whose sum in float32 is 16 KiB, and what passes
    of ``rows`` rows leave of it.
    """
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False) if linear else nn.LayerNorm(64)
    block: Any = Block(nn.Sequential(layer), False, 3, reduce_dtype="param").bfloat16()
    left = []
    for number in range(passes):
        block.set_use(BlockUse(last_backward=number == passes - 1))
        left.append(postponed_backward(block(rows_of(number, rows)).float().square().sum()))
    return block, left


def rows_of(number: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(number)).bfloat16()


# Four rows, whose input and gradient are 1 KiB: of one pass, of as many as need no sum, of more.
# Others: of four passes.
NUMBERS = [(4, True, 1, 1), (4, True, 25, 25), (4, True, 26, 9), (64, True, 4, 1), (4, False, 4, 1)]


@on_ranks(2)
@cells(("rows", "linear", "passes", "joined"), NUMBERS)
@all_weights
def test_as_many_passes_are_joined_as_take_little_memory_beside_the_sum(
    rows: int, linear: bool, passes: int, joined: int
) -> None:
    _, (left,) = layer_and_gradients_left(1, rows, linear)
    assert left.number_to_join(passes) == joined


@on_ranks(1, 2)
@cells("numbers", [[4, 4], [4, 1], [3, 4]])
@all_weights
def test_joined_products_are_rounded_once_and_ranks_may_join_as_they_like(
    numbers: list[int],
) -> None:
    """All passes of a step need no float32 sum on a rank; several ranks reduce in float32 whether
    they have one or not.
    """
    block, left = layer_and_gradients_left(4, 4)
    number = numbers[rank()]
    is_summed = False
    for first in range(0, 4, number):
        PostponedGradients.joined(left[first : first + number]).compute()
        is_summed |= block._bmt_block.state.groups[0].ledger._held_back is not None
    torch.optim.SGD(block.parameters(), lr=0.0).step()
    assert is_summed == (number < 4)
    torch.manual_seed(0)
    plain = nn.Linear(64, 64, bias=False).bfloat16().double()
    for each in range(4):
        plain(rows_of(each, 4).double()).square().sum().backward()
    found, expected = grads_of(block)["0.weight"], plain.weight.grad
    assert expected is not None and found.dtype == torch.bfloat16
    # Outputs and their gradients are rounded too.
    assert (found.double() / world_size() - expected).norm() / expected.norm() < 2**-8


@on_ranks(2)
@all_weights
def test_only_what_products_read_is_kept_and_only_until_they_are_computed() -> None:
    block = Block(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), False, 3)
    inputs: list[Any] = []
    block[2].register_forward_pre_hook(
        lambda layer, args: inputs.append(weakref.ref(args[0].untyped_storage()))
    )
    gc.disable()  # what is kept by a cycle counts as kept
    try:
        postponed = postponed_backward(block(data()).square().sum())
        state = block._bmt_block.state
        assert state.groups[0].buffer.tensor.untyped_storage().nbytes() == 0
        assert inputs[0]() is not None
        assert not [
            part for part in gc.get_objects() if isinstance(part, BlockCall) and part.block is state
        ]
        postponed.compute()
        assert inputs[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_temporary", [True, False])
@all_weights
def test_memory_that_is_lent_is_copied_for_later(is_temporary: bool) -> None:
    grad, inputs = torch.ones(4, 3), torch.ones(4, 2)
    gradient = WeightGradient(grad.t(), inputs)
    gradient.is_temporary = is_temporary
    gradient.keep(lambda tensor: False)
    grad.zero_()
    if is_temporary:
        gradient.check()
        assert torch.equal(gradient.computed(), torch.full((3, 2), 4.0))
    else:
        with pytest.raises(BmtError, match="modified by an in-place operation"):
            gradient.check()


@on_ranks(2)
@cells("level", [0, 1, 3])
@cells("what", ["failed backward", "dropped", "cleared"])
@all_weights
def test_a_block_is_usable_after_a_step_that_went_wrong(what: str, level: int) -> None:
    block = Block(uses(), False, level)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.0)
    left = postponed_backward(block(data(1)).square().sum())
    if what == "failed backward":
        x = data(2).requires_grad_()
        x.register_hook(interrupt)
        with pytest.raises(Interrupt):
            postponed_backward(block(block(x)).square().sum())
        left.compute()  # as if the failed one had not been tried
        first = next(grad for grad in grads_of(block).values() if grad is not None)
        assert first.any()
    elif what == "dropped":
        del left
        with pytest.raises(
            BmtError, match=r"postponed in 1 calls and are not computed.*Call compute\(\)"
        ):
            optimizer.step()
    else:
        optimizer.zero_grad()
        with pytest.raises(BmtError, match=r"compute\(\) came after .grad was cleared"):
            left.compute()
    optimizer.zero_grad()
    postponed_backward(block(data()).square().sum()).compute()
    optimizer.step()
    torch.testing.assert_close(grads_of(block), grads_of_plain(1))


@on_ranks(2)
@cells("what", ["input", "gradient"])
@all_weights
def test_what_is_read_later_must_stay_as_it_is(what: str) -> None:
    read = data().requires_grad_() * 1.0
    output = Block(nn.Sequential(nn.Linear(6, 6)), False)(read)
    given = torch.ones_like(output)
    with postpone_weight_gradients() as postponed:
        torch.autograd.backward(output, given)
    with torch.no_grad():
        {"input": read, "gradient": given}[what].zero_()
    with pytest.raises(
        BmtError,
        match=r"modified by an in-place operation after the backward pass.*\(6, 8\) and \(8, 6\)",
    ):
        postponed.compute()


@on_ranks(2)
@all_weights
def test_a_gradient_that_others_get_too_is_not_taken_away() -> None:
    """The gradient of the output is that of a leaf, too, where more is added before the products
    are computed.
    """
    torch.manual_seed(0)
    plain, layer = nn.Linear(6, 6), nn.Linear(6, 6)
    layer.load_state_dict(plain.state_dict())
    block, beside = Block(nn.Sequential(layer), False), torch.zeros(8, 6, requires_grad=True)
    left = []
    for number in range(2):
        x = data(number).flatten(0, 1)
        plain(x).square().sum().backward()
        left.append(postponed_backward((block(x) + beside.clone()).square().sum()))
    for postponed in left:
        postponed.compute()
    torch.testing.assert_close([*grads_of(block).values()], [*grads_of(plain, times=2).values()])


class Watched(nn.Module):
    """A layer in which somebody watches the whole gradient of the weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.weight.requires_grad:
            self.layer.weight.register_hook(self.seen.append)
        out: torch.Tensor = self.layer(x)
        return out


@on_ranks(2)
@cells("level", [0, 3])
@all_weights
def test_what_others_are_to_see_is_not_postponed(level: int) -> None:
    """A hook inside the block, one on a shard, and what torch.autograd.grad asks for."""
    plain, block = Watched(), Block(Watched(), False, level)
    plain(data()).square().sum().backward()
    expected = grads_of(plain, times=2)
    left = postponed_backward(block(data()).square().sum())
    assert len(block.seen) == 1
    left.compute()
    torch.testing.assert_close(grads_of(block), expected)
    block.zero_grad()
    weight: Any = next(iter(block.parameters()))
    seen: list[torch.Tensor] = []
    handle = weight.register_hook(seen.append)
    left = postponed_backward(block(data()).square().sum())
    assert len(seen) == 1
    left.compute()
    handle.remove()
    with postpone_weight_gradients() as left:
        (asked,) = torch.autograd.grad(block(data()).square().sum(), [weight])
    left.compute()
    torch.testing.assert_close(grads_of(block), expected)
    torch.testing.assert_close(weight.gather_like(asked), expected["layer.weight"])


@on_ranks(2)
@all_weights
def test_second_derivatives_are_refused() -> None:
    block = Block(uses(), False, 3)
    with (
        postpone_weight_gradients() as postponed,
        pytest.raises(BmtError, match="create_graph=True reached a Block"),
    ):
        block(data()).square().sum().backward(create_graph=True)
    postponed.compute()
