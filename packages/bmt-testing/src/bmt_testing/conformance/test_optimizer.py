"""The rules for an optimizer: each test is one."""

from __future__ import annotations

import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from bmt_core.run.runtime import current
from bmt_optim.managed_optimizer import managed
from bmt_testing.conformance.offer import Offer
from bmt_testing.conformance.optimizer_training import (
    SAME,
    OptimizerSubject,
    OptimizerTraining,
    Values,
    assert_close,
    assert_equal,
    first_values,
    named,
)
from bmt_testing.decorator import on_ranks
from bmt_testing.pool import run_ranks

SAVED, END = 3, 6  # steps
MAX_NORM = 0.5


@pytest.fixture(scope="module")
def any_optimizer(offer: Offer) -> OptimizerSubject:
    """The optimizer under test."""
    return OptimizerSubject.of(offer)


@pytest.fixture(scope="module")
def optimizer(any_optimizer: OptimizerSubject) -> OptimizerSubject:
    """The optimizer under test, if a manager can step it."""
    if any_optimizer.needs_closure:
        pytest.skip("its step needs a closure")
    return any_optimizer


def _run_settings(world_size: int, optimizer: OptimizerSubject) -> dict[str, Any]:
    return optimizer.offer.run_settings()


def test_it_steps_without_a_closure(any_optimizer: OptimizerSubject) -> None:
    assert not any_optimizer.needs_closure, (
        "the step of this optimizer needs a closure, and OptimManager.step() has none, so that"
        " add_optimizer refuses it. Let step() without a closure use the gradients that are there."
    )


def test_what_it_needs_to_see_can_be_found_out(optimizer: OptimizerSubject) -> None:
    assert optimizer.needs != "unknown", (
        f"bmt warns that it does not know whether this optimizer trains parts of parameters:"
        f" {optimizer.reason}. Repair that, or say bmt_elementwise = True or False in its class."
    )


def test_each_group_is_stepped_with_its_own_options(optimizer: OptimizerSubject) -> None:
    params = first_values(optimizer.shapes, torch.float64)
    first, *others = params.values()
    made = optimizer.make([{"params": [first]}, {"params": others}])
    if "lr" not in made.defaults:
        pytest.skip("it has no learning rate")
    made.param_groups[1]["lr"] = float(made.defaults["lr"]) / 2**12
    before = [p.detach().clone() for p in params.values()]
    for step in range(SAVED):
        for p in params.values():
            p.grad = torch.full_like(p, float(1 + step))
        made.step()
    way, *small = [
        float((p.detach() - old).abs().max())
        for p, old in zip(params.values(), before, strict=True)
    ]
    assert max(small) < way / 64, "a group with a small learning rate of its own went far"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_parameters_of_each_type_are_stepped_within_its_rounding(
    optimizer: OptimizerSubject, dtype: str
) -> None:
    training = OptimizerTraining(optimizer, dtype=getattr(torch, dtype), has_few_bits=True)
    start = training.values()
    if dtype == "float64":
        # Less than float32 could tell, and it is still there after the steps.
        difference = optimizer.size * 2.0**-30
        training.set_values({name: value + difference for name, value in start.items()})
        found = {name: value - difference for name, value in training.run(range(END)).items()}
        tolerance = difference / 8
    else:
        found = training.run(range(END))
        tolerance = torch.finfo(training.dtype).eps * END * optimizer.size
    exact = OptimizerTraining(optimizer, has_few_bits=True).run(range(END))
    for name, value in exact.items():
        own, way = found[name], float((value - start[name].double()).abs().max())
        assert own.dtype == training.dtype, f"{name} has become {own.dtype}"
        assert way > 0, f"{name} has not moved"
        torch.testing.assert_close(
            own.double(),
            value,
            rtol=0.0,
            atol=tolerance + (0.0 if dtype == "float64" else 2 * torch.finfo(own.dtype).eps * way),
            msg=named(name),
        )


