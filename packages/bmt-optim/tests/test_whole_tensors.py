"""Optimizers over whole tensors train sharded parameters as they train whole ones in
plain torch.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from whole_optimizers import (
    KINDS,
    GlobalClip,
    GlobalStepSize,
    Normalized,
    Shampoo,
    assert_alike,
    give_gradients,
    plain_parameters,
    sharded_parameters,
    wholes,
)

from bmt_core.errors import ConfigError, RemoteError
from bmt_core.run import runtime
from bmt_optim import OptimManager, lr_scheduler, whole
from bmt_optim.whole_tensors import optimizer as optimizer_module
from bmt_optim.whole_tensors import whole_tensor
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks
from cells import cells

STEPS = 6
Params = dict[str, torch.nn.Parameter]


@on_ranks(1, 4)
@cells("kind", KINDS)
def test_a_plain_loop_trains_sharded_parameters_as_whole_ones(kind: str) -> None:
    plain, sharded = plain_parameters(), sharded_parameters()
    reference = KINDS[kind](plain.values(), lr=0.05)
    optimizer = whole(KINDS[kind], sharded.values(), lr=0.05, bucket_bytes=200)  # type: ignore[arg-type]
    schedules = [
        (each, torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5))
        for each in (reference, optimizer)
    ]
    for step in range(STEPS):
        give_gradients(plain, step)
        give_gradients(sharded, step)
        for each, schedule in schedules:
            each.step()
            schedule.step()
        assert_alike(wholes(sharded), {name: p.detach() for name, p in plain.items()})
    for group, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {**group, "params": None} == {**other, "params": None}


def add_a_group(optimizer: Any, params: Params, step: int) -> None:
    if step == 2:
        optimizer.add_param_group({"params": [*params.values()][3:], "lr": 0.01})


def begin_late(optimizer: Any, params: Params, step: int) -> None:
    """``wide`` begins at step 5, and counts the steps of its group."""
    for name, p in params.items():
        p.grad = p.grad if name == "tall" or (name == "wide" and step > 4) else None


def write_values(optimizer: Any, params: Params, step: int) -> None:
    with torch.no_grad():
        if step == 3:
            params["tall"].mul_(0.5)
            params["square"].add_(1)
        if step == 4:
            params["wide"].data = params["wide"].detach() * 2


def schedule(optimizer: Any, params: Params, step: int) -> None:
    if step % 2 == 0 and step:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def two_groups(params: Params) -> list[dict[str, Any]]:
    first, later = [*params.values()][:2], [*params.values()][2:]
    return [{"params": first, "lr": 0.3}, {"params": later, "weight_decay": 0.1}]


@on_ranks(4)
@cells(
    ("kind", "groups_of", "change"),
    [
        (Shampoo, lambda params: [{"params": [*params.values()][:3]}], add_a_group),
        (Normalized, lambda params: [{"params": [*params.values()]}], begin_late),
        (Shampoo, lambda params: [{"params": [*params.values()]}], write_values),
        (Normalized, two_groups, schedule),
    ],
)
def test_what_the_program_changes_between_steps_reaches_the_owners(
    kind: Any, groups_of: Any, change: Any
) -> None:
    results = []
    for params in (plain_parameters(), sharded_parameters()):
        is_plain = not results
        optimizer = kind(groups_of(params)) if is_plain else whole(kind, groups_of(params))
        for step in range(STEPS):
            give_gradients(params, step)
            change(optimizer, params, step)
            optimizer.step()
        results.append(wholes(params))
    assert_alike(results[1], results[0])


@on_ranks(4)
@cells("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_have_a_float32_master_at_the_owner(dtype: torch.dtype) -> None:
    plain, sharded = plain_parameters(dtype), sharded_parameters(dtype)
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in plain.items()}
    reference, optimizer = (
        Shampoo(masters.values(), lr=1e-3),
        whole(Shampoo, sharded.values(), lr=1e-3),
    )
    manager = OptimManager(loss_scale=8.0, loss_scale_steps=100, sum_plain_gradients=False)
    manager.add_optimizer(optimizer)
    for step in range(20):
        give_gradients(sharded, step, scale=8.0)
        give_gradients(plain, step)
        for name, p in masters.items():
            gradient = plain[name].grad
            p.grad = None if gradient is None else gradient.float()
        reference.step()
        manager.step()
        found = wholes(sharded)
        for name, p in masters.items():
            assert torch.equal(found[name], p.detach().to(dtype)), name
    for p in sharded.values():
        owner = optimizer.state_owner(p)
        assert owner is not None
        assert ("_param_fp32" in optimizer.portable_state(p)) == (owner.rank == runtime.rank())


@on_ranks(4)
def test_a_step_with_an_infinite_gradient_on_one_rank_is_skipped() -> None:
    params = sharded_parameters(torch.float16)
    optimizer, manager = (
        whole(Normalized, params.values()),
        OptimManager(loss_scale=64.0, sum_plain_gradients=False),
    )
    manager.add_optimizer(optimizer)
    give_gradients(params, 0)
    manager.step()
    before = wholes(params)
    give_gradients(params, 1)
    gradient = params["tied"].grad
    assert gradient is not None
    if runtime.rank() == 0:
        gradient[0] = torch.inf
    manager.step()
    assert manager.skipped_steps == 1 and manager.loss_scale == 32
    assert optimizer.param_groups[0]["step"] == 1
    assert_alike(wholes(params), before, 0)


@on_ranks(4)
def test_with_together_one_rank_steps_all_tensors() -> None:
    plain, sharded = plain_parameters(), sharded_parameters()
    reference, optimizer = (
        GlobalStepSize(plain.values()),
        whole(GlobalStepSize, sharded.values(), together=True),
    )
    for step in range(STEPS):
        give_gradients(plain, step)
        give_gradients(sharded, step)
        reference.step()
        optimizer.step()
        assert_alike(wholes(sharded), {name: p.detach() for name, p in plain.items()})
    assert {optimizer.state_owner(p).rank for p in sharded.values()} == {0}  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="all groups at once"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


@on_ranks(2)
@cells("kind", [GlobalStepSize, GlobalClip])
def test_a_class_that_decides_from_all_tensors_is_refused_without_together(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"otherwise beside others than alone.*together=True"):
        whole(kind, sharded_parameters().values(), lr=0.1)


@on_ranks(4)
def test_an_option_that_differs_between_tensors_is_an_error_on_all_ranks() -> None:
    params = sharded_parameters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "check_steps_alone", lambda *arguments: None)
        optimizer = whole(GlobalStepSize, params.values())
    give_gradients(params, 0)
    with pytest.raises(ConfigError, match=r"computed its option 'd' .*together=True"):
        optimizer.step()


class NeedsMore(Shampoo):
    """Cannot step tensors as small as those on which it is tried."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if any(p.numel() < 1 << 20 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("too small")
        super().step()


