"""``AdamOffloadOptimizer`` on one process; under the sharding engine and on GPUs:
``integration-tests/test_offload*.py``.
"""

from __future__ import annotations

import copy
import io
import itertools
import mmap
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from offloaded import Offload
from sharded_adam import give_gradients, parameters, train

from bmt_core.comm.protocols import Finished
from bmt_core.errors import ConfigError
from bmt_core.run import locked_memory
from bmt_optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, create
from bmt_optim.adam.update_plan import UpdateStream
from bmt_optim.offload import worker
from bmt_optim.offload.copies import Copies
from bmt_optim.offload.host_memory import HostMemory
from pairwise import pairwise

CPU = torch.device("cpu")
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, torch.float64, *HALVES]


def same(ones: Any, others: Any) -> bool:
    return all(
        torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(ones, others, strict=True)
    )


def states_are_same(one: AdamOptimizer, other: AdamOptimizer) -> bool:
    def values(optimizer: AdamOptimizer) -> list[dict[str, Any]]:
        return [
            optimizer.portable_state(p) for group in optimizer.param_groups for p in group["params"]
        ]

    return all(
        a.keys() == b.keys()
        and all(a[k] == b[k] if k == "step" else torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(values(one), values(other), strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "compact_master", "decoupled"),
    pairwise(DTYPES, [None, False, True], [None, True, False]),
)
def test_it_steps_as_adam_does_in_every_bit(
    dtype: torch.dtype, compact_master: bool | None, decoupled: bool
) -> None:
    options: dict[str, Any] = {
        "compact_master": compact_master,
        "decoupled_weight_decay": decoupled,
        "hold_steps": 2,
    }
    ours, theirs = parameters(dtype), parameters(dtype)
    offloaded = Offload(ours, lr=0.01, weight_decay=0.1, **options)
    adam = AdamOptimizer(theirs, lr=0.01, weight_decay=0.1, **options)
    for step in range(8):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        if step in (3, 4):  # one has no gradient, and counts steps of its own from then on
            ours[1].grad = theirs[1].grad = None
        offloaded.step(scale=4)
        adam.step(scale=4)
        assert same(ours, theirs) and states_are_same(offloaded, adam)


def strided(values: torch.Tensor) -> list[torch.nn.Parameter]:
    """Parameters of every layout: transposed, a slice of each row of something larger, of
    no dimension.
    """
    larger = torch.zeros(4, 6)
    larger[:, :3] = values
    return [
        torch.nn.Parameter(values.clone().t()),
        torch.nn.Parameter(larger[:, :3]),
        torch.nn.Parameter(values.clone().view(2, 2, 3).permute(2, 0, 1)),
        torch.nn.Parameter(values[0, 0].clone()),
    ]


@pytest.mark.parametrize("are_gradients_contiguous", [False, True])
def test_parameters_and_gradients_may_lie_in_memory_as_they_like(
    are_gradients_contiguous: bool,
) -> None:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    ours, theirs = strided(values), strided(values)
    around = ours[1].detach().as_strided((4, 3), (6, 1), 3)
    offloaded, adam = Offload(ours, lr=0.1), AdamOptimizer(theirs, lr=0.1)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        if not are_gradients_contiguous:
            for p in ours:
                assert p.grad is not None
                p.grad = torch.empty_like(p).copy_(p.grad)
            ours[0].grad = torch.stack([g := ours[0].grad, g])[0]  # type: ignore[list-item]
        offloaded.step()
        adam.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert not around.any()  # what lies between belongs to others


class FlatOwner:
    """Stands for a Block whose shard is ``flat``; keeps what the optimizer tells and asks of it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.params = [torch.nn.Parameter(part) for part in flat.split(7)]
        self.watcher: Any = None
        for p in self.params:
            p.owner_reference = weakref.ref(self)  # type: ignore[attr-defined]

    def note_update(self, done: Any = None, reads: Any = None) -> None:
        return None

    def watch_reductions(self, watcher: Any) -> None:
        self.watcher = watcher

    def give_gradients(self, flat: torch.Tensor) -> None:
        for p, grad in zip(self.params, flat.split(7), strict=True):
            p.grad = grad


class DelayedHost(Offload):
    """The host's thread goes on when ``may_step`` is set."""

    def _kernels(self) -> Any:
        kernels, may_step = super()._kernels(), self.may_step

        class Kernels:
            has_compact_adam = False

            @staticmethod
            def adam_step(*columns: Any, **options: Any) -> None:
                may_step.wait()
                kernels.adam_step(*columns, **options)

        return Kernels

    may_step = threading.Event()


def test_gradients_of_the_next_backward_wait_for_a_host_that_still_reads_the_last_ones() -> None:
    class LetsTheHostGoOn(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            DelayedHost.may_step.set()
            return super().wait(timeout)

    owners = [FlatOwner(torch.ones(21)) for _ in range(2)]
    offloaded = DelayedHost(owners[0].params, lr=0.1, overlap_forward=True)
    adam = AdamOptimizer(owners[1].params, lr=0.1)
    for step in range(3):
        gradients = torch.randn(21, generator=torch.Generator().manual_seed(step))
        if owners[0].watcher is not None:  # during backward
            owners[0].watcher(gradients, Finished())
        offloaded.wait()
        DelayedHost.may_step.clear()
        for owner, optimizer in zip(owners, (offloaded, adam), strict=True):
            owner.give_gradients(gradients)
            optimizer.step()
        for update in offloaded._under_way:
            update.is_over = LetsTheHostGoOn()
    offloaded.wait()
    assert same(owners[0].params, owners[1].params)


@pytest.mark.parametrize(("overlap_forward", "lines"), [(None, 1), (False, 0)])
def test_the_first_step_says_once_that_the_forward_could_overlap(
    overlap_forward: bool | None,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # On the CPU there is no stream, and nothing to say; as if there was one:
    monkeypatch.setattr(UpdateStream, "exists_on", lambda self, device: True)
    owned, ordinary = FlatOwner(torch.ones(21)), parameters()
    adam = AdamOptimizer(owned.params, overlap_forward=overlap_forward)
    train(range(2), adam, AdamOptimizer(ordinary))  # ordinary parameters cannot overlap
    assert capsys.readouterr().out.count("With overlap_forward=True the first Blocks") == lines


def test_the_cpu_leaves_nothing_unused(capsys: pytest.CaptureFixture[str]) -> None:
    train([0], AdamOptimizer(FlatOwner(torch.ones(21)).params))
    assert not capsys.readouterr().out


class LateCopies(Copies):
    """Gradients arrive on the host no sooner than somebody waits for them."""

    def to_host(self, pairs: Any, after: Any = None) -> Any:
        class Late(Finished):
            def synchronize(self) -> None:
                for source, target in pairs:
                    target.copy_(source)

        pairs = list(pairs)
        return Late()


def test_the_host_steps_when_gradients_have_arrived() -> None:
    class Late(Offload):
        def _copies_for(self, device: torch.device) -> Copies:
            return LateCopies()

    ours, theirs = parameters(), parameters()
    offloaded, adam = Late(ours, lr=0.1), AdamOptimizer(theirs, lr=0.1)
    train(range(2), offloaded, adam)
    assert same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Offload, AdamOffloadOptimizer])
def test_a_flag_skips_and_a_scale_divides_as_for_adam(dtype: torch.dtype, kind: Any) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    offloaded, adam = kind(ours, lr=0.01, record_delta=True), AdamOptimizer(theirs, lr=0.01)
    for step in range(5):
        for optimizer, params in ((offloaded, ours), (adam, theirs)):
            give_gradients(params, step, scale=float("nan") if step == 2 else 8.0)
            optimizer.found_inf = torch.full((), float(step == 2))
            optimizer.grad_scale = torch.full((), 8.0)
            optimizer.step()
            optimizer.read_outcome()
        assert same(ours, theirs) and states_are_same(offloaded, adam)
    assert {state["step"] for state in offloaded.state.values()} == {4}


@pytest.mark.parametrize("kind", [Offload, AdamOffloadOptimizer])
def test_a_manager_scales_clips_and_skips(kind: Any) -> None:
    results = []
    for which in (AdamOptimizer, kind):
        params = parameters(torch.float16)
        optimizer = which(params, lr=0.01)
        manager = OptimManager(loss_scale=1024.0)
        manager.add_optimizer(optimizer)
        for step in range(4):
            manager.zero_grad()
            loss = torch.stack(
                [(p * (i + step + 1)).float().sum() for i, p in enumerate(params)]
            ).sum()
            manager.backward(loss * (float("inf") if step == 1 else 1.0))
            manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
        results.append([p.detach() for p in params])
        assert manager.skipped_steps == 1
    assert same(*results)


@pytest.mark.parametrize(
    ("dtype", "kinds", "is_compact", "is_model_first", "is_new", "is_portable"),
    pairwise(
        [torch.float32, torch.bfloat16],
        [(Offload, Offload), (AdamOptimizer, Offload), (Offload, AdamOptimizer)],
        itertools.product([False, True], repeat=2),
        *3 * [[False, True]],
    ),
)
def test_states_of_each_kind_resume_with_each_kind(
    dtype: torch.dtype,
    kinds: tuple[Any, Any],
    is_compact: tuple[bool, bool],
    is_model_first: bool,
    is_new: bool,
    is_portable: bool,
) -> None:
    (before, after), first = kinds, parameters(dtype)
    optimizer = before(first, lr=0.01, compact_master=is_compact[0])
    train(range(4), optimizer)
    portable = [copy.deepcopy(optimizer.portable_state(p)) for p in first]
    file = io.BytesIO()
    torch.save(([p.detach() for p in first], optimizer.state_dict()), file)
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    second = parameters(dtype, seed=1)
    resumed = after(second, lr=0.5, compact_master=is_compact[1])
    if not is_new:
        train([9], resumed)
    for load_model in (is_model_first, not is_model_first):
        if load_model:
            with torch.no_grad():
                for p, value in zip(second, values, strict=True):
                    p.copy_(value)
        elif is_portable:
            kept = [dict(resumed.state[p]) for p in second]
            for group, saved in zip(resumed.param_groups, optimizer.param_groups, strict=True):
                group["lr"] = saved["lr"]
            for p, its_state, old in zip(second, portable, kept, strict=True):
                resumed.load_portable_state(p, its_state)
                # No second copy is in memory.
                assert is_new or resumed.state[p]["exp_avg"] is old["exp_avg"]
        else:
            resumed.load_state_dict(state)
    assert states_are_same(optimizer, resumed)
    for step in range(4, 7):
        train([step], optimizer, resumed)
        assert states_are_same(optimizer, resumed)


def test_loaded_states_are_copies_and_an_emptied_state_begins_anew() -> None:
    params, twins = parameters(), parameters()
    optimizer = Offload(params, lr=0.1)
    train([0], optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    train([1], optimizer)
    assert all(
        torch.equal(state["state"][i]["exp_avg"], kept["state"][i]["exp_avg"])
        for i in state["state"]
    )
    fresh = Offload(twins, lr=0.1)
    for p, twin in zip(params, twins, strict=True):
        twin.data.copy_(p.data)
        optimizer.load_portable_state(p, {})
    train((2, 3), optimizer, fresh)
    assert same(params, twins)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]
)
def test_copies_and_pickles_go_on_by_themselves(copied: Any) -> None:
    params = parameters(torch.bfloat16)
    optimizer = Offload(params, lr=0.01, record_delta=True)
    train(range(2), optimizer)
    other = copied(optimizer)
    twins = other.param_groups[0]["params"]
    for step in range(2, 4):
        for ps, o in ((params, optimizer), (twins, other)):
            give_gradients(ps, step)
            o.step()
    assert other.record_delta and same(params, twins) and states_are_same(optimizer, other)


