"""Buffers of recomputed blocks: what forward changes is changed once, and recomputed from, as in
plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_models import X, line

from bmt_core import BmtError
from bmt_testing import on_ranks
from bmt_zero import Block


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        return y


@on_ranks(2)
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_running_statistics_are_updated_once(use_checkpoint: bool) -> None:
    plain, block = Normed(), Block(Normed(), use_checkpoint=use_checkpoint)
    for step in range(2):
        for module in (plain, block):
            module(torch.arange(12.0).view(4, 3) + step).square().sum().backward()
    torch.testing.assert_close(dict(block.named_buffers()), dict(plain.named_buffers()))


class Changing(nn.Module):
    """Buffers that go into the result and are changed in place, replaced, made, and taken away, by
    another way to them, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = line(3.0)
        self.register_buffer("matrix", torch.full((2, 2), 0.5))
        self.register_buffer("replaced", torch.full((2,), 2.0))
        self.register_buffer("late", None)
        self.register_buffer("gone", torch.ones(2))
        self.register_buffer("grown", torch.ones(1))
        self.register_buffer("expanded", torch.full((1,), 0.5).expand(2))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.child = nn.Module()
        self.alias = [self.matrix]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x * self.alias[0].sum())
        y = torch.sin(y * self.expanded + self.grown.sum())
        y = torch.sin(y @ self.sparse.to_dense())
        self.sparse.mul_(1.5)
        self.grown.data = torch.cat([self.grown, self.grown])
        if not hasattr(self.child, "first"):
            self.child.register_buffer("first", torch.ones(2))
        y = torch.sin(y * self.child.first)
        self.child.first = self.child.first + 1
        if self.gone is not None:
            y = y + 3 * y * self.gone
        y = torch.sin(y * self.replaced)
        if self.late is not None:
            y = y * self.late
        self.matrix.mul_(1.5)
        self.replaced = self.replaced + 1
        self.late = torch.full((2,), 4.0)
        self.gone = None
        return y


@on_ranks(2)
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_buffers_that_forward_changes_are_changed_once_and_recomputed_from(
    use_checkpoint: bool,
) -> None:
    plain, block = Changing(), Block(Changing(), use_checkpoint=use_checkpoint)
    of_inputs: list[Any] = []
    for module in (plain, block):
        of_inputs.append([])
        for step in range(2):
            x = (X + step).clone().requires_grad_()
            for loss in [module(x).sum(), module(x).sum()]:
                loss.backward(retain_graph=True)
                loss.backward()
            of_inputs[-1].append(x.grad)
    torch.testing.assert_close(of_inputs[1], of_inputs[0])
    found, expected = (
        {name: buffer.to_dense() for name, buffer in module.named_buffers()}
        for module in (block, plain)
    )
    torch.testing.assert_close(found, expected)


class Decaying(nn.Module):
    """A buffer that is changed, and then saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = line(3.0)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5)
        y: torch.Tensor = self.linear(x) * self.scale
        return y


@on_ranks(1)
def test_a_buffer_that_backward_needs_is_that_of_its_own_forward() -> None:
    of_inputs = []
    for backward_follows in (True, False):
        block, inputs, losses = Block(Decaying(), use_checkpoint=True), [], []
        for step in range(3):
            inputs.append((X + step).clone().requires_grad_())
            losses.append(block(inputs[-1]).square().sum())
            if backward_follows:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        of_inputs.append([x.grad for x in inputs])
    torch.testing.assert_close(of_inputs[1], of_inputs[0])


@on_ranks(1)
def test_a_forward_that_replaces_buffers_is_not_laid_out_again() -> None:
    block = Block(Changing())
    is_new = []
    for _ in range(3):
        before = block._bmt_block.state.buffers
        block(X).sum().backward()
        is_new.append(block._bmt_block.state.buffers is not before)
    assert is_new == [False, True, False]  # the first one registers a buffer


SIZE = 512  # a buffer of this many rows and columns has 1 MiB, and counts as large
Large = dict[str, int]
"""By the buffer that forward writes to, its first call that does so."""


class WithLarge(nn.Module):
    """A large mask, and large and small states, which forward reads and then writes to from some
    call on.
    """

    def __init__(self, first_writes: Large) -> None:
        super().__init__()
        self.linear = line(3.0)
        self.first_writes = first_writes
        self.calls = 0
        self.register_buffer("mask", torch.full((SIZE, SIZE), 0.5))
        self.register_buffer("small", torch.full((2, 2), 0.5))
        self.child = nn.Module()
        self.child.register_buffer("state", torch.full((SIZE, SIZE), 0.5))
        self.child.register_buffer("through_data", torch.full((SIZE, SIZE), 0.5))
        self.child.register_buffer("replaced", torch.full((SIZE, SIZE), 0.5))

    def forward(self, x: torch.Tensor, call: int = 0) -> torch.Tensor:
        child = self.child
        for buffer in (self.mask, self.small, child.state, child.through_data, child.replaced):
            x = torch.sin(self.linear(x) * (buffer[:2, 0] + 0))
        if call >= self.first_writes.get("small", 9):
            self.small.mul_(1.25)
        if call >= self.first_writes.get("state", 9):
            child.state.mul_(1.25)
        if call >= self.first_writes.get("through_data", 9):
            child.through_data.data.mul_(1.25)
        if call >= self.first_writes.get("replaced", 9):
            child.replaced = child.replaced * 1.25
        return x


class BytesCloned(TorchDispatchMode):
    """Adds up the bytes of all copies that are made inside."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.total += result.nbytes
        return result


