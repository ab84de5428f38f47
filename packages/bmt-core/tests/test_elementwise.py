"""Loops without a manager, and optimizers that would train another model on slices of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmt_core.errors import ConfigError
from bmt_core.params.parameter import DistributedParameter
from bmt_testing import run_ranks


class OwnLBFGS(torch.optim.LBFGS):
    bmt_elementwise = True


def refused(is_sharded: bool) -> list[str]:
    found = []
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, OwnLBFGS, torch.optim.Adam):
        whole = torch.ones(4, 3)
        p: Any = DistributedParameter(whole) if is_sharded else torch.nn.Parameter(whole)
        # Muon takes matrices only, so the part comes in by a group that is changed later, as a restored state changes it.
        optimizer: Any = kind([torch.nn.Parameter(torch.ones(2, 2))])
        optimizer.param_groups[0]["params"][:] = [p]
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        try:
            optimizer.step(lambda: torch.ones(()))
        except ConfigError as error:
            assert torch.equal(p.detach(), before) and not optimizer.state
            found.append(str(error))
        else:
            assert not torch.equal(p.detach(), before)
    return found


@pytest.mark.parametrize("is_sharded", [False, True])
def test_only_steps_that_need_whole_parameters_are_refused_on_parts(is_sharded: bool) -> None:
    for messages in run_ranks(refused, 2, is_sharded):
        names = ["LBFGS", "Adafactor", "Muon"] if is_sharded else []
        assert [message.split(" cannot train sharded parameters")[0] for message in messages] == names


def test_a_rank_that_has_every_value_refuses_what_needs_shapes_only() -> None:
    (messages,) = run_ranks(refused, 1, True)
    assert [message.split(" cannot train sharded parameters")[0] for message in messages] == ["Adafactor", "Muon"]
