"""Linear layers, whose gradients bmt-zero computes itself: they are those of torch, and nothing is
copied or computed twice.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from zero_models import Products, all_weights, full_gradient, grads_of

from bmt_core.run.runtime import world_size
from bmt_params.modules.layer_gradients import running_backward
from bmt_testing import on_ranks
from bmt_zero import Block, direct_linear, no_sync
from bmt_zero.block_call import BlockCall
from cells import cells
from pairwise import pairwise


class Odd(nn.Module):
    """Linear layers in the uses that are not the ordinary one."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=case != "without bias")
        if case == "tied":
            self.second.weight = self.first.weight
        if case == "frozen":
            self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.case == "hooked":
            self.first.weight.register_hook(lambda grad: grad * 2)
        h = nn.functional.relu_(self.first(x))
        if self.case == "twice":
            h = self.first(h)
        if self.case == "vector":
            h = h + self.first(h[0, 0])
        h = self.second(h)
        if self.case == "hooked late":
            self.second.weight.register_hook(lambda grad: grad * 2)
        if self.case == "penalty":
            h = h + (self.first.weight**2).sum() + self.first.bias.sum()
        return h


CASES = ["twice", "tied", "frozen", "hooked", "hooked late", "penalty", "vector", "without bias"]
# Plain torch's checkpoint calls a hook that forward registers twice.
USES = pairwise(
    CASES,
    [(3, False), (2, False), (3, True)],
    [torch.float32, torch.bfloat16],
    allowed=lambda case, call, dtype: not (case.startswith("hooked") and call[1]),
)


@on_ranks(2)
@cells(("case", "call", "dtype"), USES)
@all_weights
def test_odd_uses_have_the_gradients_of_plain_torch(
    case: str, call: tuple[int, bool], dtype: torch.dtype
) -> None:
    level, use_checkpoint = call
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    plain, block = Odd(case).to(dtype), Block(Odd(case).to(dtype), use_checkpoint, level)
    of_inputs = []
    for module in (plain, block):
        # Gradients accumulate; a parameter keeps its hook.
        for step in range(1 if case.startswith("hooked") else 2):
            x = torch.linspace(-1, 2, 36, dtype=dtype).view(2, 3, 6).add_(step).requires_grad_()
            module(x).square().mean().backward()
        of_inputs.append(x.grad)
    torch.testing.assert_close(of_inputs[1], of_inputs[0], **tolerance)
    torch.testing.assert_close(grads_of(block), grads_of(plain, times=2), **tolerance)


@on_ranks(2)
@cells("level", range(4))
@all_weights
def test_the_last_product_of_a_block_is_not_recomputed(level: int) -> None:
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)]
    loss = Block(nn.Sequential(*layers), True, level)(torch.ones(2, 4)).sum()
    with Products() as products:
        loss.backward()
    assert products.count == 2