def test_a_parameter_that_moved_takes_its_state_along() -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    offloaded, adam = Offload(ours, lr=0.01), AdamOptimizer(theirs, lr=0.01)
    for step in range(6):
        if step == 2:
            for ps in (ours, theirs):
                ps[0].data = ps[0].data.clone()
        if step == 4:
            for ps in (ours, theirs):
                ps[1].data = ps[1].data.float()
        train([step], offloaded, adam)
    assert same(ours, theirs)


def test_groups_that_come_later_are_stepped_too() -> None:
    params = parameters()
    optimizer = Offload(params[:2], lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": params[2:], "lr": 0.2})
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(params, before, strict=True) if p.numel())


def test_on_the_cpu_states_are_those_of_adam_and_no_thread_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(work: Any) -> Any:
        raise AssertionError("there is nothing to do for a thread")

    monkeypatch.setattr(worker, "submit", refuse)
    params = parameters(torch.bfloat16)
    optimizer = create("adam_offload", params, lr=0.1)
    train([0], optimizer)
    assert type(optimizer) is AdamOffloadOptimizer
    assert all(
        state["exp_avg"].untyped_storage().nbytes() == 4 * p.numel()
        for p, state in optimizer.state.items()
    )


def test_deltas_have_to_be_asked_for() -> None:
    optimizer = AdamOffloadOptimizer(parameters(torch.bfloat16))
    with pytest.raises(ValueError, match="record_delta=True"):
        optimizer.get_avg_delta()


