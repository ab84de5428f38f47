"""States of optimizers over whole tensors: kept by owners, saved whole, and loaded on any grid and
by plain optimizers.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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
from cells import cells

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


def assert_equal(found: Values | list[Values], expected: Values | list[Values]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


OF_KINDS = [(kind, torch.float64) for kind in KINDS]
CASES = [
    *OF_KINDS,
    ("EightBit", torch.float64),  # its states consist of several tensors
    ("EightBit", torch.bfloat16),
    ("Normalized", torch.bfloat16),  # has masters
    ("Normalized", torch.float16),
]
Cases = list[tuple[str, torch.dtype]]


def train_and_save(
    path: str, cases: Cases, options: Mapping[str, Any] = MappingProxyType({})
) -> list[Values]:
    """Save the training of each case after five steps, and return its values at the end."""
    found = []
    for kind, dtype in cases:
        training = Training(kind, dtype)
        training.run(BEFORE)
        folder = f"{path}/{kind} {dtype}"
        save_checkpoint(folder, training.module(), training.manager, step=5, **options)
        found.append(training.run(AFTER))
    return found


def load_and_train(path: str, cases: Cases, has_stepped: bool) -> list[Values]:
    found = []
    for kind, dtype in cases:
        training = Training(kind, dtype, is_new=True)
        if has_stepped:
            training.run(range(3))
        load_checkpoint(f"{path}/{kind} {dtype}", training.module(), training.manager)
        found.append(training.run(AFTER))
    return found


def of_plain(function: Any, *args: Any) -> list[Values]:
    """Call ``function`` where there is no run."""
    result: list[Values] = run_ranks(function, 1, *args, init=None)[0]
    return result


@pytest.mark.parametrize(("before", "after", "has_stepped"), [(1, 4, False), (4, 2, True)])
def test_a_checkpoint_resumes_on_any_grid(
    tmp_path: Path, before: int, after: int, has_stepped: bool
) -> None:
    expected = run_ranks(train_and_save, before, str(tmp_path), CASES)[0]
    for found in run_ranks(load_and_train, after, str(tmp_path), CASES, has_stepped):
        assert_equal(found, expected)


@on_ranks(2)
@cells("kind", KINDS)
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
    case = [("Shampoo", torch.bfloat16)]
    expected = run_ranks(train_and_save, 2, str(tmp_path), case, options)[0]
    for found in run_ranks(load_and_train, 4, str(tmp_path), case, True):
        assert_equal(found, expected)


def test_the_plain_optimizer_goes_on_from_it_and_it_from_the_plain_one(tmp_path: Path) -> None:
    expected = of_plain(train_and_save, str(tmp_path / "plain"), OF_KINDS)
    for found in run_ranks(load_and_train, 4, str(tmp_path / "plain"), OF_KINDS, False):
        assert_equal(found, expected)
    of_ranks = run_ranks(train_and_save, 4, str(tmp_path / "whole"), OF_KINDS)[0]
    assert_equal(of_plain(load_and_train, str(tmp_path / "whole"), OF_KINDS, False), of_ranks)
    assert_equal(of_ranks, expected)


@on_ranks(2)
@cells("kind", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.SGD])
def test_states_of_half_parameters_without_masters_go_on_in_float32(kind: Any) -> None:
    plain = torch.nn.Parameter(torch.ones(4, 4).bfloat16())
    sharded = DistributedParameter(torch.ones(4, 4).bfloat16())
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    first, resumed = OptimManager(sum_plain_gradients=False), OptimManager()
    first.add_optimizer(kind([plain], **options), whole="refuse")
    resumed.add_optimizer(kind([sharded], **options), whole=True)
    plain.grad, sharded.grad = torch.ones_like(plain), torch.ones_like(sharded)
    first.step()
    resumed.load_state_dict(first.state_dict(gather_opt=True))
    resumed.step()
    state = resumed.optimizers[0].state.get(sharded, {})
    assert {value.dtype for value in state.values()} <= {torch.float32}


@on_ranks(2)
@cells("kind", KINDS)
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


@on_ranks(4)
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


@on_ranks(4)
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


def load_other(path: str) -> str:
    training = Training("Adafactor", torch.float64, is_new=True)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, training.module(), training.manager)
    return str(caught.value)


def test_another_optimizer_s_state_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(train_and_save, 2, str(tmp_path), [("Muon", torch.float64)])
    for text in run_ranks(load_other, 4, f"{tmp_path}/Muon {torch.float64}"):
        assert "another optimizer's" in text