class Copies(TorchDispatchMode):
    """Counts the elements that copies, casts and concatenations write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy", "cat", "clone", "_foreach_copy_", "_foreach_add_"):
            written = args[0] if name.startswith("_foreach") else [result]
            self.elements += [tensor.numel() for tensor in written]
        return result


@on_ranks(4)  # so that a shard, which is copied too, is smaller than a weight
@cells("bias", [True, False])
@all_weights
def test_weights_and_gradients_are_not_copied(bias: bool) -> None:
    block = Block(
        nn.Sequential(nn.Linear(64, 64, bias=bias), nn.Tanh(), nn.Linear(64, 64, bias=bias))
    )
    for _ in range(3):
        with Copies() as copies:
            block(torch.ones(2, 64)).sum().backward()
        block.zero_grad()
    of_all_gradients = [count for count in copies.elements if count >= 2 * 64 * 64]
    assert len(of_all_gradients) == 1  # which gloo reduces
    assert max(count for count in copies.elements if count not in of_all_gradients) < 64 * 64


@on_ranks(2)
@cells("use_checkpoint", [False, True])
@cells("dtype", [torch.float32, torch.bfloat16])
@cells("level", [1, 3])
def test_gradients_of_small_weights_are_the_same_whoever_writes_them(
    level: int, dtype: torch.dtype, use_checkpoint: bool
) -> None:
    """At levels 2 and 3 they are autograd's."""
    accept = BlockCall.accept
    written: dict[int, int] = {}
    found: dict[int, list[torch.Tensor]] = {}
    for small in (0, 48, 1 << 20):  # of weights of 32 and 64 elements
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)
        block = Block(layers, use_checkpoint=use_checkpoint, zero_level=level)
        written[small], found[small] = 0, []

        def noted(call: BlockCall, index: Any, gradient: Any, small: int = small) -> bool:
            written[small] += 1
            return accept(call, index, gradient)

        with patch.object(direct_linear, "SMALL", small), patch.object(BlockCall, "accept", noted):
            for micro in range(3):
                with no_sync(block) if micro == 1 else nullcontext():
                    block(torch.linspace(-1, 1, 8, dtype=dtype).view(2, 4)).sum().backward()
                found[small] += [grad for p in block.parameters() if (grad := p.grad) is not None]
                if micro == 0:
                    block.zero_grad()
    of_a_layer = 3 * 2  # in three passes, for its weight and its bias
    of_small = 0 if level == 3 else of_a_layer
    assert [*written.values()] == [2 * of_a_layer, of_a_layer + of_small, 2 * of_small]
    for grads in found.values():
        assert len(grads) == len(found[0])
        assert all(map(torch.equal, grads, found[0]))


class PartlyRecomputed(nn.Module):
    """A layer of a Block, of which torch recomputes a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=False)
        out: torch.Tensor = x + self.down(up)
        return out


@on_ranks(2)
@cells("level", [1, 3])
@cells("small", [0, 1 << 20])
def test_what_torch_recomputes_saves_what_it_saved_in_forward(small: int, level: int) -> None:
    """Also where gradients of some passes are held back, and a pass has two calls of the Block."""
    plain, block = PartlyRecomputed(), Block(PartlyRecomputed(), zero_level=level)
    with patch.object(direct_linear, "SMALL", small):
        for model in (plain, block):
            for micro in range(4):
                x = torch.linspace(-1, micro + 1, 8).view(2, 4).requires_grad_()
                with no_sync(block) if micro in (1, 2) else nullcontext():
                    out = model(x)
                    (model(out) if micro > 1 else out).sum().backward()
    expected = [p.grad * world_size() for p in plain.parameters() if p.grad is not None]
    found = [full_gradient(p) for p in block.parameters()]
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Reserving(torch.autograd.Function):
    """A product that writes the gradient of its weight into the memory that the Block reduces, as
    operators of compiled layers do.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        product = grad.t() @ x
        buffers = running_backward.buffers
        reserved = None if buffers is None else buffers.reserve_gradient(weight)
        RESERVED.append(reserved is not None)
        return grad @ weight, product if reserved is None else reserved.copy_(product)


RESERVED: list[bool] = []


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.once = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = Reserving.apply(torch.tanh(Reserving.apply(x, self.twice.weight)), self.twice.weight)
        y: torch.Tensor = Reserving.apply(torch.tanh(h), self.once.weight)
        return y


@on_ranks(2)
@cells("level", [1, 2, 3])
@all_weights
def test_memory_for_a_gradient_is_given_out_once_in_a_backward(level: int) -> None:
    RESERVED.clear()
    plain, block = UsedTwice(), Block(UsedTwice(), use_checkpoint=False, zero_level=level)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    plain(x).square().sum().backward()
    assert RESERVED == [False] * 3
    for times in (1, 2):
        RESERVED.clear()
        block(x).square().sum().backward()
        # Not where the second use of the weight comes, in backward.
        assert RESERVED == [True, True, False]
        torch.testing.assert_close(grads_of(block), grads_of(plain, times=2 * times))
