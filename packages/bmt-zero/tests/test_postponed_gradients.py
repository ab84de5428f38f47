"""Weight gradients that are computed after the backward pass: what it leaves, what it costs, and what goes wrong."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_models import Uses, full_gradient

from bmt_core import BlockUse, BmtError, PostponedGradients, postpone_weight_gradients, rank
from bmt_testing import run_ranks
from bmt_zero import Block
from bmt_zero.block_call import BlockCall
from bmt_zero.direct_linear import WeightGradient


def data(number: int = 0) -> torch.Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(number))


def block(level: int, use_checkpoint: bool = False) -> Any:
    torch.manual_seed(0)
    return Block(Uses(), use_checkpoint, level)


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [full_gradient(parameter) for parameter in module.parameters()]


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


def products_of_both(level: int, use_checkpoint: bool) -> list[Counter[Any]]:
    """Of an ordinary backward pass, of a postponed one, and of what it left."""
    module = Block(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6, bias=False)), use_checkpoint, level)
    found = []
    x = data().requires_grad_()
    ordinary, split = module(x).square().sum(), module(x).square().sum()
    with Products() as products:
        ordinary.backward()
    found.append(products.shapes)
    with Products() as products:
        postponed = postponed_backward(split)
    found.append(products.shapes)
    with Products() as products:
        postponed.compute()
        postponed.compute()  # does nothing
    return [*found, products.shapes]


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_each_product_is_computed_once_and_those_for_weights_are_left(level: int, use_checkpoint: bool) -> None:
    weights = Counter({((9, 8), (8, 6)): 1, ((6, 8), (8, 9)): 1})
    for ordinary, inputs, left in run_ranks(products_of_both, 2, level, use_checkpoint):
        assert left == weights and inputs + left == ordinary


def products_of_joined() -> tuple[Counter[Any], list[Any], list[Any]]:
    """The products for weights of two micro-batches; and the gradients beside those of ordinary backward passes."""
    found: list[Any] = []
    for joins in (True, False):
        torch.manual_seed(0)
        module = Block(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6, bias=False)), False, 3).double()
        left = []
        for micro in range(2):
            module.set_use(BlockUse(last_backward=micro == 1))
            loss = module(data(micro).double()).square().sum()
            if joins:
                left.append(postponed_backward(loss))
            else:
                loss.backward()
        with Products() as products:
            PostponedGradients.joined(left).compute()
        found += [products.shapes, gradients(module)]
    return found[0], found[1], found[3]


def test_joined_gradients_are_one_product_for_each_layer() -> None:
    for products, joined, ordinary in run_ranks(products_of_joined, 2):
        assert products == {((9, 16), (16, 6)): 1, ((6, 16), (16, 9)): 1}
        torch.testing.assert_close(joined, ordinary)


def in_order(order: list[int], level: int, use_checkpoint: bool) -> list[torch.Tensor | None]:
    """Gradients of three micro-batches, of which the last is reduced with what was held back of the others."""
    module = block(level, use_checkpoint)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    left = []
    for micro in range(3):
        module.set_use(BlockUse(last_backward=micro == 2))
        left.append(postponed_backward(module(data(micro)).square().sum()))
    for micro in order:
        left[micro].compute()
    optimizer.step()
    return gradients(module)


def plain(count: int) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    module = Uses()
    for micro in range(count):
        (2 * module(data(micro)).square().sum()).backward()  # of two ranks
    return gradients(module)


@pytest.mark.parametrize(("level", "use_checkpoint"), [(0, False), (1, True), (2, False), (3, True)])
def test_gradients_may_be_computed_in_any_order(level: int, use_checkpoint: bool) -> None:
    expected = plain(3)
    # In the last one, what comes after the last micro-batch is reduced by the optimizer's step.
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        for found in run_ranks(in_order, 2, order, level, use_checkpoint):
            torch.testing.assert_close(found, expected)


def joined_in_half_precision(level: int, device: str) -> tuple[list[Any], list[Any], bool]:
    """Gradients of five micro-batches: joined in twos, while those of a later one are postponed; and one after the other.

    Also: whether what stood for held-back gradients is gone when they are reduced.
    """
    results = []
    for joins in (True, False):
        module = block(level).bfloat16().to(device)
        left, due = {}, []
        for micro in range(5):
            module.set_use(BlockUse(last_backward=micro == 4))
            loss = module(data(micro).bfloat16().to(device)).float().square().sum()
            if not joins:
                loss.backward()
                continue
            left[micro] = postponed_backward(loss)
            if micro > 0:
                due.append(left.pop(micro - 1))
            if len(due) == 2:
                PostponedGradients.joined(due).compute()
                due.clear()
        if joins:
            left.pop(4).compute()
        results.append(gradients(module))
    (group, *_) = module._bmt_block.state.groups
    # With no gradient to which they are added, reduced gradients need no second sum.
    return *results, group.ledger._placeholders == [] and group.ledger.sum._total is None  # type: ignore[return-value]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_in_half_precision_products_of_several_micro_batches_are_one(level: int, device: str) -> None:
    for joined, ordinary, is_clear in run_ranks(joined_in_half_precision, 2, level, device, init={"device": device}):
        torch.testing.assert_close(joined, ordinary, rtol=0.02, atol=0.02)
        assert is_clear


def layer_and_gradients_left(passes: int, rows: int, linear: bool = True) -> tuple[Any, list[PostponedGradients]]:
    """A Block of a weight of 64 x 64 in bfloat16, whose sum in float32 is 16 KiB, and what passes of ``rows`` rows leave of it."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False) if linear else nn.LayerNorm(64)
    module: Any = Block(nn.Sequential(layer), False, 3, reduce_dtype="param").bfloat16()
    left = []
    for number in range(passes):
        module.set_use(BlockUse(last_backward=number == passes - 1))
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(number)).bfloat16()
        left.append(postponed_backward(module(x).float().square().sum()))
    return module, left


