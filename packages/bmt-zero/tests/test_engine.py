"""The order in which the engine issues its work, what it copies, and how much Python it takes."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_models import TicksAroundLinear, python_calls, trained_with_delays, virtual_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero_models import full_gradient

from bmt_core import DistributedModule, DistributedParameter, RemoteError
from bmt_core.params.owner import owner_of
from bmt_core.run.lanes import Mark
from bmt_core.run.runtime import current
from bmt_testing import gpu_ranks, run_ranks
from bmt_zero import Block, TransformerBlockList, no_sync
from bmt_zero.block_call import _EndOfPass

BLOCKS = 6


@pytest.mark.parametrize("in_list", [True, False])
def test_communication_hides_behind_computation(in_list: bool) -> None:
    # Only the first gather and the last reduction are seen.
    for steps in run_ranks(virtual_step, 2, BLOCKS, 3.0, 6.0, 2.0, 2.5, in_list):
        assert steps[-1] == (2.0 + BLOCKS * 3.0, BLOCKS * 6.0 + 2.5)


@pytest.mark.parametrize("in_list", [True, False])
def test_computation_hides_behind_communication(in_list: bool) -> None:
    for steps in run_ranks(virtual_step, 2, BLOCKS, 1.0, 2.0, 4.0, 3.0, in_list):
        forward, backward = steps[-1]
        assert forward == BLOCKS * 4.0 + 1.0
        # The last two are there already; the first gather begins while the second last block computes.
        assert backward <= (BLOCKS - 2) * 4.0 + 3 * 2.0 + 3.0


def test_a_reduction_overlaps_the_whole_backward_of_the_next_block() -> None:
    # Also the part after the first layer that writes its gradient: there are two tensors of full gradients.
    for steps in run_ranks(virtual_step, 2, BLOCKS, 2.0, 4.0, 1.0, 5.0, True, TicksAroundLinear):
        assert steps[-1][1] == 4.0 + BLOCKS * 5.0


def first_gathers() -> list[int]:
    """How many gathers have begun when a model that is called first computes, in each of three steps."""
    blocks = TransformerBlockList([Block(nn.Linear(4, 4)) for _ in range(3)])
    begun: list[int] = []
    lane = current().lanes.gather
    calls = 0

    def run(start: Any, then: Any = None, real: Any = lane.run) -> Any:
        nonlocal calls
        calls += 1
        return real(start, then)

    lane.run = run  # type: ignore[method-assign]

    class Model(DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> Any:
            begun.append(calls)
            return self.blocks(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        calls = 0
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return begun


def test_the_first_block_is_gathered_when_the_model_is_called() -> None:
    assert run_ranks(first_gathers, 2) == [[0, 1, 1]] * 2


def test_a_list_is_ahead_in_its_first_step_already() -> None:
    for steps in run_ranks(virtual_step, 2, BLOCKS, 3.0, 6.0, 2.0, 2.5, True):
        assert steps[0][0] == steps[-1][0] == 2.0 + BLOCKS * 3.0


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_python_calls_do_not_grow_with_the_number_of_parameters(level: int) -> None:
    (few, _), (many, _) = run_ranks(python_calls, 2, 4, level), run_ranks(python_calls, 2, 400, level)
    assert many == few


class Products(TorchDispatchMode):
    """Counts the products of linear layers with a bias, which backward has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "addmm"
        return func(*args, **(kwargs or {}))


def recomputed_products(level: int) -> int:
    block = Block(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), True, level)
    loss = block(torch.ones(2, 4)).sum()
    with Products() as products:
        loss.backward()
    return products.count


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_the_last_product_of_a_block_is_not_recomputed(level: int) -> None:
    assert run_ranks(recomputed_products, 2, level) == [2] * 2


class Copies(TorchDispatchMode):
    """Counts the elements that copies, casts and concatenations write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy", "cat", "clone", "_foreach_copy_", "_foreach_add_"):
            written = args[0] if name.startswith("_foreach") else [result]
            self.elements += [tensor.numel() for tensor in written]
        return result


def copied(bias_too: bool) -> tuple[int, int]:
    """The most elements that one copy writes, but for the one of all gradients that gloo reduces; and how many those have."""
    block = Block(nn.Sequential(nn.Linear(64, 64, bias=bias_too), nn.Tanh(), nn.Linear(64, 64, bias=bias_too)))
    for _ in range(3):
        with Copies() as copies:
            block(torch.ones(2, 64)).sum().backward()
        block.zero_grad()
    in_gloo = [count for count in copies.elements if count >= 2 * 64 * 64]
    return max(count for count in copies.elements if count not in in_gloo), len(in_gloo)


@pytest.mark.parametrize("bias_too", [True, False])
def test_linear_layers_need_no_copy_of_weights_or_gradients(bias_too: bool) -> None:
    # On four ranks a shard, which is copied too, is smaller than a weight.
    for largest, in_gloo in run_ranks(copied, 4, bias_too):
        assert largest < 64 * 64 and in_gloo == 1


class Odd(nn.Module):
    """Linear layers in the uses that are not the ordinary one."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=case != "without bias")
        if case == "tied":
            self.second.weight = self.first.weight
        if case == "frozen":
            self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.case == "hooked":
            self.first.weight.register_hook(lambda grad: grad * 2)
        h = nn.functional.relu_(self.first(x))
        if self.case == "twice":
            h = self.first(h)
        if self.case == "vector":
            h = h + self.first(h[0, 0])
        h = self.second(h)
        if self.case == "hooked late":
            self.second.weight.register_hook(lambda grad: grad * 2)
        if self.case == "penalty":
            h = h + (self.first.weight**2).sum() + self.first.bias.sum()
        return h


