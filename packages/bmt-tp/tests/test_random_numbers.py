"""What the ranks along tp draw."""

from __future__ import annotations

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.run.runtime import current
from bmt_params import DistributedModule
from bmt_testing import on_ranks
from bmt_tp import own_random_numbers


@on_ranks(2, init={"tp_size": 2})
def test_ranks_draw_differently_inside_and_alike_outside() -> None:
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
    one, other = all_gather_object([before, first, after], current().world)
    assert [torch.equal(*pair) for pair in zip(one, other, strict=True)] == [True, False, True]


@on_ranks(4, init={"tp_size": 2})
def test_modules_called_inside_draw_differently_on_ranks_of_other_data() -> None:
    module = DistributedModule()
    module.forward = lambda: torch.rand(4)  # type: ignore[method-assign, assignment]
    with own_random_numbers():
        found = tuple(module().tolist())
    assert len(set(all_gather_object(found, current().world))) == 4


@on_ranks(1)
def test_one_rank_draws_as_plain_torch() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with own_random_numbers():
        assert torch.equal(torch.rand(2), expected)
