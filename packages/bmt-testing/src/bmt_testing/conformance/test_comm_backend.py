"""The rules for a communication backend: each test is one, on the CPU and on GPUs.

Values are small whole numbers, so that every order of a sum gives the same in every type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bmt_core.comm.observer import RunObserver
from bmt_core.comm.protocols import REDUCE_OPS, Group
from bmt_core.run.runtime import current
from bmt_testing.conformance.offer import Offer
from bmt_testing.decorator import on_ranks
from bmt_testing.gpus import gpu_ranks
from bmt_testing.pool import rank_pool

RANKS = 3
SIZES = (1, 3, 8, 129)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
TIMEOUT = 10.0  # of an operation that waits for a rank that has failed
GRACE = 5.0  # for the other ranks, when one has found a wrong result


def _run_settings(
    world_size: int, backend: Offer, timeout: float = 60.0, check_calls: bool | None = None
) -> dict[str, Any]:
    return backend.run_settings(comm_backend=backend.name, timeout=timeout, check_calls=check_calls)


_on_three_ranks = on_ranks(RANKS, init=_run_settings, grace=GRACE)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu(RANKS))])
def backend(offer: Offer, request: pytest.FixtureRequest) -> Offer:
    """The backend under test on one kind of device, skipped where it is for the other one. One that
    was asked for and starts on neither is not skipped: its tests fail.
    """
    on_device = replace(offer, device=request.param)
    other = "cpu" if request.param == "cuda" else "cuda"
    refusal = _refusal(on_device)
    if refusal:
        is_asked = bool(request.config.getoption("bmt_comm_backend"))
        can_try_other = other == "cpu" or gpu_ranks() >= RANKS
        starts_on_other = can_try_other and not _refusal(replace(offer, device=other))
        if starts_on_other or not is_asked:
            pytest.skip(f"it does not start on {request.param}: {refusal}")
    return on_device


def _refusal(backend: Offer) -> str:
    """Return why the backend does not start on its device, empty if it does."""
    outcomes = rank_pool(RANKS).outcomes(_nothing, init=_run_settings(RANKS, backend), grace=GRACE)
    refusals = [each.error_message for each in outcomes if each.error_type == "ConfigError"]
    return refusals[0] if refusals else ""


@_on_three_ranks
def test_all_gather_fills_the_output_in_the_order_of_ranks(backend: Offer) -> None:
    group = _world()
    for dtype, size in _cases((*FLOATS, *OTHERS)):
        expected = torch.cat(_inputs(group, size, dtype))
        own, output = _inputs(group, size, dtype)[group.rank], torch.zeros_like(expected)
        group.all_gather(output, own).wait()
        assert torch.equal(output, expected), (dtype, size)
        in_place = torch.zeros_like(expected)
        part = in_place[group.rank * size :][:size].copy_(own)
        group.all_gather(in_place, part).wait()
        assert torch.equal(in_place, expected), (dtype, size, "in place")


@_on_three_ranks
def test_reduce_scatter_leaves_each_rank_its_slice(backend: Offer) -> None:
    group = _world()
    for dtype, size in _cases(FLOATS):
        inputs = _inputs(group, size * group.size, dtype)
        for op in REDUCE_OPS:
            output = torch.zeros(size, dtype=dtype)
            group.reduce_scatter(output, inputs[group.rank].clone(), op).wait()
            expected = _reduced(inputs, op)[group.rank * size :][:size]
            _check_reduced(output, expected, op)


@_on_three_ranks
def test_reduce_scatter_of_halves_into_float32_adds_in_float32(backend: Offer) -> None:
    group = _world()
    for dtype, size in _cases((torch.bfloat16, torch.float16)):
        # In a half type the ones would be lost beside 4096.
        inputs = [torch.full((size * group.size,), value).to(dtype) for value in (4096, 1, 1)]
        output = torch.zeros(size)
        group.reduce_scatter(output, inputs[group.rank]).wait()
        assert output.tolist() == [4098.0] * size, (dtype, size)


@_on_three_ranks
def test_all_reduce_leaves_the_same_on_every_rank(backend: Offer) -> None:
    group = _world()
    for dtype, size in _cases(FLOATS):
        inputs = _inputs(group, size, dtype)
        for op in REDUCE_OPS:
            tensor = inputs[group.rank].clone()
            group.all_reduce(tensor, op).wait()
            _check_reduced(tensor, _reduced(inputs, op), op)
    flag = torch.tensor([group.rank == 1], dtype=torch.uint8)  # as of an overflow
    group.all_reduce(flag, "max").wait()
    count = torch.tensor(2**40 + group.rank)
    group.all_reduce(count).wait()
    assert flag.item() == 1 and count.item() == 3 * 2**40 + 3


@_on_three_ranks
def test_broadcast_copies_from_each_root(backend: Offer) -> None:
    group = _world()
    for dtype, size in _cases((*FLOATS, *OTHERS)):
        inputs = _inputs(group, size, dtype)
        for root in range(group.size):
            tensor = inputs[group.rank].clone()
            group.broadcast(tensor, root).wait()
            assert torch.equal(tensor, inputs[root]), (dtype, size, root)


@_on_three_ranks
def test_receives_get_what_was_sent_in_its_order(backend: Offer) -> None:
    group = _world()
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for dtype, size in _cases((*FLOATS, *OTHERS)):
        first = _inputs(group, size, dtype)
        second = [value.flip(0).add(1).to(dtype) for value in first]
        found = [torch.zeros_like(first[0]), torch.zeros_like(first[0])]

        def send(values: list[torch.Tensor]) -> None:
            group.send(values[group.rank], after).wait()

        # Rank 0 begins: a backend may run operations in the order of their start.
        if group.rank == 0:
            send(first)
            send(second)
        for work in [group.recv(tensor, before) for tensor in found]:
            work.wait()
        if group.rank != 0:
            send(first)
            send(second)
        assert torch.equal(found[0], first[before]), (dtype, size)
        assert torch.equal(found[1], second[before]), (dtype, size)
    number = torch.tensor(2**40 + 1 if group.rank == 0 else 0)
    if group.rank < 2:
        (group.send(number, 1) if group.rank == 0 else group.recv(number, 0)).wait()
        assert number.item() == 2**40 + 1


@_on_three_ranks
def test_an_exchange_with_several_ranks_does_not_block(backend: Offer) -> None:
    group = _world()
    peers = [(group.rank + 1) % group.size, (group.rank - 1) % group.size]
    for size in (3, 2**18 + 1):  # more than a socket takes before it is read
        inputs = _inputs(group, size, torch.float32)
        found = [torch.zeros(size) for _ in peers]
        sends = [(inputs[group.rank], peer) for peer in peers]
        group.exchange(sends, list(zip(found, peers, strict=True))).wait()
        for tensor, peer in zip(found, peers, strict=True):
            assert torch.equal(tensor, inputs[peer]), (size, peer)
        found = [torch.zeros(size) for _ in group.ranks]
        group.all_to_all(found, [inputs[group.rank] * peer for peer in range(group.size)]).wait()
        for peer, tensor in enumerate(found):
            assert torch.equal(tensor, inputs[peer] * group.rank), (size, peer)


@_on_three_ranks
def test_tensors_may_be_slices_of_bigger_ones(backend: Offer) -> None:
    group, size = _world(), 5
    for dtype in FLOATS:
        inputs = _inputs(group, size * group.size, dtype)
        total = _reduced(inputs, "sum")
        shorts = [value[:size] for value in inputs]
        own = slice(group.rank * size, (group.rank + 1) * size)
        cases: list[tuple[str, torch.Tensor, Callable[[torch.Tensor], object]]] = [
            ("all_reduce", total, lambda t: group.all_reduce(t).wait()),
            ("broadcast", inputs[1], lambda t: group.broadcast(t, 1).wait()),
        ]
        for name, expected, run in cases:
            tensor, around = _inside(inputs[group.rank])
            run(tensor)
            _check_inside(tensor, around, expected, name)
        tensor, around = _inside(torch.zeros_like(total))
        part, around_part = _inside(shorts[group.rank])
        group.all_gather(tensor, part).wait()
        _check_inside(tensor, around, torch.cat(shorts), "all_gather")
        _check_inside(part, around_part, shorts[group.rank], "input of all_gather")
        tensor, around = _inside(inputs[group.rank])
        part, around_part = _inside(torch.zeros_like(shorts[0]))
        group.reduce_scatter(part, tensor).wait()
        _check_inside(part, around_part, total[own], "reduce_scatter")
        _check_inside(tensor, around, inputs[group.rank], "input of reduce_scatter")


@_on_three_ranks
def test_groups_of_some_ranks_work_beside_each_other(backend: Offer) -> None:
    world = _world()
    # Rank 0 makes a group that rank 2 knows nothing of before theirs, and rank 1 makes none later.
    for ranks in ((0, 1), (0, 2)):
        if world.rank not in ranks:
            continue
        group = current().backend.new_group(ranks, f"conformance {ranks}")
        assert group.ranks == ranks and group.size == 2
        assert group.ranks[group.rank] == world.rank
        tensor = torch.tensor([2.0 * world.rank])
        group.all_reduce(tensor, "avg").wait()
        assert tensor.item() == sum(ranks)
        tensor = torch.tensor([float(world.rank)])
        group.broadcast(tensor, 1).wait()
        assert tensor.item() == ranks[1]
        output = torch.zeros(2)
        group.all_gather(output, torch.tensor([float(world.rank)])).wait()
        assert output.tolist() == [float(rank) for rank in ranks]
        found = torch.zeros(1)
        peer = 1 - group.rank
        group.exchange([(torch.full((1,), float(world.rank)), peer)], [(found, peer)]).wait()
        assert found.item() == ranks[peer]
    total = torch.ones(1)
    world.all_reduce(total).wait()
    assert total.item() == world.size


@_on_three_ranks
def test_operations_may_be_waited_for_in_any_order(backend: Offer) -> None:
    group = _world()
    tensors = [torch.full((7,), float(number + group.rank)) for number in range(4)]
    outputs = [torch.zeros(7 * group.size) for _ in tensors]
    own = [tensor.clone() for tensor in tensors]
    works = [group.all_reduce(tensor) for tensor in tensors]
    works += [group.all_gather(*pair) for pair in zip(outputs, own, strict=True)]
    for work in reversed(works):
        work.wait()
    for number, (tensor, output) in enumerate(zip(tensors, outputs, strict=True)):
        assert tensor.tolist() == [3.0 * number + 3] * 7
        assert output.view(group.size, 7)[:, 0].tolist() == [
            number + 0.0,
            number + 1.0,
            number + 2.0,
        ]


@_on_three_ranks
def test_tensors_may_be_on_the_cpu(backend: Offer) -> None:
    group = _world()
    for dtype, size in _cases((torch.float32, torch.int64)):
        inputs = [value.cpu() for value in _inputs(group, size, dtype)]
        own = inputs[group.rank]
        total, first, output = own.clone(), own.clone(), torch.cat(inputs).zero_()
        group.all_reduce(total).wait()
        group.broadcast(first, 0).wait()
        group.all_gather(output, own).wait()
        assert torch.equal(total, _reduced(inputs, "sum")), (dtype, size)
        assert torch.equal(first, inputs[0]), (dtype, size)
        assert torch.equal(output, torch.cat(inputs)), (dtype, size)
        found = torch.zeros_like(own)
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.exchange([(own, after)], [(found, before)]).wait()
        assert torch.equal(found, inputs[before]), (dtype, size)


@on_ranks(1, init=_run_settings)
def test_a_run_of_one_rank_starts(backend: Offer) -> None:
    group = _world()
    tensor, output = torch.tensor([3.0]), torch.zeros(1)
    group.all_reduce(tensor).wait()
    group.all_gather(output, tensor).wait()
    assert (tensor.item(), output.item(), group.size) == (3.0, 3.0, 1)


def test_a_failure_of_one_rank_reaches_all(backend: Offer) -> None:
    on_gpu = backend.device == "cuda"
    outcomes = rank_pool(2).outcomes(
        _wait_for_rank_1,
        # On the CPU what the backend itself makes of it: bmt-watch would end the run. On a GPU it
        # must, because torch's watchdog kills the process.
        init=_run_settings(2, backend, timeout=TIMEOUT, check_calls=None if on_gpu else False),
        grace=2 * TIMEOUT,
    )
    types = [outcome.error_type for outcome in outcomes]
    assert types[1] == "ZeroDivisionError"
    assert types[0] is not None, "rank 0 goes on as if rank 1 had answered"
    assert types[0] not in ("Hung", "Died"), outcomes[0].error_message


def _wait_for_rank_1() -> None:
    group = _world()
    tensor = torch.ones(1)
    for step in range(2):
        if group.rank == 1 and step == 1:
            raise ZeroDivisionError("a failure of this rank")
        group.all_reduce(tensor).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize()


def test_ranks_that_wait_for_each_other_in_different_calls_are_named(backend: Offer) -> None:
    """Also if the backend knows nothing of observers: see ``is_interruptible`` of Group."""
    init = _run_settings(2, backend)
    outcomes = rank_pool(2).outcomes(_different_calls, init=init, timeout=30)
    for rank, outcome in enumerate(outcomes):
        if outcome.value == "unobserved":
            pytest.skip("bmt-watch is not installed")
        # On a GPU the backend may raise it in a class of its own.
        assert outcome.error_message is not None, rank
        assert "Ranks wait for each other in different calls: rank " in outcome.error_message
        assert "which rank 1 has not entered" in outcome.error_message


def _different_calls() -> str:
    group = _world()
    if type(current().observer) is RunObserver:
        return "unobserved"
    if group.rank == 1:
        group = current().lanes.reduce.group(group)
    group.all_reduce(torch.ones(1)).wait()
    return "none waits"


def _nothing() -> None:
    pass


def _world() -> Group:
    """Return the group of all ranks. New tensors are on its device from now on."""
    torch.set_default_device(current().device)
    return current().world


def _cases(dtypes: Sequence[torch.dtype]) -> list[tuple[torch.dtype, int]]:
    return [(dtype, size) for dtype in dtypes for size in SIZES]


def _inputs(group: Group, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what each rank passes: numbers from -5 to 4, or 0 and 1 of types without a sign."""
    made = []
    for rank in range(group.size):
        generator = torch.Generator("cpu").manual_seed(rank)
        is_signed = dtype not in (torch.uint8, torch.bool)
        low, high = (-5, 5) if is_signed else (0, 2)
        numbers = torch.randint(low, high, (size,), generator=generator, device="cpu")
        made.append((numbers * (1j if dtype.is_complex else 1)).to(current().device, dtype))
    return made