@on_ranks(2)
def test_a_class_that_cannot_be_tried_is_warned_about_on_rank_0() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole(NeedsMore, [DistributedParameter(torch.ones(3))])
    found = [
        str(one.message) for one in caught if "NeedsMore could not be tried" in str(one.message)
    ]
    assert len(found) == (runtime.rank() == 0)


@on_ranks(4)
def test_owners_are_balanced_by_cost() -> None:
    params = [DistributedParameter(torch.ones(shape)) for shape in [(8, 8)] * 4 + [(2, 2)] * 12]
    loads: dict[str, list[float]] = {}
    for name, cost in (("bytes", None), ("products", lambda shape: shape.numel() * min(shape))):
        optimizer = whole(torch.optim.Muon, params, cost=cost)
        load = [0.0] * runtime.world_size()
        for p in params:
            owner = optimizer.state_owner(p)
            assert owner is not None
            load[owner.rank] += p.whole_shape.numel() if cost is None else cost(p.whole_shape)
        loads[name] = load
    assert len(set(loads["bytes"])) == 1 and len(set(loads["products"])) == 1


@on_ranks(2)
def test_a_gradient_on_some_ranks_only_is_an_error_on_all() -> None:
    params = sharded_parameters()
    optimizer = whole(Shampoo, params.values())
    give_gradients(params, 0)
    if runtime.rank() == 1:
        params["tall"].grad = None
    with pytest.raises(
        ConfigError, match=r"Shampoo: .*\(17, 2\) has a gradient on some of the ranks \(0, 1\)"
    ):
        optimizer.step()


