"""Buffers of recomputed blocks: what forward changes is changed once, and recomputed from, as in
plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    disable_observer,
    enable_observer,
)
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from zero_models import X, line

from bmt_core import BmtError, ConfigError
from bmt_testing import on_ranks
from bmt_zero import Block
from cells import cells


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
        self.written_buffers = ("matrix", "sparse")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x * self.alias[0].sum())
        y = torch.sin(y * self.expanded + self.grown.sum())
        y = torch.sin(y @ self.sparse.to_dense())
        self.sparse.data._values().mul_(1.5)  # counts no version
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
@cells("use_checkpoint", [False, True])
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


SIZE = 512  # a buffer of this many rows and columns has 1 MiB
FirstWrites = dict[str, int]
"""By the buffer that forward writes to, its first call that does so."""


class Writing(nn.Module):
    """Buffers that forward reads and then writes to from some call on, and that are ``declared``
    or not.
    """

    def __init__(self, first_writes: FirstWrites, declared: Sequence[str] = ()) -> None:
        super().__init__()
        self.linear = line(3.0)
        self.first_writes = first_writes
        self.register_buffer("mask", torch.full((SIZE, SIZE), 0.5))
        self.register_buffer("small", torch.full((2, 2), 0.5))
        self.register_buffer("vector", torch.full((2,), 0.5))
        self.child = nn.Module()
        self.child.register_buffer("state", torch.full((SIZE, SIZE), 0.5))
        self.child.register_buffer("through_data", torch.full((SIZE, SIZE), 0.5))
        self.child.register_buffer("replaced", torch.full((SIZE, SIZE), 0.5))
        for module in (self, self.child):
            module.written_buffers = tuple(name for name in declared if name in module._buffers)

    def forward(self, x: torch.Tensor, call: int = 0) -> torch.Tensor:
        child = self.child
        for buffer in self.buffers():
            x = torch.sin(self.linear(x) * (buffer.flatten()[:2] + 0))
        written = {name for name, first in self.first_writes.items() if call >= first}
        for name in written & {"mask", "small", "vector"}:
            self.get_buffer(name).mul_(1.25)
        if "state" in written:
            child.state.mul_(1.25)
        if "through_data" in written:
            child.through_data.data.mul_(1.25)
        if "vector_through_data" in written:
            self.vector.data.mul_(1.25)
        if "replaced" in written:
            child.replaced = child.replaced * 1.25
        return x


class DeclaringTied(Writing):
    """``through_data`` is declared by the last of the modules that have it."""

    def __init__(self, first_writes: FirstWrites, declared: Sequence[str]) -> None:
        super().__init__(first_writes)
        self.last = nn.Module()
        self.last.register_buffer("tied", self.child.through_data)
        self.last.written_buffers = ("tied",)


class BytesCloned(TorchDispatchMode):
    """Adds up the bytes of all copies that are made inside."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.total += result.nbytes
        return result


def bytes_copied_in_three_calls(block: nn.Module) -> list[int]:
    found = []
    for call in range(3):
        with BytesCloned() as cloned:
            block(X, call).sum().backward()
        found.append(cloned.total)
    return found


@on_ranks(1)
def test_constant_buffers_of_two_dimensions_are_copied_in_the_first_forward_only() -> None:
    block = Block(Writing({}))
    constant = sum(buffer.nbytes for buffer in block.buffers() if buffer.ndim > 1)
    # Forward copies the values before it, and the recomputation the present ones.
    always = 2 * block.vector.nbytes
    assert bytes_copied_in_three_calls(block) == [constant + always, always, always]
    nn.CrossEntropyLoss()  # a new module, which may have changed the block
    assert bytes_copied_in_three_calls(block) == [always] * 3


