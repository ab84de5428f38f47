"""Train a model on ranks beside the same model in plain torch, and compare them step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current
from bmt_optim import OptimManager
from bmt_params import DistributedParameter

STEPS, MAX_NORM = 3, 0.5
LossOf = Callable[[Any, int, int, int], torch.Tensor]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train_beside_torch(
    model: nn.Module,
    expected: nn.Module,
    loss_of: LossOf,
    expected_loss_of: LossOf | None = None,
    *,
    make: Make = sgd,
    make_of_torch: Make = sgd,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    rtol_of_first_gradients: float | None = None,
    max_norm: float | None = MAX_NORM,
) -> Any:
    """Train ``model`` on the loss that ``loss_of(model, step, part, parts)`` returns of a part of
    the data, a rank's, and ``expected`` on that of all. Losses, norms, the gradients of the first
    step, and the parameters after the last must be equal. Return the optimizer.
    """
    topology = current().topology
    optimizer, plain_optimizer = (
        make([*model.parameters()]),
        make_of_torch([*expected.parameters()]),
    )
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    # Losses and norms are sums of many terms, whose roundings cancel.
    close: Any = functools.partial(torch.testing.assert_close, rtol=min(rtol, 1e-6), atol=atol)
    for step in range(STEPS):
        manager.zero_grad()
        plain_optimizer.zero_grad()
        loss = loss_of(model, step, topology.data_rank, topology.data_size)
        manager.backward(loss)
        expected_loss = (expected_loss_of or loss_of)(expected, step, 0, 1)
        expected_loss.backward()
        close(all_reduce(loss.detach(), "avg"), expected_loss.detach())
        if step == 0:
            first = rtol_of_first_gradients
            assert_same_parameters(model, expected, rtol=first or rtol, atol=first or atol)
        if max_norm is not None:
            norm = manager.clip_grad_norm(optimizer.param_groups, max_norm)
            expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), max_norm)
            close(norm, expected_norm, check_dtype=False)
        manager.step()
        plain_optimizer.step()
    assert_same_parameters(model, expected, rtol=rtol, atol=atol)
    return optimizer


def assert_same_parameters(
    model: nn.Module, expected: nn.Module, *, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    """Compare the whole parameters of ``model``, and their gradients if they are there, with those
    of ``expected``. Collective.
    """
    others = dict(expected.named_parameters())
    for name, p in model.named_parameters():
        for value, wanted in ((p.detach(), others[name].detach()), (p.grad, others[name].grad)):
            if value is not None:
                assert wanted is not None, name
                torch.testing.assert_close(whole(p, value), wanted, rtol=rtol, atol=atol, msg=name)


def whole(parameter: nn.Parameter, value: torch.Tensor | None) -> torch.Tensor:
    """The whole of ``value``, which is laid out like ``parameter``. Collective."""
    assert value is not None
    return (
        parameter.gather_all_like(value).clone()
        if isinstance(parameter, DistributedParameter)
        else value.clone()
    )