@on_ranks(2, init=_run_settings)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_ranks_train_as_one_process_in_plain_torch(optimizer: OptimizerSubject, dtype: str) -> None:
    if dtype == "bfloat16" and optimizer.needs in ("tensors", "all tensors"):
        pytest.skip("it steps whole tensors in float32")
    options: Any = {"dtype": getattr(torch, dtype), "has_few_bits": dtype != "float64"}
    plain = OptimizerTraining(optimizer, is_sharded=False, **options)
    start, expected = plain.values(), plain.run(range(END))
    found = OptimizerTraining(optimizer, **options).run(range(END))
    tolerance = {"float64": SAME, "float32": 1e-4, "bfloat16": 2e-2}[dtype]
    assert_close(found, expected, start=start, tolerance=tolerance)
    if dtype == "float64":
        start, expected = _model_trained(optimizer, is_sharded=False)
        assert_close(_model_trained(optimizer, is_sharded=True)[1], expected, start=start)


@on_ranks(2, init=_run_settings)
def test_gradients_of_several_backward_passes_add_up(optimizer: OptimizerSubject) -> None:
    for is_sharded in (False, True):
        expected = OptimizerTraining(optimizer, is_sharded=is_sharded)
        start, values = expected.values(), _trained_in(expected, [1, 1, 1, 1])
        once_doubled = OptimizerTraining(optimizer, is_sharded=is_sharded)
        found = _trained_in(once_doubled, [1, 2, 1, 2])
        assert_close(found, values, start=start)


@on_ranks(2, init=_run_settings)
def test_a_scaled_loss_makes_the_same_steps(optimizer: OptimizerSubject) -> None:
    plain = OptimizerTraining(optimizer)
    start, expected = plain.values(), plain.run(range(END))
    # The scale doubles after each step.
    scaled = OptimizerTraining(optimizer, loss_scale=2.0**10, loss_scale_steps=1)
    assert_close(scaled.run(range(END)), expected, start=start)
    assert scaled.manager is not None and scaled.manager.loss_scale == 2.0 ** (10 + END)