@on_ranks(1)
@cells("name", ["small", "state"])
def test_buffers_that_forward_changes_are_copied(name: str) -> None:
    block = Block(Writing({name: 0}, [name]))
    size = next(buffer.nbytes for path, buffer in block.named_buffers() if path.endswith(name))
    of_both = 2 * (size + block.vector.nbytes)
    assert bytes_copied_in_three_calls(block)[1:] == [of_both, of_both]


@on_ranks(2)
@cells(
    ("kind", "first_writes"),
    [
        (Writing, {"small": 0, "vector": 0, "state": 0, "through_data": 0, "replaced": 0}),
        (Writing, {"replaced": 1}),
        (Writing, {"vector": 2}),
        (Writing, {"vector_through_data": 2}),
        (Writing, {"small": 2, "state": 2, "through_data": 2}),
        (DeclaringTied, {"through_data": 2}),
    ],
)
def test_buffers_that_forward_changes_from_some_call_on_are_changed_once_and_recomputed_from(
    kind: type[Writing], first_writes: FirstWrites
) -> None:
    """With several calls before their backward passes."""
    declared = [name for name in first_writes if name in ("small", "state", "through_data")]
    plain, block = kind(first_writes, declared), Block(kind(first_writes, declared))
    of_inputs = []
    for module in (plain, block):
        inputs = []
        for step in range(3):
            losses = []
            for call in range(2):
                inputs.append((X + call).clone().requires_grad_())
                losses.append(module(inputs[-1], 2 * step + call).sum())
            for loss in losses:
                loss.backward()
        of_inputs.append([x.grad for x in inputs])
    torch.testing.assert_close(of_inputs[1], of_inputs[0])
    torch.testing.assert_close(dict(block.named_buffers()), dict(plain.named_buffers()))


def gradient_of_input(module: nn.Module, *args: Any) -> torch.Tensor | None:
    x = X.clone().requires_grad_()
    module(x, *args).sum().backward()
    return x.grad


WRITTEN = r"wrote to buffer '{}' of a block in place(.|\n)*written_buffers = \('{}',\)"


@on_ranks(2)
@cells(("path", "first"), [("child.state", 0), ("mask", 1), ("child.through_data", 0)])
def test_a_forward_that_writes_to_a_buffer_that_is_not_declared_raises(
    path: str, first: int
) -> None:
    name = path.rpartition(".")[2]
    block = Block(Writing({name: first}))
    if first:
        gradient_of_input(block, 0)
    with pytest.raises(ConfigError, match=f"Forward {WRITTEN.format(path, name)}"):
        block(X, first)


@on_ranks(2)
def test_a_write_to_a_buffer_that_is_not_declared_before_backward_raises() -> None:
    block = Block(Writing({})).requires_grad_(False)
    loss = block(X.clone().requires_grad_(), 1).sum()
    block.child.state.mul_(1.25)
    message = f"The program {WRITTEN.format('child.state', 'state')}"
    with pytest.raises(BmtError, match=message):
        loss.backward()
    gradient_of_input(block, 2)


@on_ranks(1)
def test_constant_buffers_of_any_kind_are_no_error() -> None:
    module = PassesOn(Writing({}))
    module.register_buffer("unknown", torch.full((2, 2), torch.nan))
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    module.register_buffer("expanded", torch.ones(1, 2).expand(2, 2))
    module.register_buffer("bits", torch.ones(2, 2, dtype=torch.bool))
    block = Block(module)
    for call in range(2):
        torch.testing.assert_close(
            gradient_of_input(block, call), gradient_of_input(Writing({}), call)
        )