def _reduced(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    stack = torch.stack(list(inputs)).double()
    functions = {
        "sum": stack.sum(0),
        "avg": stack.mean(0),
        "max": stack.amax(0),
        "min": stack.amin(0),
        "prod": stack.prod(0),
    }
    return functions[op].to(inputs[0].dtype)


def _check_reduced(found: torch.Tensor, expected: torch.Tensor, op: str) -> None:
    """Compare: a mean may be the sum of divided values, up to 5, each of them rounded."""
    rounding = 5 * torch.finfo(found.dtype).eps if op == "avg" else 0.0
    torch.testing.assert_close(
        found, expected, rtol=0, atol=rounding, msg=lambda text: f"{op} of {found.dtype}: {text}"
    )


def _inside(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of ``values`` inside a bigger tensor of sevens, and that tensor."""
    around = torch.full((values.numel() + 4,), 7.0, dtype=values.dtype)
    return around[3:-1].copy_(values), around


def _check_inside(
    tensor: torch.Tensor, around: torch.Tensor, expected: torch.Tensor, name: str
) -> None:
    assert torch.equal(tensor, expected), name
    assert around[:3].tolist() == [7.0] * 3, f"{name} wrote before the slice"
    assert around[-1].item() == 7.0, f"{name} wrote behind the slice"