def numbers_to_join() -> list[int]:
    """For four rows, whose input and gradient are 1 KiB: of one pass, of as many as need no sum, of more. For others: of four."""
    (of_few,), (of_many,), (of_none,) = (
        layer_and_gradients_left(1, rows, linear)[1] for rows, linear in ((4, True), (64, True), (4, False))
    )
    few = [of_few.number_to_join(passes) for passes in (1, 25, 26)]
    return [*few, of_many.number_to_join(4), of_none.number_to_join(4)]


def test_as_many_passes_are_joined_as_take_little_memory_beside_the_sum() -> None:
    assert run_ranks(numbers_to_join, 2) == [[1, 25, 9, 1, 1]] * 2


def joined_by(number_of_rank: list[int]) -> tuple[torch.Tensor, bool]:
    """The gradient of four passes, joined by each rank as it likes; and whether this rank has a sum of it in float32."""
    module, left = layer_and_gradients_left(4, 4)
    number = number_of_rank[rank()]
    (group,) = module._bmt_block.state.groups
    is_summed = False
    for first in range(0, 4, number):
        PostponedGradients.joined(left[first : first + number]).compute()
        is_summed |= group.ledger._held_back is not None
    torch.optim.SGD(module.parameters(), lr=0.0).step()
    gradient = full_gradient(module[0].weight)
    assert gradient is not None
    return gradient, is_summed