@on_ranks(2)
def test_other_parameters_on_one_rank_are_an_error_on_all() -> None:
    params = [DistributedParameter(torch.ones(4, 3)), DistributedParameter(torch.ones(3, 4))]
    optimizer = whole(Shampoo, params if runtime.rank() == 0 else params[::-1])
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ConfigError, match="other parameters, or in another order"):
        optimizer.step()


@on_ranks(2)
def test_too_little_memory_is_an_error_on_all_ranks_that_says_how_much() -> None:
    def no_memory(self: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    params = [DistributedParameter(torch.ones(4, 3))]
    optimizer = whole(Shampoo, params)
    params[0].grad = torch.ones_like(params[0])
    with pytest.MonkeyPatch.context() as patch:
        if runtime.rank() == 0:
            patch.setattr(whole_tensor.WholeTensor, "make_whole", no_memory)
        with pytest.raises(ConfigError, match=r"\(4, 3\) takes 48 bytes"):
            optimizer.step()


class Hungry(torch.optim.SGD):
    """Needs more memory than there is for the state of the first tensor, or fails otherwise."""

    error: Exception | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].numel() == 12:
            if self.error is not None:
                raise self.error
            torch.empty(2**60)
        super().step()


@on_ranks(2)
def test_an_error_in_the_first_step_of_one_tensor_is_raised_by_all_ranks() -> None:
    for error, expected in (
        (None, r"\(4, 3\) takes 48 bytes .* on the rank that owns them.*elementwise optimizer"),
        (ZeroDivisionError("a norm is 0"), "a norm is 0"),
    ):
        Hungry.error = error
        params = [DistributedParameter(torch.ones(4, 3)), DistributedParameter(torch.ones(3))]
        optimizer = whole(Hungry, params)
        for p in params:
            p.grad = torch.ones_like(p)
        kinds = (ConfigError, ZeroDivisionError, RemoteError)
        with pytest.raises(kinds, match=expected):
            optimizer.step()


@on_ranks(2)
def test_bad_arguments_are_refused() -> None:
    params = sharded_parameters()
    optimizer = whole(Shampoo, params.values())
    with pytest.raises(ConfigError, match="without a closure"):
        optimizer.step(lambda: None)
    with pytest.raises(ValueError, match="only supports 2D"):
        whole(torch.optim.Muon, [DistributedParameter(torch.ones(3))])
    with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer, not 3"):
        whole(3, params.values())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="The step of LBFGS needs a closure"):
        whole(torch.optim.LBFGS, params.values(), together=True)
    with pytest.raises(ValueError, match="bucket_bytes must be positive, it is 0"):
        whole(Shampoo, params.values(), bucket_bytes=0)
    with pytest.raises(TypeError, match="momentum"):
        whole(Shampoo, params.values(), momentum=0.9)


@on_ranks(4)
def test_add_optimizer_makes_one_of_whole_tensors_of_one_that_exists() -> None:
    plain, sharded = plain_parameters(), sharded_parameters()
    reference, given = (
        torch.optim.Adafactor(plain.values(), lr=0.1),
        torch.optim.Adafactor(sharded.values(), lr=0.1),
    )
    schedules = [lr_scheduler.Exponential(o, 0.1, 0, 10, gamma=0.5) for o in (reference, given)]
    manager = OptimManager(sum_plain_gradients=False)
    manager.add_optimizer(given, schedules[1], whole=True)
    with pytest.raises(ValueError, match="added already"):
        manager.add_optimizer(given, whole=True)
    for step in range(STEPS):
        give_gradients(plain, step)
        give_gradients(sharded, step)
        reference.step()
        schedules[0].step()
        manager.step()
        manager.zero_grad() if step == STEPS - 1 else None
    assert_alike(wholes(sharded), {name: p.detach() for name, p in plain.items()})
    assert all(p.grad is None for p in sharded.values())
    assert manager.optimizers[0].param_groups[0]["lr"] == given.param_groups[0]["lr"] < 0.1