class PassesOn(nn.Module):
    """A module that passes on the attributes of the one that it wraps."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x: torch.Tensor, call: int = 0) -> torch.Tensor:
        y: torch.Tensor = self.wrapped(x, call)
        return y


@on_ranks(1)
def test_buffers_are_declared_by_their_own_module_alone() -> None:
    module = Writing({"vector": 1})
    module.written_buffers = ("vector",)
    plain, block = Writing({"vector": 1}), Block(PassesOn(module))
    for call in (0, 1):
        torch.testing.assert_close(gradient_of_input(block, call), gradient_of_input(plain, call))


@on_ranks(1)
@cells("declared", ["vector", ("vector", "child.state"), ["vector"]])
def test_a_declaration_that_names_no_buffers_of_the_module_raises(declared: Any) -> None:
    module = Writing({})
    module.written_buffers = declared
    with pytest.raises(ConfigError, match="which are mask, small, vector; it is"):
        Block(module)


class OwnStatistics(nn.Module):
    """Running statistics that are no module of torch, which ``F.batch_norm`` updates without
    counting a version.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class WithInner(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.inner = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(torch.sin(self.linear(x)))
        return y


INNER: dict[str, Callable[[], nn.Module]] = {
    "torch's norm": lambda: nn.BatchNorm1d(3),
    "torch's ranges": lambda: FakeQuantize(MovingAverageMinMaxObserver),
    "torch's ranges, fused": lambda: FusedMovingAvgObsFakeQuantize(MovingAverageMinMaxObserver),
    "own statistics": OwnStatistics,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "older spectral norm": lambda: spectral_norm(nn.Linear(3, 3)),
}


def check_training(plain: nn.Module, block: nn.Module, of_call: Callable[..., None]) -> None:
    """Compare the gradients of inputs of six steps, each with two forwards before their backward
    passes, and then the buffers. ``of_call(module, step)`` prepares each step.
    """
    of_inputs = []
    for module in (plain, block):
        inputs = []
        for step in range(6):
            of_call(module, step)
            losses = []
            for call in range(2):
                x = torch.arange(12.0).view(4, 3).sin() + step + call
                inputs.append(x.requires_grad_())
                losses.append(module(inputs[-1]).pow(3).sum())
            for loss in losses:
                loss.backward()
        of_inputs.append([x.grad for x in inputs])
    torch.testing.assert_close(of_inputs[1], of_inputs[0])
    torch.testing.assert_close(dict(block.named_buffers()), dict(plain.named_buffers()))


@on_ranks(2)
@cells("name", INNER)
@cells("is_alone", [False, True])
def test_buffers_that_training_changes_after_an_evaluation_are_changed_once_and_recomputed_from(
    name: str, is_alone: bool
) -> None:
    """``is_alone``: only the inner module is switched, as one that was frozen."""

    def switch(module: nn.Module, step: int) -> None:
        switched = module.inner if is_alone else module
        assert isinstance(switched, nn.Module)
        switched.train(step in (2, 3, 5))

    check_training(WithInner(INNER[name]), Block(WithInner(INNER[name])), switch)


def begin_statistics(module: Any, step: int) -> None:
    module.inner.momentum = 0.1 if step > 2 else 0.0


def begin_ranges(module: nn.Module, step: int) -> None:
    module.apply(enable_observer if step > 2 else disable_observer)


@on_ranks(2)
@cells(
    ("name", "begin"),
    [
        ("torch's norm", begin_statistics),
        ("torch's ranges", begin_ranges),
        ("torch's ranges, fused", begin_ranges),
    ],
)
def test_buffers_of_torchs_modules_that_begin_to_change_in_one_mode_are_changed_once(
    name: str, begin: Callable[[nn.Module, int], None]
) -> None:
    def prepare(module: nn.Module, step: int) -> None:
        module.train(step > 0)
        begin(module, step)

    check_training(WithInner(INNER[name]), Block(WithInner(INNER[name])), prepare)


@on_ranks(2)
def test_a_module_that_takes_the_place_of_another_is_looked_at_too() -> None:
    inner = Writing({})
    block = Block(inner)
    gradient_of_input(block)
    inner.child, inner.first_writes = Writing({}).child, {"through_data": 0}
    with pytest.raises(ConfigError, match=WRITTEN.format("child.through_data", "through_data")):
        block(X)
