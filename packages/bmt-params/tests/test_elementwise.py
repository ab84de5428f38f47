"""Loops without a manager, and optimizers that would train another model on slices
of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import odd_optimizers as odd
import pytest
import torch

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import rank
from bmt_params.guards import elementwise
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks, run_ranks


class OwnLBFGS(torch.optim.LBFGS):
    bmt_elementwise = True


KINDS = (
    torch.optim.LBFGS,
    torch.optim.Adafactor,
    torch.optim.Muon,
    odd.Norm,
    odd.GlobalClip,
    OwnLBFGS,
    torch.optim.Adam,
)


def refused(is_sharded: bool) -> list[str]:
    found = []
    for kind in KINDS:
        whole = torch.ones(4, 3)
        p: Any = DistributedParameter(whole) if is_sharded else torch.nn.Parameter(whole)
        # Muon takes matrices only, so the part comes in by a group that is changed later, as a
        # restored state changes it.
        optimizer: Any = kind([torch.nn.Parameter(torch.ones(2, 2))])
        optimizer.param_groups[0]["params"][:] = [p]
        p.grad = torch.linspace(1, 2, p.numel()).view_as(p)
        before = p.detach().clone()
        try:
            optimizer.step(lambda: torch.ones(()))
        except ConfigError as error:
            assert torch.equal(p.detach(), before) and not optimizer.state
            found.append(str(error))
        else:
            assert not torch.equal(p.detach(), before)
    return found


def names_in(messages: list[str]) -> list[str]:
    return [message.split(" cannot train sharded parameters")[0] for message in messages]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_only_steps_that_need_whole_parameters_are_refused_on_parts(is_sharded: bool) -> None:
    for messages in run_ranks(refused, 2, is_sharded):
        assert names_in(messages) == (
            ["LBFGS", "Adafactor", "Muon", "Norm", "GlobalClip"] if is_sharded else []
        )
        assert all(
            "stepping two tensors together gives another result" in messages[i]
            for i in (0, 4)
            if is_sharded
        )
        assert all("bmt.optim.whole(" in messages[i] for i in (1, 2, 3) if is_sharded)


def test_a_rank_that_has_every_value_refuses_what_needs_shapes_only() -> None:
    (messages,) = run_ranks(refused, 1, True)
    assert names_in(messages) == ["Adafactor", "Muon"]
    assert all(
        "stepping a matrix as a 1-D tensor gives another result than stepping it whole" in m
        for m in messages
    )


def stepped(
    make: Callable[[Any], Any], sizes: tuple[int, ...], *, steps: int = 2
) -> list[torch.Tensor]:
    """Step distributed parameters of these sizes, with the gradients 1, 2, ...; return
    whole values.
    """
    params = [DistributedParameter(torch.ones(size)) for size in sizes]
    optimizer = make(params)
    for _ in range(steps):
        for p, size in zip(params, sizes, strict=True):
            p.grad = p.local_part(torch.arange(1.0, size + 1))
        optimizer.step()
    return [p.gather().detach() for p in params]


@on_ranks(2)
def test_what_cannot_be_found_out_is_said_once_and_steps() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepped(odd.Noisy, (6, 4), steps=3)
    told = [
        str(warning.message)
        for warning in caught
        if "could not be found out" in str(warning.message)
    ]
    assert len(told) == (rank() == 0)
    assert all(
        "two trials of the same differ" in text and "bmt_elementwise = True, or False" in text
        for text in told
    )


class TakesNoClosure(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


@on_ranks(2)
def test_a_step_that_takes_no_closure_is_tried_without_one() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be found out")
        (value,) = stepped(lambda params: TakesNoClosure(params, lr=0.5), (6,), steps=1)
    torch.testing.assert_close(value, 1 - 0.5 * torch.arange(1.0, 7))


@on_ranks(2)
def test_a_parameter_without_elements_is_left_out_of_a_step_that_would_fail() -> None:
    found, plain = stepped(odd.LogsLargest, (1, 5)), stepped(odd.Plain, (1, 5))
    for value, size in zip(found, (1, 5), strict=True):
        p = torch.nn.Parameter(torch.ones(size))
        optimizer = odd.LogsLargest([p])
        for _ in range(2):
            p.grad = torch.arange(1.0, size + 1)
            optimizer.step()
        assert torch.equal(value, p.detach())
    assert not torch.equal(found[1], plain[1])


@on_ranks(2)
def test_the_kind_is_looked_up_once_and_not_at_each_step() -> None:
    p = DistributedParameter(torch.ones(8))
    optimizer = torch.optim.AdamW([p])
    calls, check = [], elementwise.check_elementwise

    def counted(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        check(*arguments, **options)

    elementwise.check_elementwise = counted
    try:
        for _ in range(5):
            p.grad = torch.ones_like(p)
            optimizer.step()
    finally:
        elementwise.check_elementwise = check
    assert len(calls) == 1


@on_ranks(2)
def test_a_group_may_declare_itself() -> None:
    one, two = DistributedParameter(torch.ones(6)), torch.nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.Adafactor(
        [{"params": [one], "bmt_elementwise": True}, {"params": [two]}]
    )
    for p in (one, two):
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer = torch.optim.SGD(
        [{"params": [DistributedParameter(torch.ones(4, 3))], "bmt_elementwise": False}], lr=0.1
    )
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(
        optimizer.param_groups[0]["params"][0]
    )
    with pytest.raises(ConfigError, match="bmt_elementwise = False"):
        optimizer.step()


@on_ranks(2)
def test_an_empty_group_is_judged_by_the_parameters_of_others() -> None:
    """As on a stage of a pipeline that has no matrices while another has."""
    p = DistributedParameter(torch.ones(6))
    optimizer = torch.optim.Adafactor([{"params": [p], "bmt_elementwise": True}, {"params": []}])
    p.grad = torch.ones_like(p)
    with pytest.raises(ConfigError, match="Adafactor cannot train sharded parameters"):
        optimizer.step()
