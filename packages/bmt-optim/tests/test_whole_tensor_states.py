"""States of optimizers over whole tensors: kept by owners, saved whole, and loaded on any grid and
by plain optimizers.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_optimizers import (
    KINDS,
    SHAPES,
    EightBit,
    Normalized,
    give_gradients,
    plain_parameters,
    sharded_parameters,
    wholes,
)

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.errors import CheckpointError
from bmt_core.run import runtime
from bmt_optim import AdamW, OptimManager, whole
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_params.state.state_tensors import TensorPart
from bmt_testing import on_ranks, run_ranks

BEFORE, AFTER = range(5), range(5, 9)
Values = dict[str, torch.Tensor]


class Training:
    """Parameters, sharded in a run and ordinary without one, and a manager with one optimizer
    over them.
    """

    def __init__(self, kind: str, dtype: torch.dtype, *, is_new: bool = False) -> None:
        self.is_plain = not runtime.is_initialized()
        self.params = plain_parameters(dtype) if self.is_plain else sharded_parameters(dtype)
        if is_new:
            with torch.no_grad():
                for p in self.params.values():
                    p.mul_(2)
        named, options = list(self.params.items()), {"lr": 0.5 if is_new else 0.05}
        groups = [{"params": named[:2]}, {"params": named[2:]}]
        made: Any = {**KINDS, "EightBit": EightBit}[kind]
        self.optimizer = (
            made(groups, **options) if self.is_plain else whole(made, groups, **options)
        )
        self.manager = OptimManager(sum_plain_gradients=False)
        self.manager.add_optimizer(self.optimizer)

    def run(self, steps: range) -> Values:
        for step in steps:
            give_gradients(self.params, step)
            self.manager.step()
        return wholes(self.params)

    def module(self) -> DistributedModule:
        module = DistributedModule()
        for name, p in self.params.items():
            module.register_parameter(name, p)
        return module


def assert_equal(found: Values, expected: Values) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def train_and_save(path: str, kind: str, dtype: torch.dtype, options: dict[str, Any]) -> Values:
    training = Training(kind, dtype)
    training.run(BEFORE)
    save_checkpoint(path, training.module(), training.manager, step=5, **options)
    return training.run(AFTER)


def load_and_train(path: str, kind: str, dtype: torch.dtype, has_stepped: bool) -> Values:
    training = Training(kind, dtype, is_new=True)
    if has_stepped:
        training.run(range(3))
    load_checkpoint(path, training.module(), training.manager)
    return training.run(AFTER)


def of_plain(function: Any, *args: Any) -> Values:
    """Call ``function`` where there is no run."""
    result: Values = run_ranks(function, 1, *args, init=None)[0]
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "after"), [(1, 1), (2, 2), (4, 4), (1, 2), (2, 4), (4, 2), (2, 1)]
)
def test_a_checkpoint_resumes_on_any_grid(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    expected = run_ranks(train_and_save, before, str(tmp_path), kind, torch.float64, {})[0]
    for found in run_ranks(
        load_and_train, after, str(tmp_path), kind, torch.float64, before == after
    ):
        assert_equal(found, expected)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_that_consist_of_others_resume_on_any_grid(
    tmp_path: Path, dtype: torch.dtype, before: int, after: int
) -> None:
    expected = run_ranks(train_and_save, before, str(tmp_path), "EightBit", dtype, {})[0]
    for found in run_ranks(load_and_train, after, str(tmp_path), "EightBit", dtype, False):
        assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2)
def test_a_gathered_state_stays_as_it_is_while_the_training_goes_on(kind: str) -> None:
    training, resumed = Training(kind, torch.float64), Training(kind, torch.float64, is_new=True)
    training.run(BEFORE)
    state = training.manager.state_dict(gather_opt=True, named_parameters=training.params)
    found = state["logical"]["parameters"]
    before = copy.deepcopy(found)
    training.run(AFTER)
    torch.testing.assert_close(found, before, rtol=0, atol=0)
    resumed.manager.load_state_dict(state, named_parameters=resumed.params)
    resumed.run(AFTER)
    torch.testing.assert_close(found, before, rtol=0, atol=0)


@on_ranks(2)
def test_tensors_in_lists_stay_at_the_owner_until_they_are_saved() -> None:
    training = Training("Shampoo", torch.float64)
    training.run(BEFORE)
    states = training.manager.logical_state()["logical"]
    del states["parameters"]["one"]  # numbers, which all ranks have
    for name, state in states["parameters"].items():
        owner = training.optimizer.state_owner(training.params[name])
        first, second = state["statistics"]
        assert [type(first), type(second), type(state["momentum"])] == [TensorPart] * 3
        assert first.owner == second.owner == owner and first.name == f"{name}/statistics[0]"
        assert [first.shape, second.shape] == [(size, size) for size in SHAPES[name]]
        assert states["value_shapes"][name]["statistics[1]"] == list(second.shape)
        if owner.rank == runtime.rank():
            statistics = training.optimizer.state[training.params[name]]["statistics"]
            assert first.value() is statistics[0] and second.value() is statistics[1]


@pytest.mark.parametrize(
    "options", [{"non_blocking": True}, {"format": "torch"}, {"format": "safetensors"}]
)
def test_every_way_of_saving_has_the_states(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = run_ranks(train_and_save, 2, str(tmp_path), "Shampoo", torch.bfloat16, options)[0]
    for found in run_ranks(load_and_train, 4, str(tmp_path), "Shampoo", torch.bfloat16, True):
        assert_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 4), (4, 1)])
def test_masters_are_saved(tmp_path: Path, dtype: torch.dtype, before: int, after: int) -> None:
    expected = run_ranks(train_and_save, before, str(tmp_path), "Normalized", dtype, {})[0]
    for found in run_ranks(load_and_train, after, str(tmp_path), "Normalized", dtype, False):
        assert_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_plain_optimizer_goes_on_from_it_and_it_from_the_plain_one(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    expected = of_plain(train_and_save, str(tmp_path / "plain"), kind, torch.float64, {})
    for found in run_ranks(
        load_and_train, ranks, str(tmp_path / "plain"), kind, torch.float64, False
    ):
        assert_equal(found, expected)
    of_ranks = run_ranks(train_and_save, ranks, str(tmp_path / "whole"), kind, torch.float64, {})[0]
    assert_equal(
        of_plain(load_and_train, str(tmp_path / "whole"), kind, torch.float64, False), of_ranks
    )
    assert_equal(of_ranks, expected)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2, 4)
def test_a_rank_s_own_state_resumes_at_the_same_size(kind: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        training = Training(kind, dtype)
        values = training.run(BEFORE)
        file = io.BytesIO()
        torch.save(training.manager.state_dict(), file)
        expected = training.run(AFTER)
        file.seek(0)
        state = torch.load(file)
        resumed = Training(kind, dtype, is_new=True)
        resumed.run(range(2))
        with torch.no_grad():
            for name, p in resumed.params.items():
                p.copy_(p.local_part(values[name]) if hasattr(p, "local_part") else values[name])
        resumed.manager.load_state_dict(state)
        assert_equal(resumed.run(AFTER), expected)


@on_ranks(1, 2, 4)
def test_the_gathered_state_is_that_of_the_plain_optimizer() -> None:
    training, plain = Training("Adafactor", torch.float64), Training("Adafactor", torch.float64)
    training.run(BEFORE)
    gathered = training.optimizer.state_dict(gather=True)
    params = plain_parameters()
    reference = torch.optim.Adafactor(params.values(), lr=0.05)
    for step in BEFORE:
        give_gradients(params, step)
        reference.step()
    if runtime.rank():
        assert not gathered["parameters"]
    else:
        assert set(gathered["parameters"]) == set(params)
        for name, p in params.items():
            torch.testing.assert_close(gathered["parameters"][name], dict(reference.state[p]))
    plain.optimizer.load_state_dict(gathered)
    for name, p in plain.params.items():
        state = plain.optimizer.portable_state(p)
        assert bool(state) == (plain.optimizer.state_owner(p).rank == runtime.rank()), name
        if state:
            torch.testing.assert_close(state, dict(reference.state[params[name]]))


@on_ranks(1, 2, 4)
def test_what_a_class_has_counted_is_saved_though_rank_0_owns_no_tensor_of_the_group() -> None:
    # The first group's tensor costs most and is rank 0's.
    big, small = DistributedParameter(torch.ones(9, 9)), DistributedParameter(torch.ones(2, 2))
    optimizer = whole(Normalized, [{"params": [big]}, {"params": [small]}])
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    for _ in range(7):  # options are brought to all ranks after the steps 1, 2, 4, 8
        small.grad = torch.ones_like(small)
        manager.step()
    is_owner = optimizer.state_owner(small).rank == runtime.rank()  # type: ignore[union-attr]
    assert optimizer.counted_options(1) == ({"step": 7} if is_owner else {})
    assert AdamW([big]).counted_options(0) == {}
    groups = manager.state_dict(gather_opt=True)["logical"]["groups"][0]
    assert groups[1]["step"] == 7


def load_other(path: str, kind: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_and_train(path, kind, torch.float64, False)
    return str(caught.value)


def test_another_optimizer_s_state_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(train_and_save, 2, str(tmp_path), "Muon", torch.float64, {})
    for text in run_ranks(load_other, 4, str(tmp_path), "Adafactor"):
        assert "another optimizer's" in text
