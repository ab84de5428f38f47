"""The states of gradients, and the table of events between them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from bmt_core.errors import BmtError
from bmt_params.modules.block_use import BlockUse
from bmt_params.modules.postponed_gradients import PostponedGradients, postpone_weight_gradients
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block
from bmt_zero.direct_linear import WeightGradient
from bmt_zero.gradient_ledger import GradientLedger, GradientState, ReductionsInFlight

S = GradientState


class Transition(NamedTuple):
    """The states that an event ends, and those that it begins."""

    ends: GradientState
    begins: GradientState


TRANSITIONS = {
    "hold_back": Transition(S.EMPTY, S.HELD_BACK),
    "postpone": Transition(S.EMPTY, S.POSTPONED),
    # Then its gradients are held back or reduced.
    "resume the last ticket": Transition(S.POSTPONED, S.EMPTY),
    "reduce": Transition(S.HELD_BACK | S.READY, S.REDUCING),
    "end_pass after reduce": Transition(S.REDUCING, S.READY),
    "clear all .grad": Transition(S.HELD_BACK | S.POSTPONED | S.READY, S.EMPTY),
    # A pass that has reduced, held back or postponed fails. What earlier ones have left goes
    # too: it may have been added to.
    "fail": Transition(S.HELD_BACK | S.POSTPONED | S.REDUCING, S.EMPTY),
}
"""What each event of a :class:`GradientLedger` does. States that it does not name stay."""


class Training:
    """A Block of one group of parameters, what its passes have postponed, and the states that the
    table says it is in.
    """

    def __init__(self, level: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.block: Any = Block(nn.Sequential(nn.Linear(3, 3, bias=False)), False, level).to(dtype)
        self.input = torch.ones(2, 3, dtype=dtype, requires_grad=True)
        self.postponed: list[PostponedGradients] = []
        self.expected = S.EMPTY
        self.run(BlockUse())
        self.block.zero_grad()
        self.ledger.notice_cleared()

    @property
    def ledger(self) -> GradientLedger:
        (group,) = self.block._bmt_block.state.groups
        ledger: GradientLedger = group.ledger
        return ledger

    def run(
        self, use: BlockUse, after_block: Callable[[torch.Tensor], None] = lambda grad: None
    ) -> None:
        """Run forward and backward of a micro-batch; ``after_block`` is called in backward when the
        Block's is over.
        """
        self.block.set_use(use)
        before = self.input * 2
        before.register_hook(after_block)
        self.block(before).float().sum().backward()

    def happens(self, *events: str) -> None:
        """Apply rows of the table to the expected states."""
        for event in events:
            ends, begins = TRANSITIONS[event]
            self.expected = (self.expected & ~ends) | begins

    def sees(self, states: GradientState) -> Callable[[torch.Tensor], None]:
        """Return a check that, while backward runs, ``states`` hold."""

        def check(grad: torch.Tensor) -> None:
            assert states in self.ledger.state, self.ledger.state

        return check


class Failure(Exception):
    """Raised inside of a backward pass."""


def hold_back(training: Training) -> None:
    training.run(BlockUse(last_backward=False), training.sees(S.HELD_BACK))
    training.happens("hold_back")


def reduce(training: Training) -> None:
    training.run(BlockUse(), training.sees(S.REDUCING))
    training.happens("reduce", "end_pass after reduce")


def postpone(training: Training) -> None:
    with postpone_weight_gradients() as postponed:
        training.run(BlockUse(last_backward=False), training.sees(S.POSTPONED))
    training.postponed.append(postponed)
    training.happens("postpone")


def compute(training: Training) -> None:
    postponed, training.postponed = training.postponed, []
    if S.POSTPONED in training.expected:
        for gradients in postponed:
            gradients.compute()
        training.happens("resume the last ticket", "hold_back")
    elif postponed:
        with pytest.raises(BmtError, match="which drops them"):
            postponed[0].compute()


def zero_grad(training: Training) -> None:
    training.block.zero_grad()
    training.ledger.notice_cleared()
    training.happens("clear all .grad")


def step(training: Training) -> None:
    if S.POSTPONED in training.expected:
        with pytest.raises(BmtError, match="are not computed"):
            torch.optim.SGD(training.block.parameters(), lr=0.1).step()
        return
    torch.optim.SGD(training.block.parameters(), lr=0.1).step()
    if S.HELD_BACK in training.expected:
        training.happens("reduce", "end_pass after reduce")


def fail(training: Training, *, reduces: bool) -> None:
    def raise_failure(grad: torch.Tensor) -> None:
        raise Failure

    with pytest.raises(Failure):
        training.run(BlockUse(last_backward=reduces), raise_failure)
    training.ledger.notice_cleared()
    training.happens("reduce" if reduces else "hold_back", "fail")


def fail_after_reduce(training: Training) -> None:
    fail(training, reduces=True)


def fail_after_hold_back(training: Training) -> None:
    fail(training, reduces=False)


ACTIONS = [
    hold_back,
    reduce,
    postpone,
    compute,
    zero_grad,
    step,
    fail_after_reduce,
    fail_after_hold_back,
]


def walk(level: int, dtype: torch.dtype) -> None:
    """Do every sequence of two actions, and some of five, each on a new Block."""
    draw = random.Random(0)
    longer = [draw.choices(ACTIONS, k=5) for _ in range(60)]
    for actions in (*itertools.product(ACTIONS, repeat=2), *longer):
        training = Training(level, dtype)
        for number, action in enumerate(actions):
            action(training)
            done = [action.__name__ for action in actions[: number + 1]]
            assert training.ledger.state == training.expected, (
                done,
                training.ledger.state,
                training.expected,
            )


@pytest.mark.parametrize(
    ("world_size", "level", "dtype"), [(1, 3, torch.bfloat16), (2, 1, torch.float32)]
)
def test_every_sequence_of_events_leads_where_the_table_says(
    world_size: int, level: int, dtype: torch.dtype
) -> None:
    run_ranks(walk, world_size, level, dtype)


def gradient_of(training: Training) -> torch.Tensor:
    (parameter,) = training.block.parameters()
    grad: torch.Tensor = parameter.grad
    return grad


@on_ranks(1)
def test_after_a_product_that_failed_nothing_of_the_step_is_left() -> None:
    training = Training(3, torch.bfloat16)
    for _ in range(2):
        postpone(training)
    hold_back(training)
    first, second = training.postponed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradient, "add_to", lambda *args: fail_as_without_memory())
        with pytest.raises(Failure):
            first.compute()
    assert training.ledger.state == S.EMPTY
    with pytest.raises(BmtError, match="which drops them"):
        second.compute()
    training.run(BlockUse(last_backward=False))
    assert S.HELD_BACK in training.ledger.state


def fail_as_without_memory() -> None:
    raise Failure


@on_ranks(1)
def test_a_gradient_that_came_after_a_dropped_pass_stays() -> None:
    training = Training(3, torch.float32)
    (parameter,) = training.block.parameters()
    postpone(training)
    training.postponed.pop().drop()
    training.block.zero_grad()
    (10 * parameter.sum()).backward()
    training.run(BlockUse())
    torch.testing.assert_close(gradient_of(training), torch.full_like(parameter, 10.0 + 4.0))


@on_ranks(1)
def test_a_penalty_in_a_pass_that_holds_back_is_added_to_what_is_reduced() -> None:
    training = Training(3, torch.float32)
    (parameter,) = training.block.parameters()
    hold_back(training)
    training.block.set_use(BlockUse(last_backward=False))
    (training.block(training.input * 2).sum() + 10 * parameter.sum()).backward()
    training.run(BlockUse())
    torch.testing.assert_close(gradient_of(training), torch.full_like(parameter, 10.0 + 4.0 * 3))


@on_ranks(1)
def test_one_optimizer_after_the_other_may_set_its_gradients_to_zero() -> None:
    torch.manual_seed(0)
    block: Any = Block(nn.Linear(3, 3), False, 3)
    block.set_use(BlockUse(last_backward=False))
    block(torch.ones(2, 3)).sum().backward()
    (group,) = block._bmt_block.state.groups
    for parameter in block.parameters():
        torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=False)
        group.ledger.notice_cleared()
    assert group.ledger.state == S.EMPTY


class Noted:
    """The mark of a reduction, which notes that somebody waited for it."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self._name, self._waited = name, waited

    def wait(self) -> None:
        self._waited.append(self._name)


def test_room_is_made_by_waiting_for_the_reductions_of_all_blocks_but_the_latest() -> None:
    in_flight, waited = ReductionsInFlight(), list[str]()
    in_flight.make_room()
    for block in ("a", "b", "c", "c"):
        in_flight.keep(block, torch.empty(1), Noted(block, waited))
    in_flight.make_room()
    assert waited == ["a", "b"]
    in_flight.wait()
    in_flight.wait()
    assert waited == ["a", "b", "c", "c"]
