"""``Prefetch``: which blocks are gathered ahead of which event, within how many bytes."""

from __future__ import annotations

import pytest
from torch import nn

from bmt_zero.prefetch import HOPS, Prefetch


class Block:
    """Notes what it is told. ``ahead``: whether it is gathered for its next forward or backward."""

    def __init__(self, number: int, *, is_sharded: bool) -> None:
        self.number = number
        self.name = f"block {number}"
        self.following: int | None = None
        self.preceding: int | None = None
        self.is_sharded = is_sharded
        self.size = 1
        self.ahead: str | None = None
        self.may_gather = True
        self.is_forgotten = False

    def bytes_to_gather(self, *, is_backward: bool) -> int:
        return self.size

    def gather_ahead(self, *, is_backward: bool) -> bool:
        if self.may_gather:
            self.ahead = "backward" if is_backward else "forward"
        return self.may_gather

    def release_ahead(self) -> None:
        self.ahead = None

    def reset(self) -> None:
        self.is_forgotten = True


class Run:
    """Blocks in a list, and their prefetch."""

    def __init__(self, number: int, budget: int | None = 100, *, is_sharded: bool = True) -> None:
        self.prefetch = Prefetch(budget)
        self.blocks = [Block(n, is_sharded=is_sharded) for n in range(number)]
        for block in self.blocks:
            block.following = block.number + 1 if block.number + 1 < number else None
            self.prefetch.add(block)

    def ahead(self) -> list[tuple[int, str]]:
        return [(block.number, block.ahead) for block in self.blocks if block.ahead]

    def forward(self, *numbers: int) -> list[tuple[int, str]]:
        return self._begin(numbers, is_backward=False)

    def backward(self, *numbers: int) -> list[tuple[int, str]]:
        return self._begin(numbers, is_backward=True)

    def _begin(self, numbers: tuple[int, ...], *, is_backward: bool) -> list[tuple[int, str]]:
        for number in numbers:
            self.prefetch.begins(self.blocks[number], is_backward=is_backward)
        return self.ahead()


@pytest.mark.parametrize(
    ("budget", "expected"), [(None, 1), (0, 1), (1, 1), (2, 2), (3, 3), (100, 4)]
)
def test_as_many_blocks_are_gathered_as_the_budget_allows_and_at_least_one(
    budget: int | None, expected: int
) -> None:
    run = Run(8, budget)
    assert HOPS == 4
    assert run.forward(0) == [(n, "forward") for n in range(1, 1 + expected)]
    assert run.forward(1) == [(n, "forward") for n in range(2, 2 + expected)]
    assert run.forward(7) == []


def test_what_is_gathered_already_costs_nothing() -> None:
    run = Run(6, budget=2)
    run.blocks[1].size = 0
    assert [number for number, _ in run.forward(0)] == [1, 2, 3]


def test_backward_is_expected_in_the_reverse_order_of_forward_whatever_the_list_says() -> None:
    run = Run(4)
    run.forward(0, 2, 1, 3)
    assert run.backward(3) == [(0, "backward"), (1, "backward"), (2, "backward")]
    assert run.backward(1) == [(0, "backward"), (2, "backward")]


def test_the_second_step_is_expected_to_be_like_the_first() -> None:
    run = Run(4)
    for _ in range(2):
        seen = [[n for n, _ in run.forward(number)] for number in (0, 1, 1, 3)]
        run.backward(3, 1, 1, 0)
    # Block 1 runs twice, block 2 not at all, and the backward follows.
    assert seen == [[1, 3], [1, 3], [1, 3], [0, 1, 3]]


def test_no_forward_is_expected_after_a_backward() -> None:
    run = Run(2)
    for _ in range(3):
        run.forward(0, 1)
        assert run.backward(1) == [(0, "backward")]
        assert run.backward(0) == []


def test_a_wrong_expectation_is_released_and_so_is_all_at_the_end_of_a_pass() -> None:
    run = Run(6, budget=1)
    assert run.forward(0) == [(1, "forward")]
    assert run.forward(3) == [(4, "forward")]
    run.prefetch.drop()
    assert run.ahead() == []
    assert not any(block.is_forgotten for block in run.blocks)
    run.forward(0)
    run.prefetch.reset()
    assert run.ahead() == [] and all(block.is_forgotten for block in run.blocks)


def test_the_call_of_the_outermost_module_gathers_the_blocks_that_followed_the_last_one() -> None:
    run, model, other = Run(5), nn.Module(), nn.Module()
    for _ in range(2):
        run.prefetch.call_begins(model)
        seen = run.ahead()
        run.forward(0, 1, 2, 3, 4)
        run.backward(4, 3, 2, 1, 0)
    assert seen == [(n, "forward") for n in range(4)]
    run.prefetch.call_begins(other)
    assert run.ahead() == []


def test_nothing_is_gathered_where_nothing_is_sharded_or_where_a_block_cannot_be() -> None:
    assert Run(3, is_sharded=False).forward(0) == []
    run = Run(4)
    run.blocks[2].may_gather = False
    assert run.forward(0) == [(1, "forward")]


def test_a_block_that_is_gone_ends_what_is_expected() -> None:
    run = Run(5)
    del run.blocks[2]
    assert run.forward(0) == [(1, "forward")]


def test_a_block_that_is_gone_ends_what_is_expected_also_after_a_block_was_added() -> None:
    """Ranks collect garbage at different times, and must expect the same."""
    run = Run(3)
    for _ in range(2):
        run.forward(0, 2)
    del run.blocks[2]
    run.blocks.append(Block(3, is_sharded=True))
    run.prefetch.add(run.blocks[2])
    assert run.forward(0) == []


def test_what_followed_blocks_that_are_gone_is_forgotten() -> None:
    run, kept = Run(3), []
    for first in range(3, 18, 3):
        run.forward(0, 1, 2)
        run.backward(2, 1, 0)
        kept.append(len(run.prefetch._after))
        run.blocks = [Block(first + n, is_sharded=True) for n in range(3)]
        for block in run.blocks:
            run.prefetch.add(block)
    assert kept[0] == 5 and len(set(kept[1:])) == 1
