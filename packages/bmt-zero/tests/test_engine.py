"""The order in which the engine issues its work, what it tells of it, and how much Python
it takes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from engine_models import TicksAroundLinear, delayed, virtual_step
from torch import nn

from bmt_core.run.lanes import Lane, Mark
from bmt_core.run.runtime import current, rank
from bmt_params import DistributedModule
from bmt_params.owner import owner_of
from bmt_testing import gpu_ranks, on_ranks, run_ranks
from bmt_zero import Block, TransformerBlockList
from cells import cells

BLOCKS = 6


@on_ranks(2)
@cells("in_list", [True, False])
def test_communication_hides_behind_computation(in_list: bool) -> None:
    steps = virtual_step(BLOCKS, forward=3.0, backward=6.0, gather=2.0, reduce=2.5, in_list=in_list)
    # Only the first gather and the last reduction are seen.
    assert steps[-1] == (2.0 + BLOCKS * 3.0, BLOCKS * 6.0 + 2.5)
    assert not in_list or steps[0][0] == steps[-1][0]  # a list is ahead in its first step already


@on_ranks(2)
@cells("in_list", [True, False])
def test_computation_hides_behind_communication(in_list: bool) -> None:
    *_, (forward, backward) = virtual_step(
        BLOCKS, forward=1.0, backward=2.0, gather=4.0, reduce=3.0, in_list=in_list
    )
    assert forward == BLOCKS * 4.0 + 1.0
    # The last two are there already; the first gather begins while the second last block computes.
    assert backward <= (BLOCKS - 2) * 4.0 + 3 * 2.0 + 3.0


@on_ranks(2)
def test_a_reduction_overlaps_the_whole_backward_of_the_next_block() -> None:
    """Also the part after the first layer that writes its gradient: there are two tensors of
    full gradients.
    """
    *_, (_, backward) = virtual_step(
        BLOCKS,
        forward=2.0,
        backward=4.0,
        gather=1.0,
        reduce=5.0,
        in_list=True,
        kind=TicksAroundLinear,
    )
    assert backward == 4.0 + BLOCKS * 5.0


@pytest.mark.parametrize("optimizer_shards", [None, "all"])
def test_the_sum_over_replicas_overlaps_the_next_backward_and_the_next_reduction(
    optimizer_shards: Any,
) -> None:
    init = {"shard_size": 2, "optimizer_shards": optimizer_shards}
    run_ranks(hides_both_sums, 4, init=init)


def hides_both_sums() -> None:
    *_, (_, backward) = virtual_step(
        BLOCKS, forward=3.0, backward=6.0, gather=1.0, reduce=5.0, in_list=True, over_replicas=4.0
    )
    # Only the last reduction and the last sum over replicas are seen.
    assert backward == BLOCKS * 6.0 + 5.0 + 4.0


class NotesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, note: Callable[[], None]) -> Any:
        ctx.note = note
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.note()
        return grads[0], torch.ones(4), None


class Noted(nn.Module):
    """A layer whose backward calls ``note``."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.note = note

    def forward(self, x: torch.Tensor) -> Any:
        return NotesBackward.apply(x, self.weight, self.note)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("optimizer_shards", [None, "all"])
def test_on_the_cpu_a_sum_over_replicas_is_under_way_during_the_next_backward(
    optimizer_shards: Any,
) -> None:
    init = {"device": "cpu", "shard_size": 2, "optimizer_shards": optimizer_shards}
    run_ranks(notes_sums, 4, init=init)


def notes_sums() -> None:
    found: list[str] = []

    def watch(lane: Lane) -> None:
        started, real = 0, lane.run

        def run(start: Any, then: Any = None) -> Any:
            nonlocal started
            number, started = started, started + 1
            found.append(f"{lane.name} {number} starts")
            mark = real(start, then)
            wait = mark.wait

            def noted_wait() -> None:
                if (ends := f"{lane.name} {number} is waited for") not in found:
                    found.append(ends)
                wait()

            mark.wait = noted_wait  # type: ignore[method-assign]
            return mark

        lane.run = run  # type: ignore[method-assign]

    watch(current().lanes.reduce)
    watch(current().lanes.named("replicas"))
    blocks = TransformerBlockList(
        [Block(Noted(partial(found.append, f"backward {2 - i}"))) for i in range(3)]
    )
    blocks(torch.ones(2, 4)).sum().backward()
    at = found.index
    for i in range(3):  # on the CPU the host waits for the first sum before it starts the second
        assert at(f"reduce {i} is waited for") < at(f"replicas {i} starts")
        assert f"replicas {i} is waited for" in found
    for i in range(2):
        starts, ends = f"replicas {i} starts", f"replicas {i} is waited for"
        assert at(starts) < at(f"backward {i + 1}") < at(ends)
    for p in blocks.parameters():
        assert p.grad is not None and torch.equal(p.grad, torch.full_like(p, 4.0))


