"""``AdamOffloadOptimizer`` under the sharding engine trains what ``AdamOptimizer`` trains, at every
level, on any ranks.

On the CPU there is nowhere to go, so the host takes the part of the device here: states, chunks,
the worker's thread, copies during backward and marks are those of a GPU, and copies are done
at once.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_training import Gated, Layer, Offload, Training, assert_same_results, both
from torch import nn

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core.errors import CheckpointError
from bmt_core.run import runtime
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmt_optim.offload.chunks import ShardChunks
from bmt_optim.offload.host_shard import HostShard
from bmt_params.parameter import DistributedParameter
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block, TransformerBlockList
from cells import cells
from pairwise import pairwise


@pytest.mark.parametrize(("world_size", "every"), [(1, 1), (4, 4)])
def test_float32_training_equals_that_of_adam_in_every_bit(world_size: int, every: int) -> None:
    for results in run_ranks(both, world_size, Offload, torch.float32, every):
        for settings, expected, found in results:
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), settings


def test_bfloat16_training_equals_that_of_adam_but_for_gradients_clipped_without_rounding() -> None:
    for results in run_ranks(both, 2, Offload, torch.bfloat16, 2):
        for settings, expected, found in results:
            for a, b in zip(expected, found, strict=True):
                if "max_norm" in settings:
                    torch.testing.assert_close(a, b, rtol=0.02, atol=0.01)
                else:
                    assert torch.equal(a, b), settings


def split_over_optimizers(kind: Any, level: int, dtype: torch.dtype, joins_later: bool) -> Training:
    """Train with every other parameter of each block in another optimizer, or in a group that comes
    after the second step.
    """
    training = Training(kind, level=level, dtype=dtype)
    params = [p for _, p in sorted(training.model.named_parameters())]
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "overlap_forward": True}
    training.optimizer = kind(params[::2], **options)
    training.manager = OptimManager()
    training.manager.add_optimizer(training.optimizer)
    if not joins_later:
        training.manager.add_optimizer(kind(params[1::4], **options))  # and the rest is nobody's
    for number in range(4):
        if joins_later and number == 2:
            training.optimizer.add_param_group({"params": params[1::2], "lr": 0.1})
        training.step(number)
        for p in params[3::4]:
            p.grad = None
    return training


@on_ranks(2)
@cells(
    "level, dtype, joins_later", pairwise((0, 3), (torch.float32, torch.bfloat16), (False, True))
)
def test_a_block_may_belong_to_several_optimizers_or_groups_that_come_later(
    level: int, dtype: torch.dtype, joins_later: bool
) -> None:
    kinds = (AdamOptimizer, Offload)
    assert_same_results([split_over_optimizers(kind, level, dtype, joins_later) for kind in kinds])


@on_ranks(2)
@cells(
    "max_norm, micro_batches, counts",
    [(None, 1, False), (0.01, 2, False), (None, 2, True), (0.01, 1, False)],
)
def test_gradients_of_blocks_are_copied_during_backward_also_when_they_are_scaled_later(
    max_norm: float | None, micro_batches: int, counts: bool
) -> None:
    """How many copies of gradients each step starts itself; weights are not read again."""
    options = {"loss_scale": 4.0, "micro_batches": micro_batches, "counts": counts}
    training = Training(Offload, max_norm=max_norm, **options)  # type: ignore[arg-type]
    late: list[int] = []

    def count(chunks: Any, copies: Any) -> Any:
        late[-1] += 1
        return copy(chunks, copies)

    def refuse(shard: Any, p: Any) -> None:
        raise AssertionError("nobody wrote a weight")

    copy, read = ShardChunks.copy_gradients, HostShard._read_weight
    ShardChunks.copy_gradients = count  # type: ignore[method-assign]
    try:
        for number in range(4):
            late.append(0)
            training.step(number)
            HostShard._read_weight = refuse  # type: ignore[method-assign]
    finally:
        ShardChunks.copy_gradients, HostShard._read_weight = copy, read  # type: ignore[method-assign]
    # The first step divides shards into chunks; after it the embedding's gradient leaves during
    # backward too.
    assert late == [5, 0, 0, 0]


@on_ranks(2)
def test_gradients_that_were_changed_after_they_were_copied_are_copied_again() -> None:
    trainings = [Training(kind) for kind in (AdamOptimizer, Offload)]
    for training, number in itertools.product(trainings, range(4)):
        with pytest.MonkeyPatch.context() as patch:
            step = training.manager.step

            def change_and_step(
                training: Training = training, step: Callable[[], None] = step
            ) -> None:
                for p in training.model.parameters():
                    if p.grad is not None:
                        p.grad *= 0.1
                        p.grad += p.detach()
                step()

            patch.setattr(training.manager, "step", change_and_step)
            training.step(number)
    assert_same_results(trainings)


@on_ranks(1)
def test_gradients_that_a_grad_scaler_unscaled_after_they_were_copied_are_copied_again() -> None:
    trainings = [Training(kind) for kind in (AdamOptimizer, Offload)]
    tokens = torch.arange(20).view(4, 5) % 11
    for training in trainings:
        optimizer, scaler = training.optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(4):
            optimizer.zero_grad()
            logits = training.model(tokens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens.flatten().roll(1))
            scaler.scale(loss).backward()
            if number != 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert_same_results(trainings)


@on_ranks(2)
@cells(
    "dtype, compact_master",
    [(torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)],
)
def test_weights_that_were_written_by_hand_count_as_they_do_for_adam(
    dtype: torch.dtype, compact_master: bool
) -> None:
    options: Any = {"dtype": dtype, "compact_master": compact_master}
    trainings = [Training(kind, **options) for kind in (AdamOptimizer, Offload)]
    for training, number in itertools.product(trainings, range(4)):
        training.step(number)
        training.optimizer.wait()
        with torch.no_grad():
            for p in training.model.parameters():
                p.clamp_(-0.1, 0.1)
    assert_same_results(trainings)


class Fails(Offload):
    """Steps fail in the worker from the second step on, in the third call of the kernel."""

    def _kernels(self) -> Any:
        kernels, optimizer = super()._kernels(), self

        class Kernels:
            has_compact_adam = False

            @staticmethod
            def adam_step(*columns: Any, **options: Any) -> None:
                optimizer.calls += 1
                if options["step"] == 2 and optimizer.calls > optimizer.last_call:
                    raise ArithmeticError("no such number")
                kernels.adam_step(*columns, **options)

        return Kernels

    calls = 0
    last_call = 0


@on_ranks(1)
@pytest.mark.parametrize("overlap_forward", [False, True])
def test_an_error_of_the_worker_is_raised_by_the_next_call_and_leaves_no_shard_half_new(
    overlap_forward: bool,
) -> None:
    training = Training(Fails, overlap_forward=overlap_forward, level=0)
    optimizer = training.optimizer
    assert isinstance(optimizer, Fails)
    training.step(0)
    optimizer.wait()
    before = [p.detach().clone() for p in training.model.parameters()]
    state = {key: dict(value) for key, value in optimizer.state_dict()["state"].items()}
    copies = {
        key: {k: v.clone() if torch.is_tensor(v) else v for k, v in value.items()}
        for key, value in state.items()
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.last_call = optimizer.calls + 7
    for number in (1, 2):  # the next call, and whoever goes on although he was told
        with pytest.raises(RuntimeError, match="on the host failed on rank 0") as caught:
            training.step(number)
            training.optimizer.wait()
        assert "ArithmeticError" in f"{caught.value} {caught.value.__cause__!r}"
    # Of one shard, all parameters are new or all are old.
    changed: dict[Any, set[bool]] = {}
    for p, old in zip(training.model.parameters(), before, strict=True):
        if p in optimizer.state:
            owner: Any = getattr(p, "owner_reference", None)
            changed.setdefault(id(p) if owner is None else id(owner()), set()).add(
                not torch.equal(p.detach(), old)
            )
    assert sorted({tuple(each) for each in changed.values()}) == [(False,), (True,)]
    # A loaded state makes it whole again.
    with torch.no_grad():
        for p, old in zip(training.model.parameters(), before, strict=True):
            p.copy_(old)
    optimizer.load_state_dict({"state": copies, "param_groups": groups})
    optimizer.last_call = 10**9
    training.step(1)
    straight = Training(AdamOptimizer, overlap_forward=overlap_forward, level=0)
    for number in range(2):
        straight.step(number)
    assert_same_results([straight, training])


@on_ranks(1)
@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("level", [0, 3])
def test_after_an_error_a_checkpoint_makes_all_whole_and_a_state_that_is_refused_does_not(
    overlap_forward: bool, level: int, tmp_path: Path
) -> None:
    training = Training(Fails, overlap_forward=overlap_forward, level=level)
    optimizer = training.optimizer
    assert isinstance(optimizer, Fails)
    training.step(0)
    save_checkpoint(tmp_path, training.model, training.manager)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.last_call = optimizer.calls + 7
    with pytest.raises(RuntimeError):
        training.step(1)
        optimizer.wait()
    state = {"state": {0: {"exp_avg": torch.zeros(77)}}, "param_groups": groups}
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError):
        training.step(1)
    optimizer.last_call = 10**9
    load_checkpoint(tmp_path, training.model, training.manager)
    training.step(1)
    straight = Training(AdamOptimizer, overlap_forward=overlap_forward, level=level)
    for number in range(2):
        straight.step(number)
    assert_same_results([straight, training])


def saved_state(
    kind: Any, dtype: torch.dtype, compact_master: bool | None
) -> tuple[Any, list[torch.Tensor]]:
    training = Training(kind, dtype=dtype, compact_master=compact_master)
    for number in range(3):
        training.step(number)
    state = training.optimizer.state_dict(gather=True)
    assert bool(state["parameters"]) == (runtime.rank() == 0)
    return state, training.whole()


def resumed(
    kind: Any, dtype: torch.dtype, saved: Any, compact_master: bool | None
) -> list[torch.Tensor]:
    state, values = saved
    training = Training(kind, dtype=dtype, compact_master=compact_master)
    training.step(9)  # there are states already
    training.optimizer.wait()
    named = sorted(training.model.named_parameters())
    with torch.no_grad():
        for (_, p), value in zip(named, values, strict=True):
            assert isinstance(p, DistributedParameter)
            p.copy_(p.local_part(value))
    training.optimizer.load_state_dict(
        state if runtime.rank() == 0 else {**state, "parameters": {}}
    )
    for number in range(3, 5):
        training.step(number)
    return training.whole()


@functools.cache
def state_of_two_ranks(kind: Any, dtype: torch.dtype, compact_master: bool | None) -> Any:
    return run_ranks(saved_state, 2, kind, dtype, compact_master)[0]


@functools.cache
def resumed_by_adam(world_size: int, dtype: torch.dtype, compact_master: bool | None) -> Any:
    saved = state_of_two_ranks(AdamOptimizer, dtype, compact_master)
    return run_ranks(resumed, world_size, AdamOptimizer, dtype, saved, compact_master)


@pytest.mark.parametrize(
    ("dtype", "before", "after", "compact_master"),
    [
        (torch.float32, Offload, Offload, None),
        (torch.bfloat16, Offload, Offload, True),
        (torch.float32, AdamOptimizer, Offload, True),
        (torch.bfloat16, AdamOptimizer, Offload, None),
        (torch.bfloat16, Offload, AdamOptimizer, True),
        (torch.float32, Offload, AdamOptimizer, None),
    ],
)
def test_a_gathered_state_resumes_with_either_optimizer_at_any_world_size(
    dtype: torch.dtype, before: Any, after: Any, compact_master: bool | None
) -> None:
    saved = state_of_two_ranks(before, dtype, compact_master)
    expected = state_of_two_ranks(AdamOptimizer, dtype, compact_master)
    assert all(torch.equal(a, b) for a, b in zip(saved[1], expected[1], strict=True))
    for name, state in expected[0]["parameters"].items():
        for key, value in state.items():
            found = saved[0]["parameters"][name][key]
            assert torch.equal(found, value) if torch.is_tensor(value) else found == value
    for world_size in (1, 4) if compact_master is None else (4,):
        straight = resumed_by_adam(world_size, dtype, compact_master)
        found_on_ranks = run_ranks(resumed, world_size, after, dtype, saved, compact_master)
        for values, others in zip(found_on_ranks, straight, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def deltas(kind: Any, level: int) -> tuple[float, float]:
    training = Training(kind, level=level, dtype=torch.bfloat16, record_delta=True)
    for number in range(3):
        training.step(number)
    optimizer = training.optimizer
    assert isinstance(optimizer, AdamOffloadOptimizer)
    return optimizer.get_avg_delta(), optimizer.get_var_delta()


def plain_deltas(level: int) -> tuple[float, float]:
    training = Training(AdamOptimizer, level=level, dtype=torch.bfloat16)
    optimizer = training.optimizer
    for number in range(2):
        training.step(number)
    before = {p: optimizer.portable_state(p)["_param_fp32"].clone() for p in optimizer.state}
    training.step(2)
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in before:
                m, v = (
                    p.gather_like(optimizer.state[p][key]).double()
                    for key in ("exp_avg", "exp_avg_sq")
                )
                delta = (m / (1 - 0.9**3)) / ((v / (1 - 0.999**3)).sqrt() + 1e-8)
                found.append((delta + group["weight_decay"] * p.gather_like(before[p])).flatten())
    everything = torch.cat(found)
    return everything.mean().item(), everything.var(correction=0).item()


def test_recorded_deltas_are_those_of_the_formula() -> None:
    for level, kind in ((0, Offload), (3, Offload), (3, AdamOffloadOptimizer)):
        expected = run_ranks(plain_deltas, 2, level)
        for ours, plain in zip(run_ranks(deltas, 2, kind, level), expected, strict=True):
            assert ours == pytest.approx(plain, rel=1e-5), (level, kind)


@on_ranks(2)
@cells("level", range(4))
def test_step_returns_while_the_host_works_and_each_block_waits_for_its_own_update(
    level: int,
) -> None:
    torch.manual_seed(3)
    model = TransformerBlockList([Block(Layer(torch.float32), zero_level=level) for _ in range(3)])
    optimizer = Gated(model.parameters(), lr=0.1, overlap_forward=True)
    optimizer.gate = threading.Event()
    x = torch.randn(2, 6)
    model(x).square().sum().backward()
    before = parameters_with_gradients(model.parameters())
    optimizer.step()
    assert [update.is_over.is_set() for update in optimizer._under_way] == [False] * 3
    optimizer.gate.set()
    model(x).square().sum().backward()  # each block waits for its update
    assert all(update.is_over.is_set() for update in optimizer._under_way)
    assert all(not torch.equal(p, old) for p, old in before)


def parameters_with_gradients(
    params: Iterable[nn.Parameter],
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Those of which this rank has elements with gradients, and copies of them."""
    return [(p, p.detach().clone()) for p in params if p.grad is not None and p.grad.any()]


class Untold(torch.optim.SGD):
    """Tells nobody that it wrote, as all of torch's."""


@on_ranks(2)
@cells("level, second", [(0, Untold), (3, AdamOptimizer), (3, Untold)])
def test_a_block_waits_for_the_updates_of_all_optimizers_that_have_parts_of_it(
    level: int, second: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.manual_seed(3)
    model = TransformerBlockList([Block(Layer(torch.float32), zero_level=level) for _ in range(2)])
    params = list(model.parameters())
    first = Gated(params[::2], lr=0.1, overlap_forward=True)
    first.gate = threading.Event()
    others = second(params[1::2], lr=0.1)
    x = torch.randn(2, 6)
    model(x).square().sum().backward()
    before = parameters_with_gradients(params[::2])
    first.step()
    others.step()
    threading.Timer(0.3, first.gate.set).start()
    model(x)
    assert all(not torch.equal(p, old) for p, old in before)
