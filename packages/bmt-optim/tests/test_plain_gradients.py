"""Gradients of ordinary parameters, which ``OptimManager`` sums over the ranks, compared with plain
torch on one process.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from managed import managed, parameter

from bmt_core.comm.objects import all_gather_object
from bmt_core.run import runtime
from bmt_optim import OptimManager
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks, run_ranks
from cells import cells
from pairwise import pairwise


class Model(torch.nn.Module):
    """A small network; ``distribute`` names the parameters that are sharded, the others
    stay ordinary.
    """

    def __init__(self, dtype: torch.dtype, distribute: tuple[str, ...] = ()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in [
            ("first", (5, 3)),
            ("second", (1, 5)),
            ("bias", (5,)),
            ("unused", (4,)),
            ("rare", (3,)),
        ]:
            value = torch.randn(shape, generator=generator).to(dtype)
            made = DistributedParameter(value) if name in distribute else torch.nn.Parameter(value)
            self.register_parameter(name, made)

    def whole(self, name: str) -> torch.Tensor:
        p = getattr(self, name)
        return p.gather() if isinstance(p, DistributedParameter) else p

    def loss(self, x: torch.Tensor, *, uses_rare: bool) -> torch.Tensor:
        if uses_rare:
            x = x * self.whole("rare")
        h = torch.tanh(x @ self.whole("first").t() + self.whole("bias"))
        return (h @ self.whole("second").t()).float().pow(2).mean()


def batches(dtype: torch.dtype) -> torch.Tensor:
    """Data of 5 steps: 2 micro-batches of 4 rows each."""
    return torch.randn(5, 2, 4, 3, generator=torch.Generator().manual_seed(5)).to(dtype)


def expected_training(
    dtype: torch.dtype, max_norm: float
) -> tuple[list[torch.Tensor], list[float], list[bool]]:
    """One process in plain torch. ``rare`` is used for the first row of a batch only, and not at
    all in the third step.
    """
    model = Model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    has_rare = []
    for step, micro_batches in enumerate(batches(dtype)):
        optimizer.zero_grad()
        for micro_batch in micro_batches:
            for row, x in enumerate(micro_batch):
                (model.loss(x[None], uses_rare=row == 0 and step != 2) / 8).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))
        norms.append(norm.item())
        has_rare.append(model.rare.grad is not None)
        for g in grads:
            g *= min(1.0, max_norm / (norm.item() + 1e-6))
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms, has_rare


def ranks_training(
    distribute: tuple[str, ...], max_norm: float, loss_scale: float | None
) -> tuple[list[torch.Tensor], list[float], list[bool]]:
    model = Model(torch.float64, distribute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer)
    size, rank = runtime.world_size(), runtime.rank()
    rows = 4 // size
    norms = []
    has_rare = []
    for step, micro_batches in enumerate(batches(torch.float64)):
        manager.zero_grad()
        for micro_batch in micro_batches:
            for row in range(rank * rows, (rank + 1) * rows):
                # A sharded parameter is gathered by all ranks or none, so here the mask says where
                # it counts.
                loss = _masked_loss(
                    model, micro_batch[row][None], row == 0 and step != 2, distribute
                )
                manager.backward(loss / 2 / rows)
        norms.append(manager.clip_grad_norm(optimizer.param_groups, max_norm).item())
        has_rare.append(model.rare.grad is not None)
        manager.step()
    whole = [model.whole(name).detach() for name, _ in model.named_parameters()]
    return whole, norms, has_rare


def _masked_loss(
    model: Model, x: torch.Tensor, uses_rare: bool, distribute: tuple[str, ...]
) -> torch.Tensor:
    if "rare" not in distribute:
        return model.loss(x, uses_rare=uses_rare)
    rare = model.whole("rare")
    return model.loss(torch.where(torch.tensor(uses_rare), x * rare, x), uses_rare=False)


def are_equal_on_all_ranks(tensors: list[torch.Tensor]) -> bool:
    first = all_gather_object(tensors, runtime.current().world)[0]
    return all(torch.equal(a, b) for a, b in zip(tensors, first, strict=True))


@on_ranks(2)
@cells(("reduces", "sums", "count"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_gradients_that_the_program_has_reduced_are_warned_of_once(
    reduces: bool, sums: bool, count: int
) -> None:
    model = Model(torch.float32)
    manager = OptimManager(sum_plain_gradients=sums)
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            manager.zero_grad()
            manager.backward(model.loss(torch.full((1, 3), 1.0 + runtime.rank()), uses_rare=True))
            for p in model.parameters():
                if reduces and p.grad is not None:
                    runtime.current().world.all_reduce(p.grad).wait()
            manager.clip_grad_norm(model.parameters(), 1.0)
            manager.step()
    assert len(caught) == (count if runtime.rank() == 0 else 0)
    assert all(
        "OptimManager(sum_plain_gradients=False)" in str(warning.message) for warning in caught
    )


@on_ranks(4)
@cells(
    ("distribute", "loss_scale", "max_norm"),
    pairwise([(), ("first", "second", "bias"), ("first", "bias")], [None, 1024.0], [1e9, 0.05]),
)
def test_sharded_and_plain_parameters_together_equal_one_process(
    distribute: tuple[str, ...], loss_scale: float | None, max_norm: float
) -> None:
    params, norms, has_rare = expected_training(torch.float64, max_norm)
    found, found_norms, found_rare = ranks_training(distribute, max_norm, loss_scale)
    assert found_norms == pytest.approx(norms, rel=1e-5)  # replicas are counted once
    # None on all ranks, or on none.
    assert found_rare == has_rare == [True, True, False, True, True]
    torch.testing.assert_close(found, params, rtol=1e-6, atol=1e-7)
    assert are_equal_on_all_ranks(found), "ranks drifted apart"


@on_ranks(4)
@cells("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_of_plain_parameters_are_summed_in_float32(dtype: torch.dtype) -> None:
    p = parameter(dtype=dtype)
    manager = managed(p, grad_scale=1)
    p.grad = torch.full((3,), 1.0 if runtime.rank() else 256.0, dtype=dtype)
    manager.clip_grad_norm([p], 1e9)
    # Rank by rank in half precision this would be 256 + 1 + 1 + 1 = 256 (bfloat16).
    assert torch.equal(p.grad, torch.full((3,), 259.0).to(dtype))


@on_ranks(2)
@cells("distribute", [(), ("first", "bias", "rare")])
@cells("loss_scale", [None, 1024.0])
def test_clipping_between_backward_passes_equals_plain_torch(
    distribute: tuple[str, ...], loss_scale: float | None
) -> None:
    expected = Model(torch.float64)
    plain = torch.optim.SGD(expected.parameters(), lr=1.0)
    for number, rows in enumerate(batches(torch.float64)[:3, 0]):
        sum(expected.loss(row[None], uses_rare=number == 1) / 4 for row in rows).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    plain.step()
    model = Model(torch.float64, distribute)
    manager = OptimManager(loss_scale=loss_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    manager.add_optimizer(optimizer)
    for number, rows in enumerate(batches(torch.float64)[:3, 0]):
        for row in rows.chunk(2)[runtime.rank()]:
            manager.backward(model.loss(row[None], uses_rare=number == 1) / 2)
        manager.clip_grad_norm(optimizer.param_groups, 0.1)
    manager.step()
    for name in ("first", "second", "bias", "rare"):  # norms are float32
        torch.testing.assert_close(model.whole(name), expected.whole(name), rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_gradients_are_local_again_after_they_were_cleared_in_any_way() -> None:
    p = parameter(0.0)
    manager = managed(p, "momentum", grad_scale=1)
    found = []

    def backward() -> None:
        (p * (1.0 + runtime.rank())).sum().backward()

    backward()
    manager.clip_grad_norm([p], 1e9)
    manager.clip_grad_norm([p], 1e9)
    found.append(p.grad.item())  # summed once, not twice
    manager.step()
    for clear in (
        manager.zero_grad,
        manager.optimizers[0].zero_grad,
        lambda: setattr(p, "grad", None),
    ):
        clear()
        backward()
        manager.clip_grad_norm([p], 1e9)
        found.append(p.grad.item())
    # The user looks at the norm, clears and goes on without a step.
    manager.optimizers[0].zero_grad()
    backward()
    manager.clip_grad_norm([p], 1e9)
    found.append(p.grad.item())
    assert found == [3.0, 3.0, 3.0, 3.0, 3.0]


@on_ranks(2)
def test_a_gradient_replaced_on_one_rank_only_is_an_error_on_all() -> None:
    p = parameter()
    manager = managed(p)
    p.grad = torch.ones(3)
    manager.clip_grad_norm([p], 1.0)
    if runtime.rank() == 0:
        p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"replaced between clip_grad_norm\(\) and step\(\)"):
        manager.step()


@on_ranks(2)
def test_sums_can_be_left_to_the_program() -> None:
    p = parameter(0.0)
    manager = managed(p, sum_plain_gradients=False)
    p.grad = torch.tensor([1.0 + runtime.rank()])
    manager.step()
    assert p.grad is not None and p.grad.item() == 1.0 + runtime.rank()


# Losses that did not go through scale_loss


@on_ranks(4, init=lambda ranks, gradients: {"device": "cpu", "gradients": gradients})
@pytest.mark.parametrize("gradients", ["sum", "mean"])
@cells("clips", [False, True])
def test_ordinary_parameters_get_the_mean_of_plain_backwards(gradients: Any, clips: bool) -> None:
    others, model, plain = parameter(), Model(torch.float64), Model(torch.float64)
    # Another manager of the same run scales losses of its own in between.
    other = managed(others, "bmt")
    optimizer, torchs = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain))
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    rows = 4 // runtime.world_size()
    for micro_batches in batches(torch.float64):
        torchs.zero_grad()
        for micro_batch in micro_batches:
            (plain.loss(micro_batch, uses_rare=True) / 2).backward()
        other.backward(others.sum())
        other.step()
        manager.zero_grad()
        for micro_batch in micro_batches:
            own = micro_batch[runtime.rank() * rows :][:rows]
            (model.loss(own, uses_rare=True) / 2).backward()
        if clips:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            found_norm = manager.clip_grad_norm(optimizer.param_groups, 0.05)
            assert found_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        torchs.step()
        manager.step()
    torch.testing.assert_close(
        list(model.parameters()), list(plain.parameters()), rtol=1e-6, atol=1e-7
    )
    assert are_equal_on_all_ranks([p.detach() for p in model.parameters()])


def two_managers() -> list[float]:
    """One loss, scaled by the first of two managers that share its parameters' gradients."""
    first, second = parameter(), parameter()
    one, two = managed(first, "bmt"), managed(second, "bmt")
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        one.backward((first * second).sum() * (1.0 + runtime.rank()))
        for manager in (one, two):
            manager.clip_grad_norm(manager.optimizers[0].param_groups, 1e9)
        grads = [first.grad, second.grad]
        one.step()
        two.step()
    return [float(grad.sum()) for grad in grads if grad is not None]


def test_a_loss_that_another_manager_has_scaled_is_not_divided_twice() -> None:
    expected = run_ranks(two_managers, 1)[0]
    assert run_ranks(two_managers, 2)[0] == pytest.approx(
        [1.5 * number for number in expected], rel=0.05
    )


@on_ranks(2)
def test_ranks_agree_on_the_divisor_though_one_alone_has_scaled_its_loss() -> None:
    # As the last stage of a pipeline does; the other has gradients of its own backward.
    p = parameter()
    manager = managed(p, "bmt")
    loss = p.sum() * 2.0
    (manager.scale_loss(loss) if runtime.rank() == 1 else loss / 2).backward()
    manager.clip_grad_norm([p], 1e9)
    assert p.grad is not None and float(p.grad.max()) == 2.0