@on_ranks(2)
def test_the_first_block_is_gathered_when_the_model_is_called() -> None:
    blocks = TransformerBlockList([Block(nn.Linear(4, 4)) for _ in range(3)])
    begun: list[int] = []
    lane = current().lanes.gather
    calls = 0

    def run(start: Any, then: Any = None, real: Any = lane.run) -> Any:
        nonlocal calls
        calls += 1
        return real(start, then)

    lane.run = run  # type: ignore[method-assign]

    class Model(DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> Any:
            begun.append(calls)
            return self.blocks(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        calls = 0
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    # The first step is without what it could have learned from one before.
    assert begun == [0, 1, 1]


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((3,), 1.0 + i / count) for i in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack(list(self.weights._parameters.values())).mean(0)  # type: ignore[arg-type]


@on_ranks(2)
@cells("level", range(4))
def test_python_calls_do_not_grow_with_the_number_of_parameters(level: int) -> None:
    found = []
    for count in (4, 400):
        block = Block(Many(count), True, level)
        calls: Counter[str] = Counter()

        def note(frame: Any, event: str, argument: Any, calls: Counter[str] = calls) -> None:
            # torch itself looks at each argument of an autograd function.
            if event == "call" and "functorch" not in frame.f_code.co_filename:
                calls[frame.f_code.co_filename + frame.f_code.co_name] += 1

        for step in range(4):
            if step == 3:
                sys.setprofile(note)
            try:
                block(torch.ones(3)).sum().backward()
            finally:
                sys.setprofile(None)
            block.zero_grad()
        found.append(calls)
    few, many = found
    assert many == few


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@on_ranks(2)
@cells("level", [0, 3])
def test_who_watches_reductions_is_told_of_each_during_backward(level: int) -> None:
    blocks = nn.Sequential(*[Block(Scaled(), zero_level=level) for _ in range(2)])
    found: list[float] = []

    def watcher(flat: torch.Tensor, done: Mark) -> None:
        done.wait()
        found.append(flat.max().item())

    for block in blocks:
        owner = owner_of(block._parameters["weight"])
        assert owner is not None
        owner.watch_reductions(watcher)
    blocks(torch.ones(1, 128)).sum().backward()
    # At level 3 the second rank's part of so few elements is padding.
    assert found == [0.0 if level == 3 and rank() == 1 else 2.0] * 2


def trained_with_delays(levels: list[int], use_checkpoint: bool, cycles: int) -> list[torch.Tensor]:
    """Parameters after four steps of two micro-batches each, with ``cycles`` of waiting before and
    after all collectives.
    """
    torch.manual_seed(0)
    modules = [
        nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16() for _ in levels
    ]
    blocks = TransformerBlockList(
        [Block(m, use_checkpoint, level) for m, level in zip(modules, levels, strict=True)]
    )
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
    torch.manual_seed(rank())
    data = torch.randn(8, 16, 64, device=current().device).bfloat16()
    with delayed(cycles):
        for step in range(4):
            for micro_batch in range(2):
                blocks(data[2 * step + micro_batch]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [value.float().cpu() for value in blocks.state_dict().values()]


@pytest.mark.gpu
@on_ranks(max(1, min(gpu_ranks(), 4)), init={"device": "cuda"})
@pytest.mark.parametrize("levels", [[3, 3, 3], [2, 2, 2], [1, 1, 1], [0, 0, 0], [3, 1, 2]])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_delays_change_nothing(levels: list[int], use_checkpoint: bool) -> None:
    expected = trained_with_delays(levels, use_checkpoint, 0)
    for cycles in (2_000_000, 1_000_001):
        torch.testing.assert_close(
            trained_with_delays(levels, use_checkpoint, cycles), expected, rtol=0, atol=0
        )