@pytest.mark.parametrize("kind", [Offload, AdamOffloadOptimizer])
def test_deltas_count_half_parameters_of_the_last_step_only(kind: Any) -> None:
    half, wide = (
        torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.ones(9)),
    )
    optimizer = kind([half, wide], lr=0.01, weight_decay=0.5, record_delta=True)
    for signs in ([1.0, -1.0, 1.0, 1.0], [0.0] * 4):
        optimizer.load_state_dict(
            {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        )
        half.data.fill_(1.0)
        half.grad, wide.grad = torch.tensor(signs).bfloat16(), torch.ones(9)
        optimizer.step()
        expected = torch.tensor(signs) + 0.5  # in the first step Adam moves by the sign
        assert optimizer.get_avg_delta() == pytest.approx(expected.mean().item(), abs=1e-6)
        assert optimizer.get_var_delta() == pytest.approx(
            expected.var(correction=0).item(), abs=1e-6
        )


def test_the_worker_is_one_thread_that_uses_the_threads_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(worker, "_executors", [])
    monkeypatch.setenv(worker.VARIABLE, "3")
    assert worker.submit(torch.get_num_threads).result() == 3
    names = {worker.submit(lambda: threading.current_thread().name).result() for _ in range(3)}
    assert len(names) == 1
    assert torch.get_num_threads() == before
    monkeypatch.delenv(worker.VARIABLE)
    assert worker.number_of_threads() >= 1


def test_host_memory_of_a_device_is_locked_to_the_byte_and_outlives_its_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        locked_memory,
        "_lock",
        lambda memory, device: locked.append((memory.data_ptr(), memory.nbytes)),
    )
    monkeypatch.setattr(
        locked_memory,
        "_unlock",
        lambda memory, device: locked.remove((memory.data_ptr(), memory.nbytes)),
    )
    memory = HostMemory(
        [(300_001, torch.float32), (1 << 20, torch.bfloat16)], torch.device("cuda", 0)
    )
    tensors = memory.tensors
    assert locked == [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    for tensor in tensors:
        # Who asks whether memory is locked asks for where its storage begins; who saves it saves
        # its storage.
        storage = tensor.untyped_storage()
        assert (storage.data_ptr(), storage.nbytes()) == (tensor.data_ptr(), tensor.nbytes)
        assert tensor.data_ptr() % mmap.PAGESIZE == 0 and not tensor.any()
    del memory
    assert not locked
    assert all(bool((tensor.fill_(2) == 2).all()) for tensor in tensors)


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5"])
def test_a_number_of_threads_that_is_none_is_an_error_that_says_so_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setattr(worker, "_executors", [])
    monkeypatch.setenv(worker.VARIABLE, given)
    params = parameters()
    optimizer = Offload(params)
    give_gradients(params, 0)
    with pytest.raises(
        ConfigError,
        match=f"BMT_OFFLOAD_THREADS must be a number of threads, 1 or more, not '{given}'",
    ):
        optimizer.step()
    with pytest.raises(RuntimeError, match="BMT_OFFLOAD_THREADS"):
        optimizer.wait()


def test_host_memory_is_cleared_and_its_pieces_are_apart() -> None:
    pieces = [(0, torch.float32), (3, torch.bfloat16), (1000, torch.float32), (1, torch.int16)]
    tensors = HostMemory(pieces, CPU).tensors
    assert [(t.numel(), t.dtype) for t in tensors] == pieces
    for number, tensor in enumerate(tensors):
        assert not tensor.any() and tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(tensors))