def test_joined_products_are_rounded_once_and_ranks_may_join_as_they_like() -> None:
    """All passes of a step need no float32 sum on a rank; several ranks reduce in float32 whether they have one or not."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 64, bias=False).bfloat16().double()
    for number in range(4):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).bfloat16().double()
        plain(x).square().sum().backward()
    expected = plain.weight.grad
    assert expected is not None
    for numbers in ([4], [4, 4], [4, 1], [3, 4]):
        for at, (gradient, is_summed) in enumerate(run_ranks(joined_by, len(numbers), numbers)):
            assert is_summed == (numbers[at] < 4)
            # Outputs and their gradients are rounded too.
            error = (gradient.double() / len(numbers) - expected).norm() / expected.norm()
            assert gradient.dtype == torch.bfloat16 and error < 2**-8, (numbers, error)


def kept_memory() -> tuple[bool, bool, bool, bool]:
    """Whether inputs of layers and gathered parameters live after the backward pass, and after compute()."""
    module = Block(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), False, 3)
    inputs: list[Any] = []

    def note(layer: nn.Module, args: Any) -> None:
        inputs.append(weakref.ref(args[0].untyped_storage()))

    module[2].register_forward_pre_hook(note)  # type: ignore[index]
    gc.disable()  # what is kept by a cycle counts as kept
    try:
        postponed = postponed_backward(module(data()).square().sum())
        block = module._bmt_block.state  # type: ignore[union-attr]
        (group,) = block.groups
        is_gathered = group.buffer.tensor.untyped_storage().nbytes() > 0
        is_kept = inputs[0]() is not None
        graph = [part for part in gc.get_objects() if isinstance(part, BlockCall) and part.block is block]
        postponed.compute()
        return is_gathered, is_kept, inputs[0]() is not None, bool(graph)
    finally:
        gc.enable()


def test_only_what_products_read_is_kept_and_only_until_they_are_computed() -> None:
    assert run_ranks(kept_memory, 2) == [(False, True, False, False)] * 2


class Interrupt(Exception):
    pass


@pytest.mark.parametrize("is_temporary", [True, False])
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


def fail(grad: torch.Tensor) -> None:
    raise Interrupt


def after(what: str, level: int) -> list[torch.Tensor | None]:
    """Gradients of a step of one micro-batch, after a step that went wrong."""
    module = block(level)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    if what == "failed backward":
        left = postponed_backward(module(data(1)).square().sum())
        x = data(2).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(Interrupt):
            postponed_backward((module(module(x))).square().sum())
        left.compute()  # as if the failed one had not been tried
        (other, *_) = [g for g in gradients(module) if g is not None]
        assert other.any()
    elif what == "dropped":
        postponed_backward(module(data(1)).square().sum())
        with pytest.raises(BmtError, match=r"postponed in 1 calls and are not computed.*Call compute\(\)"):
            optimizer.step()
    elif what == "cleared":
        left = postponed_backward(module(data(1)).square().sum())
        optimizer.zero_grad()
        with pytest.raises(BmtError, match=r"compute\(\) came after .grad was cleared"):
            left.compute()
    optimizer.zero_grad()
    postponed_backward(module(data()).square().sum()).compute()
    optimizer.step()
    return gradients(module)


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("what", ["failed backward", "dropped", "cleared"])
def test_a_block_is_usable_after_a_step_that_went_wrong(what: str, level: int) -> None:
    expected = plain(1)
    for found in run_ranks(after, 2, what, level):
        torch.testing.assert_close(found, expected)


def modified(what: str) -> None:
    x = data().requires_grad_()
    read = x * 1.0
    module = Block(nn.Sequential(nn.Linear(6, 6)), False)
    output = module(read)
    given = torch.ones_like(output)
    with postpone_weight_gradients() as postponed:
        torch.autograd.backward(output, given)
    with torch.no_grad():
        {"input": read, "gradient": given}[what].zero_()
    with pytest.raises(
        BmtError, match=r"modified by an in-place operation after the backward pass.*\(6, 8\) and \(8, 6\)"
    ):
        postponed.compute()


@pytest.mark.parametrize("what", ["input", "gradient"])
def test_what_is_read_later_must_stay_as_it_is(what: str) -> None:
    run_ranks(modified, 2, what)


def beside_another_gradient() -> list[torch.Tensor | None]:
    """The gradient of the output is that of a leaf, too, where more is added before the products are computed."""
    torch.manual_seed(0)
    module, beside = Block(nn.Sequential(nn.Linear(6, 6)), False), torch.zeros(8, 6, requires_grad=True)
    left = []
    for micro in range(2):
        x, other = data(micro).flatten(0, 1), beside.clone()
        left.append(postponed_backward((module(x) + other).square().sum()))
    for postponed in left:
        postponed.compute()
    return gradients(module)


def test_a_gradient_that_others_get_too_is_not_taken_away() -> None:
    torch.manual_seed(0)
    module = nn.Linear(6, 6)
    for micro in range(2):
        (2 * module(data(micro).flatten(0, 1)).square().sum()).backward()
    for found in run_ranks(beside_another_gradient, 2):
        torch.testing.assert_close(found, gradients(module))


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


def watched(level: int) -> tuple[int, list[torch.Tensor | None], int, list[torch.Tensor | None], torch.Tensor]:
    """Gradients with a hook inside the block, with one on a shard, and one that torch.autograd.grad asks for."""
    module = Block(Watched(), False, level)
    seen = []
    left = postponed_backward(module(data()).square().sum())
    seen_inside = len(module.seen)  # type: ignore[arg-type]
    left.compute()
    inside = gradients(module)
    module.zero_grad()
    weight = next(iter(module.parameters()))
    handle = weight.register_hook(lambda grad: seen.append(grad))
    left = postponed_backward(module(data()).square().sum())
    seen_outside = len(seen)
    left.compute()
    handle.remove()
    with postpone_weight_gradients() as left:
        (asked,) = torch.autograd.grad(module(data()).square().sum(), [weight])
    left.compute()
    return seen_inside, inside, seen_outside, gradients(module), weight.gather_like(asked)  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 3])
def test_what_others_are_to_see_is_not_postponed(level: int) -> None:
    module = Watched()
    (2 * module(data()).square().sum()).backward()
    expected = gradients(module)
    for seen_inside, inside, seen_outside, outside, asked in run_ranks(watched, 2, level):
        assert seen_inside == seen_outside == 1
        torch.testing.assert_close([inside, outside, asked], [expected, expected, expected[0]])


def with_second_derivatives() -> None:
    module = block(3)
    with postpone_weight_gradients() as postponed, pytest.raises(BmtError, match="create_graph=True reached a Block"):
        module(data()).square().sum().backward(create_graph=True)
    postponed.compute()


def test_second_derivatives_are_refused() -> None:
    run_ranks(with_second_derivatives, 2)
