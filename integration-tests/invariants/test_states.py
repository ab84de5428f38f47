"""The state of an optimizer is divided among ranks and joined again without loss: from N ranks to M
and back to N it is the same in every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bmt_optim import AdamOptimizer, OptimManager
from bmt_testing import run_ranks
from bmt_zero import Block

OPTIMIZERS = {
    "adam": lambda parameters: AdamOptimizer(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True)
class Training:
    """What is drawn: parameters, their optimizer, and the level of the Block that has them."""

    sizes: tuple[int, ...]
    optimizer: str
    dtype: torch.dtype
    level: int


trainings = st.builds(
    Training,
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    level=st.integers(0, 3),
)


class Squares(nn.Module):
    """Returns the sum of the squares of its parameters."""

    def __init__(self, case: Training) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.linspace(-1, 1, size).to(case.dtype) for size in case.sizes
        )

    def forward(self) -> torch.Tensor:
        squares = [weight.float().square().sum() for weight in self.weights]
        return torch.stack(squares).sum()


def trained(case: Training, before: Any, steps: int) -> dict[str, Any]:
    """Load the values and state of ``before``, if there are any, make ``steps``, and return the
    whole values on all ranks, and the whole state on rank 0.
    """
    model = Squares(case)
    Block(model, zero_level=case.level)
    manager = OptimManager()
    manager.add_optimizer(OPTIMIZERS[case.optimizer](model.parameters()))
    names = list(model.named_parameters())
    if before is not None:
        model.load_state_dict(before["values"])
        manager.load_state_dict(before["state"], named_parameters=names)
    for _ in range(steps):
        manager.zero_grad()
        manager.backward(model())
        manager.step()
    state = manager.state_dict(gather_opt=True, named_parameters=names)
    return {"values": dict(model.state_dict()), "state": state}


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same in every bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@settings(max_examples=10)
@given(trainings, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_a_state_survives_from_n_to_m_to_n_ranks_in_every_bit(
    case: Training, ranks: int, others: int
) -> None:
    first, *empty = run_ranks(trained, ranks, case, None, 2)
    assert first["state"]["logical"]["parameters"]
    assert all(not other["state"]["logical"]["parameters"] for other in empty)
    travelled = first
    for world in (others, ranks):
        travelled = run_ranks(trained, world, case, travelled, 0)[0]
    assert same(travelled, first)
