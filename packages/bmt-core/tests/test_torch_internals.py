"""Each private function of torch that bmt uses does what bmt needs it for."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, prune
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

import bmt_core
from bmt_core import torch_internals as internals
from bmt_testing import run_ranks

PRIVATE = re.compile(
    r"torch\._C\.|torch\._(?!foreach_|_)\w+|\._cdata|_execution_engine|_backward_hooks"
    r"|_make_subclass|_foreach_supported_types|TensorBase|CURRENT_DEVICE|_grad_hooks"
    r"|_is_profiler_enabled|_load_state_dict_(?:pre|post)_hooks|\._state_dict_(?:pre_)?hooks"
    r"|_non_persistent_buffers_set|_global_optimizer_|_IncompatibleKeys|\._base\b|optimized_execution|\.__code__"
)


def test_no_other_module_uses_private_functions_of_torch() -> None:
    packages = Path(__file__).parents[2]
    sources = [path for path in packages.glob("*/src/**/*.py") if path.name != "torch_internals.py"]
    assert len(sources) > 100
    found = [
        f"{p.name}: {line.strip()}"
        for p in sources
        for line in p.read_text().splitlines()
        if PRIVATE.search(line)
    ]
    assert found == []


class Probe(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.call()
        return grads[0] * 2, None


def run_backward(call: Any, x: torch.Tensor | None = None) -> None:
    x = torch.ones(2, requires_grad=True) if x is None else x
    Probe.apply(x, call).sum().backward()  # type: ignore[no-untyped-call]


def test_a_compiled_module_is_known() -> None:
    module = torch.nn.Linear(1, 1)
    assert internals.is_compiled(torch.compile(module)) and not internals.is_compiled(module)


def test_backward_passes_are_numbered() -> None:
    found: list[int] = []
    for _ in range(2):
        run_backward(lambda: found.append(internals.backward_pass()))
    assert internals.backward_pass() == -1 and len({*found, -1}) == 3


def test_a_callback_runs_at_the_end_of_a_pass_that_succeeds() -> None:
    order: list[str] = []
    run_backward(
        lambda: (internals.when_backward_ends(lambda: order.append("end")), order.append("node"))
    )
    assert order == ["node", "end"]


def test_a_callback_is_let_go_at_once_when_the_pass_fails() -> None:
    class Callback:
        def __call__(self) -> None:
            raise AssertionError("called although the pass failed")

    references = []

    def fail() -> None:
        callback = Callback()
        references.append(weakref.ref(callback))
        internals.when_backward_ends(callback)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        run_backward(fail)
    assert references[0]() is None


def test_a_leaf_accumulates_in_backward_and_not_in_autograd_grad() -> None:
    found: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    run_backward(lambda: found.append(internals.accumulates(x)), x)
    y = Probe.apply(x, lambda: found.append(internals.accumulates(x))).sum()  # type: ignore[no-untyped-call]
    torch.autograd.grad(y, x)
    assert found == [True, False] and not internals.accumulates(x.detach())


def test_a_flat_tensor_is_cut_into_views_of_given_shapes() -> None:
    flat = torch.arange(6.0)
    first, second = internals.unflatten(
        flat, [torch.empty(2, 2, device="meta"), torch.empty(2, device="meta")]
    )
    second.zero_()
    assert first.tolist() == [[0, 1], [2, 3]] and flat.tolist() == [0, 1, 2, 3, 0, 0]


def test_tensors_that_share_memory_have_one_key_also_without_bytes() -> None:
    memory, other = torch.empty(4), torch.empty(0)
    assert (
        internals.storage_key(memory)
        == internals.storage_key(memory[2:])
        != internals.storage_key(other)
    )
    key = internals.storage_key(memory)
    memory.untyped_storage().resize_(0)
    assert internals.storage_key(memory) == key


def test_writing_to_a_tensor_changes_its_state_and_replacing_it_does() -> None:
    memory = torch.ones(4)
    states = internals.memory_states([memory[2:], None])
    assert states == internals.memory_states([memory[2:], None]) and states[1] is None
    assert states[:1] != internals.memory_states([memory[:2]])
    memory.zero_()
    assert states[:1] != internals.memory_states([memory[2:]])


def test_a_tensor_counts_as_written_after_writes_and_with_other_memory() -> None:
    one, other, seen = torch.zeros(2), torch.zeros(2), internals.Seen()
    assert len(seen.written([one, other])) == 2
    seen.note([one, other])
    assert seen.written([one, other]) == []
    one.add_(1)
    other.data = torch.zeros(2)
    assert [tensor is one for tensor in seen.written([one, other])] == [True, False]
    seen.note([one, other])
    seen.forget(other)
    assert [tensor is other for tensor in seen.written([one, other])] == [True]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_seen(register: str) -> None:
    x = torch.ones(2, requires_grad=True)
    assert not internals.has_gradient_hooks([x])
    getattr(x, register)(lambda *_: None)
    assert internals.has_gradient_hooks([torch.ones(1), x])


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_of_modules_are_seen(register: str) -> None:
    """Without it the loss of a model would be computed beside a hook that reads the logits."""
    module = nn.Linear(2, 2)
    assert not internals.has_module_hooks(module)
    handle = getattr(module, register)(lambda *_: None)
    assert internals.has_module_hooks(module)
    handle.remove()
    assert not internals.has_module_hooks(module)


def test_transforms_are_seen() -> None:
    found = []
    torch.func.vmap(lambda x: (found.append(internals.are_transforms_active()), x)[1])(
        torch.ones(2)
    )
    assert found == [True] and not internals.are_transforms_active()


class Watched(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("called")


def test_torch_functions_of_subclasses_are_left_out() -> None:
    with internals.without_torch_functions():
        watched = torch.ones(2).as_subclass(Watched)
        assert type(watched + 1) is torch.Tensor
    with pytest.raises(AssertionError, match="called"):
        watched + 1


def test_torch_clips_by_a_function_that_gets_the_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    monkeypatch.setattr(*internals.CLIPPING, lambda parameters, *args: found.append(parameters))
    clip_grad_norm_(parameter, 1.0)
    assert found == [[parameter]]


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty(1), torch.empty(1)], x),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(2), x),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [torch.ones(1), torch.ones(1)]),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, torch.ones(2)),
    "all_to_all": lambda x: dist.all_to_all([x, torch.empty(1)], [torch.ones(1), torch.ones(1)]),
    "all_to_all_single": lambda x: dist.all_to_all_single(x, torch.ones(1)),
    "gather": lambda x: dist.gather(x, None),
    "scatter": lambda x: dist.scatter(x, None),
    "send": lambda x: dist.send(x, 1 - dist.get_rank()),
    "isend": lambda x: dist.isend(x, 1 - dist.get_rank()),
    "recv": lambda x: dist.recv(x, 1 - dist.get_rank()),
    "irecv": lambda x: dist.irecv(x, 1 - dist.get_rank()),
    "P2POp": lambda x: dist.P2POp(dist.isend, x, 1 - dist.get_rank()),
}


def calls_seen() -> list[str]:
    class SeenError(Exception):
        pass

    def see(tensors: Any, name: str) -> None:
        if any(tensor is watched for tensor in [tensors, *tensors]):
            raise SeenError

    watched, seen = torch.ones(1), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for place in internals.COLLECTIVES:
            monkeypatch.setattr(*place, see)
        for name, call in CALLS.items():
            with warnings.catch_warnings(), suppress(SeenError):
                warnings.simplefilter("ignore")  # names that torch deprecates
                call(watched)
                continue
            seen.append(name)
    return seen


def test_all_functions_of_torch_distributed_call_one_of_two_with_their_tensors() -> None:
    assert run_ranks(calls_seen, 2) == [list(CALLS)] * 2


def test_xaviers_and_kaimings_rules_call_one_function_with_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[torch.Tensor] = []
    weight = torch.empty(2, 3)
    monkeypatch.setattr(*internals.FANS, lambda tensor: (found.append(tensor), (3, 2))[1])
    for rule in ("xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_"):
        getattr(nn.init, rule)(weight)
    assert all(tensor is weight for tensor in found) and len(found) == 4


@pytest.mark.parametrize("name", internals.functions_of_fsdp())
def test_functions_of_fsdp_call_one_with_the_module(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SeenError(Exception):
        pass

    def see(given: nn.Module, *args: Any) -> None:
        assert given is layer
        raise SeenError

    layer = nn.Linear(2, 2)
    owner, function = internals.functions_of_fsdp()[name]
    monkeypatch.setattr(owner, function, see)
    with pytest.raises(SeenError):
        getattr(owner, name)(layer)


def test_the_name_of_what_is_pruned_is_known() -> None:
    layer = nn.Linear(2, 2)
    prune.l1_unstructured(layer, "weight", 0.5)
    (method,) = layer._forward_pre_hooks.values()
    assert isinstance(method, prune.BasePruningMethod)
    assert internals.pruned_name(method) == "weight"


def test_names_are_seen_in_a_trace() -> None:
    with torch.profiler.profile() as profile, internals.named_in_trace("of ours"):
        torch.ones(2).sum()
    assert "of ours" in [event.key for event in profile.key_averages()]
    assert not isinstance(internals.named_in_trace("of ours"), torch.profiler.record_function)


def test_expanded_tensors_overlap() -> None:
    assert internals.has_internal_overlap(
        torch.ones(1).expand(3)
    ) and not internals.has_internal_overlap(torch.ones(3))


class Marked(nn.Parameter):
    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise AssertionError("refused")


def test_subclasses_are_made_on_memory_and_given_other_data() -> None:
    memory = torch.ones(3)
    made = internals.make_subclass(Marked, memory, True)
    assert type(made) is Marked and made.requires_grad and made.is_leaf
    assert internals.storage_key(made) == internals.storage_key(memory)
    internals.set_data(made, torch.zeros(5))
    assert made.shape == (5,)


def test_memory_changes_places_and_hooks_stay_with_the_objects() -> None:
    lstm = nn.LSTM(2, 2, device="meta")  # keeps weak references to its parameters
    parameter = lstm.weight_ih_l0
    parameter.register_hook(lambda grad: grad)
    other = nn.Parameter(torch.ones(3))
    internals.swap_memory(parameter, other)
    assert (
        parameter is lstm.weight_ih_l0
        and parameter.device.type == "cpu"
        and parameter.shape == (3,)
    )
    assert internals.has_gradient_hooks([parameter]) and not internals.has_gradient_hooks([other])


def test_registered_types_take_the_foreach_path() -> None:
    from torch.utils._foreach_utils import _foreach_supported_types

    class Own(nn.Parameter):
        pass

    before = copy.copy(_foreach_supported_types)
    internals.register_foreach_type(Own)
    internals.register_foreach_type(Own)
    assert _foreach_supported_types == [*before, Own]
    internals.unregister_foreach_type(Own)
    assert _foreach_supported_types == before


def test_hooks_of_all_optimizers_are_called_outside_only_also_while_one_runs() -> None:
    calls: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    def before(*arguments: Any) -> None:
        calls.append("before")
        with internals.without_optimizer_hooks():
            torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()

    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(lambda *arguments: calls.append("after")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert calls == ["before", "after"]


def test_a_function_that_is_never_compiled_runs_as_it_is() -> None:
    assert internals.never_compiled(lambda x: x + 1)(1) == 2


def test_a_mode_sees_products_of_groups_of_rows() -> None:
    seen = []

    class Sees(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    rows, weights = torch.ones(16, 16).bfloat16(), torch.ones(2, 16, 16).bfloat16()
    ends = torch.tensor([8, 16], dtype=torch.int32)
    with Sees():
        nn.functional.grouped_mm(rows, weights, offs=ends)
    assert seen == [internals.grouped_mm]


def test_fused_updates_exist() -> None:
    p, grad, mean, square = (torch.ones(2) for _ in range(4))
    step = torch.zeros(())
    options = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
    }
    for update in (internals.fused_adam_, internals.fused_adamw_):
        step += 1
        update([p], [grad], [mean], [square], [], [step], maximize=False, **options)
    assert bool((p < 1).all())


def test_buffers_that_are_not_saved_are_known() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("computed", torch.ones(1), persistent=False)
    assert internals.unsaved_buffers(module) == {"computed"}


def test_hooks_of_saving_and_loading_are_found_in_their_order() -> None:
    module, called = nn.Linear(1, 1), []

    def note(name: str) -> Any:
        return lambda *args: called.append(name)

    module.register_state_dict_pre_hook(note("before reading"))
    module._register_state_dict_hook(note("after reading"))
    module.register_load_state_dict_pre_hook(note("before loading"))
    module.register_load_state_dict_post_hook(note("after loading"))
    hooks = [
        *internals.state_dict_hooks(module),
        *(found.values() for found in internals.load_hooks(module)),
    ]
    for (hook,) in hooks:
        hook()
    assert called == ["before reading", "after reading", "before loading", "after loading"]
    assert internals.LoadResult(["a"], ["b"]) == nn.Linear(1, 1).load_state_dict(
        {}, strict=False
    )._replace(missing_keys=["a"], unexpected_keys=["b"])


def test_a_view_knows_its_base() -> None:
    base = torch.ones(3)
    assert internals.base_of(base[1:]) is base
    assert internals.base_of(base) is None


def test_a_function_runs_the_code_that_it_is_given() -> None:
    def one() -> int:
        return 1

    def two() -> int:
        return 2

    internals.set_code(one, internals.code_of(two))
    assert one() == 2


def test_scripted_functions_are_not_optimized_inside() -> None:
    inside = []
    with internals.without_script_optimization():
        inside.append(torch._C._get_graph_executor_optimize())
    assert inside == [False] and torch._C._get_graph_executor_optimize()


@pytest.mark.gpu
def test_the_address_of_the_current_stream_is_that_of_torchs_object() -> None:
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert internals.stream_address(torch.cuda.current_device()) == stream.cuda_stream


def sums_of_groups() -> list[float]:
    """Rank 0 makes two groups, the others one each: torch's own names, which count groups, would
    not meet.
    """
    run = bmt_core.current()
    assert run.backend.context.store is not None
    sums = []
    for ranks in ([0, 1], [0, 2]):
        if run.rank in ranks:
            group = internals.make_process_group(
                ranks,
                run.rank,
                backend="gloo",
                store=dist.PrefixStore("test", run.backend.context.store),
                name=str(ranks),
                timeout=timedelta(seconds=20),
            )
            x = torch.tensor([run.rank + 1.0])
            dist.all_reduce(x, group=group)
            # By the number that the rank has in the world.
            dist.broadcast(x, src=ranks[1], group=group)
            sums.append(float(x))
    return sums


def test_members_alone_make_a_process_group() -> None:
    assert run_ranks(sums_of_groups, 3) == [[3.0, 4.0], [3.0], [4.0]]