def bytes_copied_in_three_calls(first_writes: Large) -> list[int]:
    block = Block(WithLarge(first_writes))
    found = []
    for call in range(3):
        with BytesCloned() as cloned:
            block(X, call).sum().backward()
        found.append(cloned.total)
    return found


@on_ranks(1)
def test_a_large_constant_buffer_is_copied_in_the_first_forward_only() -> None:
    first, second, third = bytes_copied_in_three_calls({})
    assert 4 * 2**20 <= first < 5 * 2**20
    assert second == third < 2**10


@on_ranks(1)
def test_of_the_large_buffers_those_are_copied_that_forward_changes() -> None:
    _, second, third = bytes_copied_in_three_calls({"state": 0})
    # Forward copies the state before it, and the recomputation the present one.
    assert 2 * 2**20 <= second == third < 2 * 2**20 + 2**10


@on_ranks(2)
@pytest.mark.parametrize(
    "first_writes",
    [{"small": 0, "state": 0, "through_data": 0, "replaced": 0}, {"small": 2, "replaced": 1}],
)
def test_large_buffers_that_forward_changes_are_changed_once_and_recomputed_from(
    first_writes: Large,
) -> None:
    """With several calls before their backward passes."""
    plain, block = WithLarge(first_writes), Block(WithLarge(first_writes), use_checkpoint=True)
    of_inputs = []
    for module in (plain, block):
        inputs = []
        for step in range(2):
            losses = []
            for call in range(2):
                inputs.append((X + call).clone().requires_grad_())
                losses.append(module(inputs[-1], 2 * step + call).sum())
            for loss in losses:
                loss.backward()
        of_inputs.append([x.grad for x in inputs])
    torch.testing.assert_close(of_inputs[1], of_inputs[0])
    torch.testing.assert_close(dict(block.named_buffers()), dict(plain.named_buffers()))


def gradient_of_input(module: nn.Module, call: int) -> torch.Tensor | None:
    x = X.clone().requires_grad_()
    module(x, call).sum().backward()
    return x.grad


@on_ranks(2)
@pytest.mark.parametrize(
    ("path", "in_forward"),
    [("child.state", True), ("child.state", False), ("mask", False), ("small", False)],
)
def test_a_buffer_whose_earlier_value_is_lost_raises_on_every_rank(
    path: str, in_forward: bool
) -> None:
    first_writes = {"state": 1} if in_forward else {}
    plain, block = WithLarge(first_writes), Block(WithLarge(first_writes)).requires_grad_(False)
    gradient_of_input(block, 0)
    loss = block(X.clone().requires_grad_(), 1).sum()
    if not in_forward:
        block.get_buffer(path).mul_(1.25)  # constant before
    with pytest.raises(
        BmtError,
        match=rf"Buffer '{path}' of a block was modified in place(.|\n)*use_checkpoint=False",
    ):
        loss.backward()
    if in_forward:
        for call in (0, 1):
            plain(X, call)
        torch.testing.assert_close(gradient_of_input(block, 2), gradient_of_input(plain, 2))
    else:
        gradient_of_input(block, 2)
