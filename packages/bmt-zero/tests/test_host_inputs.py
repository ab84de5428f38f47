"""Inputs that wait for backward in host memory: gradients stay what they are in every bit, and the
device's memory is let go.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from keep_models import WIDTH, Attends, assert_equal, blocks_of, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from zero_models import Model, full_gradient, my_part, plain
from zero_models import train as train_model

from bmt_core import ConfigError
from bmt_core.errors import BmtError
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block, BMTrainModelWrapper, host_inputs
from bmt_zero.host_inputs import HostInputs
from bmt_zero.zero_run import zero_run
from cells import cells

# The inputs of tests are small, and those of large models are what a test is about.
of_all_sizes = patch.object(host_inputs, "SMALL", 0)
BYTES = 2 * 6 * WIDTH * 4
"""Those of one input."""


def run_inputs() -> HostInputs:
    return zero_run().host_inputs


def offloading(
    layers: list[nn.Module], level: int = 3, keep: Any = None, value: bool | int = True
) -> list[nn.Module]:
    return [
        Block(copy.deepcopy(layer), zero_level=level, keep=keep, offload_inputs=value)
        for layer in layers
    ]


def one_by_one(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def hidden(step: int = 0, length: int = 6) -> torch.Tensor:
    """An activation: it needs a gradient, and is no leaf."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, length, WIDTH, generator=generator).requires_grad_() * 1


@on_ranks(2)
@cells("level", [0, 1, 2, 3])
@of_all_sizes
def test_a_training_is_that_of_plain_torch(level: int) -> None:
    expected = plain()
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        Block(layer, zero_level=level)
    found = train_model(BMTrainModelWrapper(model, offload_inputs=True), 3, my_part)
    torch.testing.assert_close(
        [found["grad"], found["state"]], [expected["grad"], expected["state"]]
    )
    pool = run_inputs().pool
    assert pool.total > 0 == pool.in_use


def is_view(operation: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    return operation in (torch.Tensor.permute, torch.Tensor.transpose)


@on_ranks(2)
@cells(
    ("keep", "level", "dropout", "dtype", "waiting"),
    [
        (None, 3, 0.3, None, 2),
        (None, 2, 0.3, torch.bfloat16, 1),
        ("attention", 3, 0.3, None, 1),
        (9_000, 0, 0.0, torch.bfloat16, 3),
        (is_view, 2, 0.0, None, 2),
    ],
)
@of_all_sizes
def test_losses_and_gradients_are_those_without_it_in_every_bit(
    keep: Any, level: int, dropout: float, dtype: Any, waiting: int
) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Attends(dropout) for _ in range(3)]
    expected, _ = train(blocks_of(layers, keep, level), dtype, waiting=waiting)
    found, _ = train(offloading(layers, level, keep), dtype, waiting=waiting)
    assert_equal(found, expected)
    # Those of the second and third layer; that of the first is a leaf.
    pool = run_inputs().pool
    assert pool.total == 2 * waiting * BYTES and pool.in_use == 0


