"""What the ranks along tp draw."""

from __future__ import annotations

import torch

from bmt_core import DistributedModule
from bmt_testing import run_ranks
from bmt_tp import own_random_numbers


def drawn() -> list[torch.Tensor]:
    torch.manual_seed(3)
    before = torch.rand(2)
    state = torch.get_rng_state()
    with own_random_numbers():
        first = torch.rand(2)
    with own_random_numbers():
        second = torch.rand(2)
    after = torch.rand(2)
    torch.set_rng_state(state)  # as a recomputation does
    with own_random_numbers():
        again = torch.rand(2)
    assert torch.equal(first, again) and not torch.equal(first, second)
    return [before, first, after]


def test_ranks_draw_differently_inside_and_alike_outside() -> None:
    (before, first, after), (other_before, other_first, other_after) = run_ranks(drawn, 2, init={"tp_size": 2})
    assert torch.equal(before, other_before) and torch.equal(after, other_after)
    assert not torch.equal(first, other_first)


def drawn_by_a_module() -> list[float]:
    module = DistributedModule()
    module.forward = lambda: torch.rand(4)  # type: ignore[method-assign, assignment]
    with own_random_numbers():
        found: list[float] = module().tolist()
    return found


def test_modules_called_inside_draw_differently_on_ranks_of_other_data() -> None:
    found = run_ranks(drawn_by_a_module, 4, init={"tp_size": 2})
    assert len(set(map(tuple, found))) == 4


def unchanged() -> torch.Tensor:
    torch.manual_seed(3)
    with own_random_numbers():
        return torch.rand(2)


def test_one_rank_draws_as_plain_torch() -> None:
    torch.manual_seed(3)
    assert torch.equal(run_ranks(unchanged, 1)[0], torch.rand(2))