@on_ranks(2)
def test_an_optimizer_that_needs_whole_tensors_gets_them_by_itself_and_says_so_once() -> None:
    plain, sharded = plain_parameters(), sharded_parameters(ordinary=())
    reference, given = Shampoo(plain.values(), lr=0.1), Shampoo(sharded.values(), lr=0.1)
    manager, elementwise = OptimManager(), torch.optim.SGD(sharded.values(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        manager.add_optimizer(given)
    for step in range(STEPS):
        give_gradients(plain, step)
        give_gradients(sharded, step)
        reference.step()
        manager.step()
    assert_alike(wholes(sharded), {name: p.detach() for name, p in plain.items()}, 1e-9)
    nbytes = manager.optimizers[0].bytes_per_step()  # type: ignore[attr-defined]
    texts = [str(warning.message) for warning in said]
    expected = f"Shampoo needs whole tensors: .* which send {nbytes} bytes per step"
    assert len(texts) == (runtime.rank() == 0)
    assert all(re.match(expected, text) for text in texts)
    manager.add_optimizer(elementwise)
    assert manager.optimizers[1] is elementwise
    with pytest.raises(ConfigError, match="Have it step whole tensors"):
        manager.add_optimizer(Shampoo(sharded.values()), whole="refuse")
    with pytest.raises(ValueError, match="whole must be 'auto', 'refuse' or True, not False"):
        manager.add_optimizer(Shampoo(sharded.values()), whole=False)  # type: ignore[arg-type]


@on_ranks(2)
def test_the_optimizer_in_whose_place_another_steps_raises_and_its_schedulers_work() -> None:
    sharded = sharded_parameters(ordinary=())
    given, manager = Shampoo(sharded.values(), lr=0.1), OptimManager()
    empty, seen = given.state_dict(), []
    given.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it steps whole tensors
        manager.add_optimizer(given)
    schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    for call in (given.step, given.state_dict, lambda: given.load_state_dict(empty)):
        with pytest.raises(ConfigError, match=r"Call step\(\), state_dict\(\) and load_state_dict"):
            call()
    with pytest.raises(ConfigError, match="added once more"):
        OptimManager().add_optimizer(given, whole=True)
    seen.clear()
    give_gradients(sharded, 0)
    manager.step()
    assert seen == manager.optimizers  # a hook of the user's sees the steps that are taken
    schedule.step()
    assert manager.optimizers[0].param_groups[0]["lr"] == 0.05
    manager.load_state_dict(manager.state_dict())


@on_ranks(2)
def test_a_group_that_is_added_to_the_given_optimizer_is_stepped_too() -> None:
    plain, sharded = plain_parameters(), sharded_parameters()
    for params in (plain, sharded):
        first, *others = params.values()
        given, manager = Shampoo([first], lr=0.1), OptimManager(sum_plain_gradients=False)
        manager.add_optimizer(given, whole=True if params is sharded else "refuse")
        given.add_param_group({"params": others, "lr": 0.2})
        assert set(manager.logical_state(params)["logical"]["parameters"]) == set(params)
        for step in range(STEPS):
            give_gradients(params, step)
            manager.step()
    assert_alike(wholes(sharded), {name: p.detach() for name, p in plain.items()})


CHANGES: dict[str, Any] = {
    "a group taken out": lambda groups: groups.pop(0),
    "a parameter taken out": lambda groups: groups[0]["params"].pop(),
    "a parameter in another group": lambda groups: groups[1]["params"].append(
        groups[0]["params"].pop()
    ),
}


@on_ranks(2)
@cells("change", CHANGES)
@cells("is_given", [True, False])
def test_a_parameter_that_has_left_its_group_is_an_error_on_all_ranks(
    change: str, is_given: bool
) -> None:
    sharded = sharded_parameters()
    groups = [{"params": [p], "lr": 0.1 * number} for number, p in enumerate(sharded.values())]
    manager = OptimManager()
    given = Normalized(groups) if is_given else whole(Normalized, groups)
    manager.add_optimizer(given, whole=True)
    give_gradients(sharded, 0)
    manager.step()
    before = wholes(sharded)
    CHANGES[change](given.param_groups)
    give_gradients(sharded, 1)
    with pytest.raises(ConfigError, match=r"taken out of a group.* requires_grad_\(False\)"):
        manager.step()
    assert_alike(wholes(sharded), before)


@on_ranks(2)
def test_masters_may_be_asked_for_where_whole_tensors_have_them_anyway() -> None:
    sharded, manager = sharded_parameters(torch.bfloat16, ordinary=()), OptimManager()
    manager.add_optimizer(Normalized(sharded.values()), whole=True, masters=True)
    give_gradients(sharded, 0)
    manager.step()
    masters = [
        state["_param_fp32"].dtype
        for state in manager.state_dict()["optimizers"][0]["state"].values()
    ]
    assert set(masters) <= {torch.float32}
    with pytest.raises(ConfigError, match="says itself how it steps half weights"):
        OptimManager().add_optimizer(whole(Normalized, sharded.values()), masters=True)


class NeedsClosure(Shampoo):
    """Needs whole tensors, too."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


@on_ranks(2)
def test_what_cannot_step_whole_tensors_by_itself_is_refused_with_what_to_do() -> None:
    sharded = sharded_parameters(ordinary=())
    for kind, remedy in (
        (NeedsClosure, "step of NeedsClosure needs a closure"),
        (GlobalStepSize, "together=True"),
    ):
        optimizer = kind(sharded.values())
        with pytest.raises(ConfigError, match=remedy):
            OptimManager().add_optimizer(optimizer)
        optimizer.state_dict()  # it is as it was


@on_ranks(2)
def test_a_scheduler_of_torch_over_the_given_optimizer_reaches_the_owners() -> None:
    plain, sharded = plain_parameters(), sharded_parameters()
    results = []
    for params in (plain, sharded):
        given = Normalized(params.values(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(given, 2, gamma=0.5)
        manager = OptimManager(sum_plain_gradients=False)
        manager.add_optimizer(given, schedule, whole=True if params is sharded else "refuse")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
            for step in range(STEPS):
                give_gradients(params, step)
                manager.step()
        results.append(wholes(params))
    assert_alike(results[1], results[0])


class KeepsParameters(Shampoo):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = list(self.param_groups[0]["params"])


@on_ranks(2)
def test_an_optimizer_that_keeps_parts_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"keeps parts of parameters in its attribute 'all'.*bmt.optim.whole"
    ):
        OptimManager().add_optimizer(KeepsParameters(sharded_parameters().values()), whole=True)


@on_ranks(2)
def test_an_optimizer_that_has_stepped_on_parts_is_refused() -> None:
    p = DistributedParameter(torch.ones(4, 3))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"states of parts already.*bmt.optim.whole\(AdamW"):
        OptimManager().add_optimizer(optimizer, whole=True)


@on_ranks(4)
def test_ranks_that_own_nothing_take_part() -> None:
    plain, sharded = torch.nn.Parameter(torch.eye(3)), DistributedParameter(torch.eye(3))
    reference, optimizer = Shampoo([plain]), whole(Shampoo, [sharded])
    for _ in range(3):
        plain.grad = torch.arange(9.0).view(3, 3)
        sharded.grad = sharded.local_part(plain.grad).clone()
        reference.step()
        optimizer.step()
    torch.testing.assert_close(sharded.gather_like(sharded.detach()), plain.detach())
    assert bool(optimizer.state) == (runtime.rank() == 0)


def test_without_a_run_it_is_the_optimizer_itself() -> None:
    assert not runtime.is_initialized()
    plain, other = plain_parameters(), plain_parameters()
    reference, optimizer = Shampoo(plain.values()), whole(Shampoo, other.values())
    for step in range(STEPS):
        give_gradients(plain, step)
        give_gradients(other, step)
        reference.step()
        optimizer.step()
    assert_alike(wholes(other), wholes(plain), 0)