class Scores(nn.Module):
    """A layer with a second input, which all layers may share."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, encoded: dict[str, torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = x + torch.tanh(self.own(x)) * self.other(encoded["values"])
        return y


def gradients_of(way: str, layers: list[nn.Module]) -> list[Any]:
    """The gradients of a graph of ``layers``."""
    x = hidden()
    leaves = [p for layer in layers for p in layer.parameters()]
    if way == "twice":
        one_by_one([*layers, *layers[::-1], layers[0]], x).square().sum().backward()
    if way == "retained":
        y = one_by_one(layers, x)
        y.square().sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        y.exp().sum().backward()
    if way == "skipped":  # the second layer is in the graph, and no gradient comes
        y = layers[0](x)
        layers[1](y)
        layers[2](y).square().sum().backward()
    if way == "branches":  # backward is not the reverse of forward
        y = layers[0](x)
        one, other = layers[1](y), layers[2](y * 2)
        other.square().sum().backward(retain_graph=True)
        one.exp().sum().backward()
    if way == "part":
        y = layers[0](x)
        found = torch.autograd.grad(one_by_one(layers[1:], y).square().sum(), [x, y])
        return [*found]
    if way == "outer":
        y = layers[0](x)
        y = checkpoint(lambda z: one_by_one(layers[1:], z), y, use_reentrant=False)
        y.square().sum().backward()
    if way == "waiting":  # first in, first out, as in a pipeline
        losses = []
        for step in range(4):
            losses.append(one_by_one(layers, hidden(step)).square().sum())
            with torch.no_grad():
                one_by_one(layers, hidden())
            if step:
                losses.pop(0).backward()
        losses.pop().backward()
    if way == "strides":
        y = layers[0](x).transpose(0, 1)  # dense, in another order
        one_by_one(layers[1:], y[:, :, ::2].repeat_interleave(2, -1)).square().sum().backward()
        y = layers[0](torch.cat([hidden(1)] * 2))[::2]  # with gaps
        layers[1](y).sum().backward()
    return [full_gradient(leaf) for leaf in leaves if leaf.grad is not None]


WAYS = ["twice", "retained", "skipped", "branches", "part", "outer", "waiting", "strides"]


@on_ranks(2)
@cells("way", WAYS)
@of_all_sizes
def test_any_graph_has_the_same_gradients_and_gives_all_memory_back(way: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Attends(0.2) for _ in range(3)]
    torch.manual_seed(1)
    expected = gradients_of(way, blocks_of(layers, None))
    torch.manual_seed(1)
    found = gradients_of(way, offloading(layers))
    assert_equal(found, expected)
    pool = run_inputs().pool
    assert pool.total > 0 == pool.in_use


@on_ranks(1)
@of_all_sizes
def test_the_device_keeps_the_inputs_of_one_call_and_brings_back_those_of_one() -> None:
    torch.manual_seed(0)
    blocks = offloading([Attends() for _ in range(5)])
    x, inputs = hidden(), []
    for block in blocks:
        inputs.append(StorageWeakRef(x.untyped_storage()))
        x = block(x)
        assert [kept.expired() for kept in inputs[:-1]] == [True] * (len(inputs) - 1)
    pool, seen = run_inputs().pool, []
    assert pool.in_use == 5 * BYTES
    for number, block in enumerate(blocks):

        def runs(module: Any, args: Any, number: int = number) -> None:
            under_way = run_inputs()._under_way
            waiting = None if under_way is None else under_way.inputs()
            before = None if number == 0 else waiting_of[number - 1]()
            seen.append((number, waiting is before))

        block.register_forward_pre_hook(runs)
    waiting_of = []
    last = run_inputs()._last
    while last is not None:
        waiting_of.insert(0, last)
        last = last().before  # type: ignore[union-attr]
    x.sum().backward()
    # Each layer runs while the input of the one before comes.
    assert seen == [(number, True) for number in (4, 3, 2, 1, 0)]
    assert pool.in_use == 0 and run_inputs()._under_way is None


@on_ranks(2)
@of_all_sizes
def test_an_input_of_all_layers_waits_once() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Scores() for _ in range(3)]
    found = []
    for blocks in (blocks_of(layers, None), offloading(layers)):
        x, values = hidden(), hidden(1)
        for block in blocks:
            x = block(x, encoded={"values": values})
        values = values.detach()  # the program lets go
        held = run_inputs().pool.in_use
        x.square().sum().backward()
        found.append([full_gradient(p) for block in blocks for p in block.parameters()])
    assert_equal(found[1], found[0])
    assert held == 4 * BYTES


@on_ranks(1)
@of_all_sizes
def test_a_shared_input_that_was_written_waits_again_with_its_new_values() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Scores() for _ in range(3)]
    found = []
    for blocks, writes in ((blocks_of(layers, None), False), (offloading(layers), True)):
        values, others = hidden(1), hidden(2)
        x = blocks[0](hidden(), encoded={"values": values})
        x = blocks[1](x, encoded={"values": others})
        with torch.no_grad():
            after = values.mul_(2) if writes else values * 2
        x = blocks[2](x, encoded={"values": values if writes else after})
        x = blocks[1](x, encoded={"values": others})
        x.square().sum().backward()
        found.append([full_gradient(p) for block in blocks for p in block.parameters()])
    assert_equal(found[1], found[0])


@on_ranks(1)
@cells("number", [0, 1])
@of_all_sizes
def test_an_input_written_while_it_is_copied_is_an_error_and_later_is_not(number: int) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Attends() for _ in range(2)]
    expected = gradients_of("part", blocks_of(layers, None))
    blocks = offloading(layers)
    x = hidden()
    inputs = [x, blocks[0](x)]
    if number == 1:
        y = blocks[1](inputs[1])
    with torch.no_grad():
        inputs[number].zero_()
    if number == 0:
        y = blocks[1](inputs[1])
    for _ in range(2):
        with pytest.raises(BmtError, match="An input of a block was modified in place"):
            y.square().sum().backward(retain_graph=True)
        blocks[0].zero_grad()
    inputs = [hidden()]
    inputs.append(blocks[0](inputs[0]))
    y = blocks[1](inputs[1])
    with torch.no_grad():
        inputs[0].zero_()
    found = torch.autograd.grad(y.square().sum(), inputs)
    assert_equal([*found], expected)


@on_ranks(1)
@of_all_sizes
def test_inputs_beyond_a_budget_stay_on_the_device() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Attends() for _ in range(4)]
    expected = gradients_of("waiting", blocks_of(layers, None))
    blocks, pool = offloading(layers, value=2 * BYTES + 1), run_inputs().pool
    for step in range(2):
        y = one_by_one(blocks, hidden(step))
        assert pool.in_use == pool.total == 2 * BYTES
        y.sum().backward()
        assert pool.in_use == 0
    for block in blocks:
        block.zero_grad()
    assert_equal(gradients_of("waiting", blocks), expected)
    assert pool.total == 2 * BYTES
    # Larger inputs take the place of those of other steps.
    y = one_by_one(blocks, hidden(length=7))
    assert pool.in_use == pool.total == BYTES * 7 // 6
    del y
    one_by_one(blocks, hidden(length=3)).sum().backward()
    assert pool.in_use == 0 < pool.total <= 2 * BYTES


@on_ranks(1)
@of_all_sizes
def test_inputs_of_other_lengths_in_each_step_take_the_memory_of_the_longest() -> None:
    blocks, pool = offloading([Attends() for _ in range(3)]), run_inputs().pool
    for length in (6, 12, 3, 9, 12, 5):
        one_by_one(blocks, hidden(length=length)).sum().backward()
    assert pool.total == 3 * 2 * BYTES
    y = one_by_one(blocks, hidden())
    assert pool.in_use == 3 * 2 * BYTES
    del y
    assert pool.in_use == 0  # the copy under way keeps no graph


class Fails(nn.Module):
    """Its gradient cannot be computed while it ``fails``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.fails:
            y.register_hook(self.fail)
        return y

    def fail(self, grad: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")


@on_ranks(2)
@of_all_sizes
def test_a_failed_pass_gives_its_memory_back_and_the_next_one_is_right() -> None:
    torch.manual_seed(0)
    layers = [Attends(), Fails(), Attends()]
    blocks, pool = offloading(layers), run_inputs().pool
    y = one_by_one(blocks, hidden())
    with pytest.raises(ArithmeticError, match="on purpose"):
        y.sum().backward()
    assert pool.in_use > 0
    del y
    for block in blocks:
        block.zero_grad()
    assert pool.in_use == 0 and run_inputs()._under_way is None
    layers[1].fails = blocks[1].fails = False  # type: ignore[assignment]
    expected = gradients_of("waiting", blocks_of(layers, None))
    assert_equal(gradients_of("waiting", blocks), expected)
    assert pool.in_use == 0


@on_ranks(1)
def test_what_is_no_activation_stays_on_the_device() -> None:
    (block,) = offloading([nn.Linear(1 << 9, 1 << 9)])
    activation = torch.ones(1 << 9, 1 << 9).requires_grad_() * 1  # one MiB
    for x in (activation[1:], activation.detach(), activation.detach().requires_grad_()):
        block(x).sum().backward(retain_graph=True)
        with torch.no_grad():
            block(activation)
    assert run_inputs().pool.total == 0
    seen: list[Any] = []
    block.register_forward_pre_hook(lambda module, args: seen.append(args[0].stride()))
    y = block(activation.t())
    assert run_inputs().pool.in_use == 1 << 20
    block(y).sum().backward()
    assert seen == [(1, 1 << 9), (1 << 9, 1), (1 << 9, 1), (1, 1 << 9)]


@on_ranks(1)
def test_other_values_are_errors_that_name_what_is_possible() -> None:
    for value in (0, -1, 1.5, "host", None):
        with pytest.raises(ConfigError, match="must be True, False or a number of bytes"):
            Block(Attends(), offload_inputs=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with use_checkpoint=False there is none"):
        Block(Attends(), use_checkpoint=False, offload_inputs=True)
    with pytest.raises(ConfigError, match="offload_inputs=8 is not possible with compile=True"):
        Block(Attends(), compile=True, offload_inputs=8)
    layers = nn.ModuleList([Block(Attends(), compile=True), Attends()])
    with pytest.raises(ConfigError, match="is not possible with compile=True"):
        BMTrainModelWrapper(layers, offload_inputs=True)


@on_ranks(1)
def test_the_wrapper_gives_it_to_blocks_that_have_none() -> None:
    layers = nn.ModuleList([Attends(), Block(Attends(), offload_inputs=5), Block(Attends())])
    copied = copy.deepcopy(BMTrainModelWrapper(layers, offload_inputs=7))
    assert [layer._bmt_block.host_bytes for layer in copied] == [7, 5, 7]


def on_gpu(waits: bool) -> tuple[list[Any], list[int], int]:
    """Return losses and gradients of three steps, and the peak of memory in each, after the first;
    and the bytes on the host.
    """
    torch.manual_seed(0)
    width, found, peaks = 512, [], []
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()).bfloat16() for _ in range(24)]
    blocks = [Block(layer.cuda(), offload_inputs=waits) for layer in layers]
    for step in range(4):
        torch.cuda.reset_peak_memory_stats()
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(1 << 15, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        x = x.requires_grad_() * 1
        for block in blocks:
            x = block(x)
        loss = x.float().mean()
        del x
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        found += [loss.detach(), [full_gradient(p) for b in blocks for p in b.parameters()]]
        for block in blocks:
            block.zero_grad()
    return found, peaks[1:], run_inputs().pool.total


@pytest.mark.gpu
def test_on_gpus_the_peak_falls_by_the_inputs_of_the_layers_and_no_bit_changes() -> None:
    ((found, peaks, on_host),) = run_ranks(on_gpu, 1, True, init={"device": "cuda"})
    ((expected, before, _),) = run_ranks(on_gpu, 1, False, init={"device": "cuda"})
    assert_equal(found, expected)
    of_input = 512 * 2 << 15
    assert on_host == 24 * of_input
    for fewer, more in zip(peaks, before, strict=True):
        assert more - fewer > 20 * of_input
