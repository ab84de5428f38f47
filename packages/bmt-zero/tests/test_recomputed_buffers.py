"""Buffers of recomputed blocks: what forward changes is changed once, and recomputed from, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_core.errors import BmtError
from bmt_testing import run_ranks
from bmt_zero import Block


def line(weight: float = 1.0) -> nn.Linear:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.zero_()
    return layer


X = torch.ones(1, 2)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        return y


def statistics(use_checkpoint: bool | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module: nn.Module = Normed()
    if use_checkpoint is not None:
        Block(module, use_checkpoint=use_checkpoint)
    for step in range(2):
        module(torch.arange(12.0).view(4, 3) + step).square().sum().backward()
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_running_statistics_are_updated_once(use_checkpoint: bool) -> None:
    for buffers in run_ranks(statistics, 2, use_checkpoint):
        torch.testing.assert_close(buffers, statistics(None))


class Changing(nn.Module):
    """Buffers that go into the result and are changed in place, replaced, made, and taken away, by another way to them, too."""

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


def changing(use_checkpoint: bool | None) -> Any:
    module: nn.Module = Changing()
    if use_checkpoint is not None:
        Block(module, use_checkpoint=use_checkpoint)
    found = []
    for step in range(2):
        x = (X + step).clone().requires_grad_()
        losses = [module(x).sum(), module(x).sum()]
        for loss in losses:
            loss.backward(retain_graph=True)
            loss.backward()
        found.append(x.grad)
    return found, {name: buffer.to_dense().clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_buffers_that_forward_changes_are_changed_once_and_recomputed_from(use_checkpoint: bool) -> None:
    expected = changing(None)
    for found in run_ranks(changing, 2, use_checkpoint):
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


def decaying(backward_follows: bool) -> list[Any]:
    block, inputs, losses = Block(Decaying(), use_checkpoint=True), [], []
    for step in range(3):
        inputs.append((X + step).clone().requires_grad_())
        losses.append(block(inputs[-1]).square().sum())
        if backward_follows:
            losses.pop().backward()
    for loss in losses:
        loss.backward()
    return [x.grad for x in inputs]


def test_a_buffer_that_backward_needs_is_that_of_its_own_forward() -> None:
    torch.testing.assert_close(run_ranks(decaying, 1, False), run_ranks(decaying, 1, True))


def looks() -> list[bool]:
    """Return whether each of three calls laid the block out again."""
    block = Block(Changing())
    found = []
    for _ in range(3):
        before = block._bmt_block.state.buffers
        block(X).sum().backward()
        found.append(block._bmt_block.state.buffers is not before)
    return found


def test_a_forward_that_replaces_buffers_is_not_laid_out_again() -> None:
    assert run_ranks(looks, 1) == [[False, True, False]]  # the first one registers a buffer


SIZE = 512  # a buffer of this many rows and columns has 1 MiB, and counts as large
Large = dict[str, int]
"""By the buffer that forward writes to, its first call that does so."""


class WithLarge(nn.Module):
    """A large mask, and large and small states, which forward reads and then writes to from some call on."""

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


def copied_bytes(first_writes: Large) -> list[int]:
    """Return the bytes that each of three calls, with its backward, copies."""
    block = Block(WithLarge(first_writes))
    found = []
    for call in range(3):
        with BytesCloned() as cloned:
            block(X, call).sum().backward()
        found.append(cloned.total)
    return found


def test_a_large_constant_buffer_is_copied_in_the_first_forward_only() -> None:
    first, second, third = run_ranks(copied_bytes, 1, {})[0]
    assert 4 * 2**20 <= first < 5 * 2**20
    assert second == third < 2**10


def test_of_the_large_buffers_those_are_copied_that_forward_changes() -> None:
    ((_, second, third),) = run_ranks(copied_bytes, 1, {"state": 0})
    # Forward copies the state before it, and the recomputation the present one.
    assert 2 * 2**20 <= second == third < 2 * 2**20 + 2**10


def writing(use_checkpoint: bool | None, first_writes: Large) -> Any:
    """Train with several calls before their backward passes, and return gradients and buffers."""
    module: nn.Module = WithLarge(first_writes)
    if use_checkpoint is not None:
        Block(module, use_checkpoint=use_checkpoint)
    inputs = []
    for step in range(2):
        losses = []
        for call in range(2):
            inputs.append((X + call).clone().requires_grad_())
            losses.append(module(inputs[-1], 2 * step + call).sum())
        for loss in losses:
            loss.backward()
    return [x.grad for x in inputs], {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize(
    "first_writes", [{"small": 0, "state": 0, "through_data": 0, "replaced": 0}, {"small": 2, "replaced": 1}]
)
def test_large_buffers_that_forward_changes_are_changed_once_and_recomputed_from(first_writes: Large) -> None:
    expected = writing(None, first_writes)
    for found in run_ranks(writing, 2, True, first_writes):
        torch.testing.assert_close(found, expected)


def late_change(name: str, in_forward: bool) -> tuple[str, Any]:
    """Change a buffer that was constant before. Return what is said, and the gradient of the next call."""
    block = Block(WithLarge({name: 1} if in_forward else {}))
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    block(X.clone().requires_grad_()).sum().backward()
    loss = block(X.clone().requires_grad_(), 1).sum()
    if not in_forward:
        dict(block.named_buffers())[name].mul_(1.25)
    with pytest.raises(BmtError) as raised:
        loss.backward()
    x = X.clone().requires_grad_()
    block(x, 2).sum().backward()
    return str(raised.value), x.grad


def after_late(name: str) -> Any:
    """Return the gradient of the last call of :func:`late_change` in plain torch."""
    module = WithLarge({name: 1})
    module(X, 0)
    module(X, 1)
    x = X.clone().requires_grad_()
    module(x, 2).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("name", "in_forward"), [("state", True), ("child.state", False), ("mask", False), ("small", False)]
)
def test_a_buffer_whose_earlier_value_is_lost_raises_on_every_rank(name: str, in_forward: bool) -> None:
    path = "child.state" if name == "state" else name
    for text, gradient in run_ranks(late_change, 2, name, in_forward):
        assert f"Buffer {path!r} of a block was modified in place" in text and "use_checkpoint=False" in text
        if in_forward:
            torch.testing.assert_close(gradient, after_late(name))