CASES = ["twice", "tied", "frozen", "hooked", "hooked late", "penalty", "vector", "without bias"]


def odd(case: str, level: int | None, use_checkpoint: bool, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    module: nn.Module = Odd(case).to(dtype)
    if level is not None:
        Block(module, use_checkpoint, level)
    for step in range(1 if case.startswith("hooked") else 2):  # gradients accumulate; a parameter keeps its hook
        x = torch.linspace(-1, 2, 36, dtype=dtype).view(2, 3, 6).add_(step).requires_grad_()
        module(x).square().mean().backward()
    grads = {name: full_gradient(p) for name, p in module.named_parameters()}
    return {"x": x.grad, **grads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("level", "use_checkpoint"), [(3, False), (2, False), (3, True)])
def test_linear_layers_in_odd_uses_have_the_gradients_of_plain_torch(
    case: str, level: int, use_checkpoint: bool, dtype: torch.dtype
) -> None:
    if case.startswith("hooked") and use_checkpoint:
        pytest.skip("plain torch's checkpoint calls such a hook twice")
    expected = odd(case, None, False, dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for found in run_ranks(odd, 2, case, level, use_checkpoint, dtype):
        for name, grad in expected.items():
            if grad is None:
                assert found[name] is None
            else:
                summed = grad if name == "x" else 2 * grad
                torch.testing.assert_close(found[name], summed, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def penalised() -> list[Any]:
    """A penalty on the shards themselves, which autograd adds to ``.grad`` while a reduction is under way."""
    block = Block(nn.Linear(8, 8), zero_level=3)
    for _ in range(3):
        (block(torch.ones(1, 8)).sum() + sum(p.sum() for p in block.parameters())).backward()
    return [full_gradient(p).unique().tolist() for p in block.parameters()]  # type: ignore[union-attr]


def test_what_autograd_adds_to_shards_meanwhile_is_kept() -> None:
    assert run_ranks(penalised, 2) == [[[9.0], [9.0]]] * 2  # 3 x (2 ranks + the penalty)


class Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def used_in_this_order(names: str, dtype: torch.dtype, level: int) -> list[list[float]]:
    """The gradients of blocks that are used several times, over two passes."""
    blocks = {name: Block(Scaled(dtype), zero_level=level, use_checkpoint=False) for name in sorted(set(names))}
    for _ in range(2):
        x = torch.ones(1, 128, dtype=dtype)
        for name in names:
            x = blocks[name](x)
        x.sum().backward()
    return [full_gradient(block.weight).unique().tolist() for block in blocks.values()]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [0, 3])
def test_gradients_of_blocks_used_several_times_are_sums(level: int, dtype: torch.dtype) -> None:
    order = "BAYBXA"
    expected = [[float(order.count(name) * 2 * 2)] for name in sorted(set(order))]
    assert run_ranks(used_in_this_order, 2, order, dtype, level) == [expected] * 2


def kept_after_a_step() -> list[Any]:
    """What a run still keeps for reductions after the step that follows a pass under ``no_sync``."""
    blocks = [Block(Scaled(torch.bfloat16), zero_level=level) for level in (0, 0, 3)]
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], lr=1.0)
    with no_sync(nn.ModuleList(blocks)):
        chained(blocks, torch.ones(1, 128, dtype=torch.bfloat16)).backward()
    optimizer.step()
    return list(blocks[0]._bmt_block.state.run.in_flight._kept)


def test_a_step_that_reduces_held_back_gradients_keeps_no_memory_for_them() -> None:
    assert run_ranks(kept_after_a_step, 2) == [[], []]


def watched(level: int) -> list[float]:
    """What a watcher of each of two blocks finds, in its ``.grad`` to be, after the mark that it was given."""
    blocks = [Block(Scaled(torch.float32), zero_level=level) for _ in range(2)]
    found: list[float] = []

    def watcher(flat: torch.Tensor, done: Mark) -> None:
        done.wait()
        found.append(flat.max().item())

    for block in blocks:
        owner = owner_of(block._parameters["weight"])
        assert owner is not None
        owner.watch_reductions(watcher)
    chained(blocks, torch.ones(1, 128)).backward()
    return found


@pytest.mark.parametrize("level", [0, 3])
def test_who_watches_reductions_is_told_of_each_during_backward(level: int) -> None:
    first, second = run_ranks(watched, 2, level)
    # At level 3 the second rank's part of so few elements is padding.
    assert (first, second) == ([2.0, 2.0], [2.0 if level == 0 else 0.0] * 2)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.fails:
            y.register_hook(_raise)
        return y


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("on purpose")


