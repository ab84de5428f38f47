"""``backward(loss_sum, count=tokens)``: gradients of the mean over all tokens of a step, compared
with plain torch on one process.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from managed import KINDS, managed, no_host_reads, parameter

from bmt_core import mean_loss
from bmt_core.run.runtime import current, rank
from bmt_optim import AdamOptimizer, OptimManager
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from cells import cells

WIDTH, ROWS, MICRO_BATCHES, MAX_NORM = 3, 16, 2, 0.02
WRONG: list[Any] = [-1, -0.5, math.nan, math.inf, "3", [3], 1j, torch.ones(1), torch.tensor(1j)]


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the manager leave the flag on the device, as it does on CUDA."""
    monkeypatch.setattr("bmt_optim.manager._is_on_host", lambda flag: False)


class Model(DistributedModule):
    """A sharded matrix, an ordinary bias, and a parameter that is not used."""

    def __init__(self, kind: type[torch.nn.Parameter]) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.weight = kind(torch.randn(WIDTH, 5, generator=numbers))
        self.bias = torch.nn.Parameter(torch.zeros(5))
        self.unused = kind(torch.zeros(2))

    def loss_sum(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight + self.bias).square().mean(1)[counts].sum()


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and which of them count: not the first four."""
    numbers = torch.Generator().manual_seed(step)
    drawn = torch.rand(ROWS, generator=numbers)
    return torch.randn(ROWS, WIDTH, generator=numbers), (drawn > 0.4) & (torch.arange(ROWS) > 3)


def in_plain_torch(*, is_clipped: bool) -> dict[str, Any]:
    model, found = Model(torch.nn.Parameter), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, counts = rows(step)
        loss = model.loss_sum(x, counts) / counts.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        found[f"loss {step}"] = loss.detach()
        if is_clipped:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            found[f"norm {step}"] = norm
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: p.detach() for name, p in model.named_parameters()}


@on_ranks(4)
@cells("is_clipped", [False, True])
@cells("loss_scale", [None, 256.0])
def test_unequal_numbers_of_tokens_train_as_in_plain_torch(
    loss_scale: float | None, is_clipped: bool
) -> None:
    expected = in_plain_torch(is_clipped=is_clipped)
    model: Any = Model(DistributedParameter)
    topology, manager = current().topology, OptimManager(loss_scale=loss_scale, loss_scale_steps=1)
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = {}
    for step in range(3):
        own = [each.chunk(topology.data_size)[topology.data_rank] for each in rows(step)]
        total = torch.zeros(())
        for x, counts in zip(*[each.chunk(MICRO_BATCHES) for each in own], strict=True):
            loss_sum = model.loss_sum(x, counts)
            manager.backward(loss_sum, count=counts.sum())
            total += loss_sum.detach()
        found[f"loss {step}"] = mean_loss(total, own[1].sum())
        if is_clipped:
            norm = manager.clip_grad_norm(model.parameters(), MAX_NORM)
            found[f"norm {step}"] = norm
        manager.step()
        manager.zero_grad()
    # Read outside of a Block, a sharded parameter is whole.
    found |= {name: getattr(model, name).detach() for name in ("weight", "bias", "unused")}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_scale", [None, 64.0])
def test_every_kind_of_optimizer_gets_divided_gradients(
    kind: str, loss_scale: float | None
) -> None:
    gradient = torch.tensor([1.0, -2.0, 3.0])
    p, q = parameter(), parameter()
    manager, plain = managed(p, kind, loss_scale=loss_scale), managed(q, kind)
    for _ in range(3):
        manager.backward((p * gradient).sum(), count=3)
        manager.backward((p * gradient).sum() * 5, count=torch.tensor(9))
        manager.step()
        manager.zero_grad()
        q.grad = gradient / 2
        plain.step()
        torch.testing.assert_close(p, q)


def test_gradients_are_divided_once_at_the_first_of_the_calls_that_need_it() -> None:
    p = parameter()
    manager = managed(p, loss_scale=8.0)
    manager.backward(p.sum() * 6, count=3)
    manager.backward(p.sum() * 12, count=1)
    assert p.grad is not None and p.grad.eq(8 * 18 / 3).all()
    for _ in range(2):
        assert manager.clip_grad_norm([p], math.inf) == pytest.approx(4.5 * 3**0.5)
        ((_, unscaled),) = manager.unscaled_gradients([p])
        assert unscaled.eq(4.5).all() and p.grad.eq(8 * 4.5).all()
    # What comes later in the same step is added, and divides all.
    manager.backward(p.sum() * 7, count=1)
    ((_, unscaled),) = manager.unscaled_gradients([p])
    torch.testing.assert_close(unscaled, torch.full((3,), 5.0))


def test_gradients_of_half_types_stay_in_range_until_they_are_divided() -> None:
    p = parameter(dtype=torch.float16)
    manager = managed(p, "adamw")
    for _ in range(4):
        manager.backward(p.float().sum() * 2.0**18, count=2**17)  # 65,504 is the largest
        assert p.grad is not None and p.grad.isfinite().all()
    assert manager.clip_grad_norm([p], math.inf) == pytest.approx(2 * 3**0.5, rel=1e-3)


@on_ranks(2)
def test_a_step_without_any_token_has_zero_gradients() -> None:
    p = parameter()
    manager = managed(p, "momentum")
    for tokens in (0, torch.tensor(0)):
        for _ in range(2):
            manager.backward(p.sum() * 0, count=tokens)
        assert manager.clip_grad_norm([p], 1.0) == 0
        manager.step()
        manager.zero_grad()
        assert p.tolist() == [1, 2, 3] and manager.skipped_steps == 0
    manager.backward(p.sum() * 0, count=0)  # this micro-batch alone has none
    manager.backward(p.sum() * current().world_size, count=4)
    assert manager.clip_grad_norm([p], 9.0) == pytest.approx(current().world_size / 4 * 3**0.5)


@pytest.mark.parametrize("ends", ["zero_grad", "step", "load"])
def test_a_step_has_counts_in_every_call_or_in_none(ends: str) -> None:
    p = parameter()
    manager = managed(p)

    def end() -> None:
        if ends == "load":
            manager.load_state_dict(manager.state_dict())
        else:
            getattr(manager, ends)()

    for first, second in (({"count": 3}, {}), ({}, {"count": 3})):
        manager.backward(p.sum(), **first)
        with pytest.raises(ValueError, match="losses with a count and losses without one"):
            manager.backward(p.sum(), **second)
        with pytest.raises(ValueError, match="to each call of backward"):
            manager.scale_loss(p.sum(), **second)
        end()
        manager.backward(p.sum(), **second)
        end()


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_no_number_of_tokens_is_refused_at_once(wrong: Any) -> None:
    p = parameter()
    manager = managed(p)
    with pytest.raises(ValueError, match=r"count must be (0 or more|a number or a 0-dim tensor)"):
        manager.backward(p.sum(), count=wrong)
    assert p.grad is None
    manager.backward(p.sum(), count=3)  # the refused call counts nothing
    assert p.grad is not None and p.grad.eq(1 / 3).all()


@on_ranks(2)
@cells("wrong", [-1.0, math.nan, math.inf])
@cells("is_second", [False, True])
def test_a_tensor_that_is_no_number_of_tokens_is_refused_on_all_ranks_by_step(
    wrong: float, is_second: bool
) -> None:
    for loss_scale in (None, 8.0):
        p = parameter()
        manager = managed(p, loss_scale=loss_scale)
        manager.backward(p.sum(), count=torch.tensor(1.0 if is_second or rank() else wrong))
        manager.backward(p.sum(), count=torch.tensor(wrong if is_second and not rank() else 1.0))
        with pytest.raises(ValueError, match="is negative, infinite or NaN on some rank"):
            manager.step()
        assert p.tolist() == [1, 2, 3] and manager.loss_scale == (loss_scale or 1)
        manager.zero_grad()
        manager.backward(p.sum(), count=3)
        manager.step()
        assert manager.skipped_steps == 0 and p[0] < 1


def test_such_a_tensor_is_refused_when_a_flag_on_the_device_is_read(deferred: None) -> None:
    p = parameter()
    manager = managed(p)
    manager.backward(p.sum(), count=torch.tensor(-3))
    manager.step()
    assert p.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="is negative, infinite or NaN on some rank"):
        manager.backward(p.sum(), count=3)
    manager.backward(p.sum(), count=3)


def test_nothing_is_read_on_the_host(deferred: None) -> None:
    p = parameter()
    manager = managed(p, loss_scale=64.0)
    for _ in range(3):
        manager.read_outcome()
        with no_host_reads():
            manager.backward(p.sum(), count=torch.tensor(3))
            manager.backward(p.sum(), count=4)
            manager.clip_grad_norm([p], 1.0)
            manager.step()
        manager.zero_grad()


@pytest.mark.parametrize("how", ["optimizer", "by hand"])
def test_gradients_that_were_cleared_without_the_manager_leave_no_counts(how: str) -> None:
    p = parameter()
    manager = managed(p)
    for _ in range(3):  # batches that the program has thrown away
        manager.backward(p.sum() * 1000, count=50)
        if how == "optimizer":
            manager.optimizers[0].zero_grad()
        else:
            p.grad = None
    manager.backward(p.sum(), count=2)
    manager.backward(p.sum(), count=2)
    assert manager.clip_grad_norm([p], math.inf) == pytest.approx(0.5 * 3**0.5)


def test_a_step_of_which_all_passes_failed_can_be_taken() -> None:
    p = parameter()
    manager = managed(p)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not require grad"):
            manager.backward(p.sum().detach(), count=2)
    assert manager.clip_grad_norm([p], 1.0) == 0
    manager.step()


@pytest.mark.parametrize("before", [0, 5])
def test_a_backward_pass_that_failed_leaves_no_count(before: int) -> None:
    p = parameter()
    manager = managed(p)
    if before:
        manager.backward(p.sum() * before, count=before)
    with pytest.raises(RuntimeError, match="does not require grad"):
        manager.backward(p.sum().detach(), count=2)
    manager.backward(p.sum() * 2, count=2)
    assert manager.clip_grad_norm([p], math.inf) == pytest.approx(3**0.5)


def test_a_parameter_of_no_optimizer_is_divided_with_the_others_or_refused() -> None:
    p, frozen_later = parameter(), parameter()
    manager = managed(p)
    for params in ([p, frozen_later], [p]):
        for tokens in (1, 3):
            manager.backward(p.sum() + frozen_later.sum(), count=tokens)
        manager.clip_grad_norm(params, math.inf)
        if len(params) == 2:
            assert all(g.eq(0.5).all() for _, g in manager.unscaled_gradients([p, frozen_later]))
        else:
            with pytest.raises(
                ValueError, match="1 parameters have gradients that were not divided"
            ):
                manager.unscaled_gradients([p, frozen_later])
        manager.step()
        manager.zero_grad()
        frozen_later.grad = None


def test_a_loss_with_counts_is_not_divided_by_grad_scale() -> None:
    p = parameter()
    manager = OptimManager(grad_scale=7)
    manager.add_optimizer(AdamOptimizer([p]))
    manager.backward(p.sum(), count=2)
    assert p.grad is not None and p.grad.eq(0.5).all()