@on_ranks(2, init=_run_settings)
def test_a_step_with_an_overflow_changes_nothing(optimizer: OptimizerSubject) -> None:
    straight = OptimizerTraining(optimizer).run(range(END))
    training = OptimizerTraining(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the steps that are skipped
        for step in range(END):
            if step % 2:
                # On one rank alone.
                training.backward(step, factor=math.inf if current().rank else 1.0)
                training.update()
            training.step(step)
    assert_equal(training.values(), straight)
    if managed(training.optimizer).skips_on_device:
        training.backward(0)
        managed(training.optimizer).step(scale=2.0, found_inf=torch.ones(()))
        managed(training.optimizer).read_outcome()
        assert_equal(training.values(), straight)


@on_ranks(2, init=_run_settings)
def test_clipped_gradients_make_the_steps(optimizer: OptimizerSubject) -> None:
    expected = OptimizerTraining(optimizer)
    start = expected.values()
    for step in range(END):
        gradients = expected.gradients(step).values()
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        clips = bool(step % 2)
        expected.backward(step, factor=min(1.0, MAX_NORM / (norm + 1e-6)) if clips else 1.0)
        expected.update()
    clipped = OptimizerTraining(optimizer)
    for step in range(END):
        clipped.step(step, max_norm=MAX_NORM if step % 2 else None)
    assert_close(clipped.values(), expected.values(), start=start)


@on_ranks(2, init=_run_settings)
def test_a_rank_that_owns_nothing_takes_part(optimizer: OptimizerSubject) -> None:
    # Rank 0 has the one element of each.
    shapes = {name: (1,) * len(shape) for name, shape in optimizer.shapes.items()}
    plain = OptimizerTraining(optimizer, shapes=shapes, is_sharded=False)
    start, expected = plain.values(), plain.run(range(END))
    assert_close(OptimizerTraining(optimizer, shapes=shapes).run(range(END)), expected, start=start)


@on_ranks(2, init=_run_settings)
def test_parameters_without_gradients_stay_as_they_are(optimizer: OptimizerSubject) -> None:
    training = OptimizerTraining(optimizer)
    first, second, *_ = training.params.values()
    for steps, frozen in ((range(2), first), (range(2, 4), second), (range(4, 6), None)):
        for param in (first, second):
            param.requires_grad_(param is not frozen)
        before = training.values()
        after = training.run(steps)
        for name, value in after.items():
            is_same = torch.equal(value, before[name])
            is_frozen = training.params[name] is frozen
            assert is_same == is_frozen, f"{name} {'stays' if is_same else 'moves'}: {steps}"


def test_its_state_goes_through_a_file(optimizer: OptimizerSubject) -> None:
    training = OptimizerTraining(optimizer)
    values = training.run(range(SAVED))
    state = _through_file(training.optimizer.state_dict())
    resumed = OptimizerTraining(optimizer)
    resumed.set_values(values)
    if "lr" in resumed.optimizer.defaults:
        for group in resumed.optimizer.param_groups:
            group["lr"] = group["lr"] / 2
    resumed.optimizer.load_state_dict(state)
    found = resumed.optimizer.state_dict()
    torch.testing.assert_close(found["state"], state["state"], rtol=0.0, atol=0.0)
    assert found["param_groups"] == state["param_groups"], "options are not those of the state"
    start = first_values(training.shapes, torch.float64)
    expected = training.run(range(SAVED, END))
    assert_close(resumed.run(range(SAVED, END)), expected, start=start)


@on_ranks(2, init=_run_settings)
def test_the_same_number_of_ranks_resumes_in_every_bit(optimizer: OptimizerSubject) -> None:
    training = OptimizerTraining(optimizer, loss_scale=64.0)
    values = training.run(range(SAVED))
    assert training.manager is not None
    state = copy.deepcopy(training.manager.state_dict())
    expected = training.run(range(SAVED, END))
    resumed = OptimizerTraining(optimizer, loss_scale=64.0)
    resumed.set_values(values)
    assert resumed.manager is not None
    resumed.manager.load_state_dict(state)
    assert_equal(resumed.run(range(SAVED, END)), expected)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_another_number_of_ranks_resumes(
    optimizer: OptimizerSubject, before: int, after: int
) -> None:
    init = _run_settings(before, optimizer)
    values, state, expected = run_ranks(_saved, before, optimizer, init=init)[0]
    for found in run_ranks(_resumed, after, optimizer, values, state, init=init):
        assert_close(found, expected, start=first_values(optimizer.shapes, torch.float64))


def _saved(optimizer: OptimizerSubject) -> tuple[Values, dict[str, Any], Values]:
    """Return the parameters and the whole state after some steps, and the parameters after all."""
    training = OptimizerTraining(optimizer)
    values = training.run(range(SAVED))
    assert training.manager is not None
    # A state may share memory with the optimizer, as torch's do.
    state = copy.deepcopy(
        training.manager.state_dict(gather_opt=True, named_parameters=training.params)
    )
    return values, state, training.run(range(SAVED, END))


def _resumed(optimizer: OptimizerSubject, values: Values, state: dict[str, Any]) -> Values:
    training = OptimizerTraining(optimizer)
    training.set_values(values)
    assert training.manager is not None
    training.manager.load_state_dict(state, named_parameters=training.params)
    return training.run(range(SAVED, END))


def _trained_in(training: OptimizerTraining, micro_batches: list[int]) -> Values:
    for step, number in enumerate(micro_batches):
        training.step(step, micro_batches=number)
    return training.values()


def _model_trained(optimizer: OptimizerSubject, *, is_sharded: bool) -> tuple[Values, Values]:
    """Train two layers, as Blocks on all ranks or in plain torch; return the first and the
    last values.
    """
    from bmt_optim import OptimManager
    from bmt_zero import Block

    generator = torch.Generator().manual_seed(0)
    layers: Any = [
        nn.Linear(*sizes, bias=False, dtype=torch.float64) for sizes in ((20, 12), (12, 8))
    ]
    for layer in layers:
        layer.weight.data = torch.randn(layer.weight.shape, generator=generator).double() / 4
    model = nn.Sequential(*[Block(layer) if is_sharded else layer for layer in layers])
    made, manager = optimizer.make(model.parameters()), OptimManager()
    if is_sharded:
        manager.add_optimizer(made)

    params: dict[str, Any] = dict(model.named_parameters())

    def values() -> Values:
        return {
            name: (p.gather_all() if is_sharded else p).detach().clone()
            for name, p in params.items()
        }

    start, part = values(), slice(current().rank, None, 2) if is_sharded else slice(None)
    for step in range(END):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(6, 20, generator=generator).double()[part]
        made.zero_grad()
        loss = torch.tanh(model(batch)).square().mean() * (1 + step)
        if is_sharded:
            manager.backward(loss)
            manager.step()
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            made.step()
    return start, values()


def _through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