def after_a_failure(level: int) -> Any:
    first, second = model = [Block(Failing(), zero_level=level) for _ in range(2)]
    second.fails = False
    with pytest.raises(ValueError, match="on purpose"):
        second(first(torch.ones(1, 2))).sum().backward()
    first.fails = False
    for block in model:
        block.zero_grad()
    second(first(torch.ones(1, 2))).sum().backward()
    return full_gradient(second.linear.bias).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("level", [0, 3])
def test_a_failed_backward_leaves_nothing_behind(level: int) -> None:
    assert run_ranks(after_a_failure, 2, level) == [[2.0, 2.0]] * 2


def chained(blocks: list[Any], x: torch.Tensor) -> torch.Tensor:
    return functools.reduce(lambda x, block: block(x), blocks, x).sum()


def second_graph_after_a_failure(level: int, dtype: torch.dtype) -> list[float]:
    """Two graphs are made; the backward of one fails, that of the other is run after ``zero_grad``."""
    first, last = blocks = [Block(Failing(), zero_level=level).to(dtype) for _ in range(2)]
    losses = []
    for first.fails, last.fails in ((True, False), (False, False)):
        losses.append(chained(blocks, torch.ones(1, 2, dtype=dtype)))
    with pytest.raises(ValueError, match="on purpose"):
        losses[0].backward()
    last.zero_grad()
    losses[1].backward()
    return full_gradient(last.linear.bias).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_graph_made_before_another_one_failed_has_its_own_gradients(level: int, dtype: torch.dtype) -> None:
    assert run_ranks(second_graph_after_a_failure, 2, level, dtype) == [[2.0, 2.0]] * 2


def cleared_by_the_model(level: int) -> None:
    """The second of two backward passes fails on each rank; then a thread lists the parameters, and the model clears them."""
    model = nn.Sequential(*[Block(Failing(), zero_level=level) for _ in range(2)])
    x = torch.ones(1, 2, device=current().device)

    def gradients() -> list[torch.Tensor | None]:
        model(x).sum().backward()
        return [full_gradient(parameter) for parameter in model.parameters()]

    model[1].fails = False
    with pytest.raises(ValueError, match="on purpose"):
        gradients()
    model.zero_grad()
    model[0].fails = False
    expected = gradients()
    model[0].fails = True
    with pytest.raises(ValueError, match="on purpose"):
        gradients()
    thread = threading.Thread(target=lambda: list(model.parameters()))
    thread.start()
    thread.join()
    assert model[0]._bmt_block.state.run.calls_in_pass  # a thread must not end what another one may be running
    model.zero_grad()
    assert all(isinstance(parameter, DistributedParameter) for parameter in model.parameters())
    model[0].fails = False
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)


def cleared_though_torch_frees_late(level: int) -> None:
    with patch.object(
        _EndOfPass, "__del__", lambda callback: None
    ):  # as on GPUs, where another thread frees a failed pass
        cleared_by_the_model(level)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_model_clears_the_gradients_of_a_failed_backward_though_torch_frees_it_late(level: int) -> None:
    run_ranks(cleared_though_torch_frees_late, 2, level)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_on_gpus_a_model_clears_the_gradients_of_a_failed_backward(level: int) -> None:
    run_ranks(cleared_by_the_model, 2, level, init={"device": "cuda"})


def errors_beside_that_of_a_failed_pass() -> list[str]:
    """What Python prints as "Exception ignored in" when a pass fails and what it waits for fails, too: a rank has died."""
    block, ignored = Block(Failing()), list[str]()
    run = block._bmt_block.state.run

    def wait_for_a_dead_rank() -> None:
        raise RemoteError("Rank 1 has died.")

    output = block(torch.ones(1, 2)).sum()
    with (
        patch.object(sys, "unraisablehook", lambda found: ignored.append(str(found.exc_value))),
        patch.object(run, "end_failed_passes", wait_for_a_dead_rank),
        pytest.raises(ValueError, match="on purpose"),
    ):
        output.backward()
    return ignored


def test_a_pass_that_fails_with_a_dead_rank_has_one_error() -> None:
    assert run_ranks(errors_beside_that_of_a_failed_pass, 1) == [[]]


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [[3, 3, 3], [2, 2, 2], [1, 1, 1], [0, 0, 0], [3, 1, 2]])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_delays_change_nothing(levels: list[int], use_checkpoint: bool) -> None:
    size = min(gpu_ranks(), 4)
    init = {"device": "cuda"}
    expected = run_ranks(trained_with_delays, size, levels, use_checkpoint, 0, init=init)
    for cycles in (2_000_000, 1_000_001):
        found = run_ranks(trained_with_delays, size, levels, use_checkpoint, cycles, init=init)
        assert all(
            torch.equal(a, b)
            for one, other in zip(expected, found, strict=True)
            for a, b in zip(one, other, strict=True)
        )
