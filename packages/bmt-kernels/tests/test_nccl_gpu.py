"""The backend ``nccl-native`` on GPUs: every bit is that of torch's process group, and nobody hangs
when a rank leaves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bmt_core.comm import LazyGroup, TorchGroup, all_gather_object, broadcast_object
from bmt_core.comm.protocols import REDUCE_OPS, Group, ReduceOp
from bmt_core.run.runtime import current, synchronize
from bmt_kernels.nccl import NcclError, NcclGroup
from bmt_testing import RankPool, gpu_ranks, run_ranks

RANKS = 4 if gpu_ranks() >= 4 else 2
pytestmark = pytest.mark.gpu(2)
NATIVE: dict[str, Any] = {"device": "cuda", "comm_backend": "nccl-native"}
SIZES = (1, 7, 1000, 4099, 1 << 20)
ANY = (
    torch.float32,
    torch.bfloat16,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.complex64,
    torch.float8_e4m3fn,
)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
SHARES_GPUS = gpu_ranks() > torch.cuda.device_count()
# NCCL connects through sockets then, while other tests use the GPU.
TIMEOUT = 20.0 if SHARES_GPUS else 4.0


def groups() -> tuple[NcclGroup, TorchGroup]:
    """The world on our communicator, and on one of torch's in the same processes."""
    world = current().world
    native = world.connected() if isinstance(world, LazyGroup) else world
    assert isinstance(native, NcclGroup)
    process_group: Any = dist.new_group(list(native.ranks), backend="nccl")
    return native, TorchGroup(native.ranks, native.rank, process_group, process_group)


def values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that differ on every rank."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * current().rank + seed)
    if dtype.is_complex or dtype == torch.float64:
        return torch.randn(numel, dtype=dtype, device="cuda", generator=generator)
    if dtype.is_floating_point:
        return torch.randn(numel, device="cuda", generator=generator).to(dtype)
    high = 2 if dtype == torch.bool else 5
    return torch.randint(0, high, (numel,), device="cuda", generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def reductions() -> Iterator[tuple[torch.dtype, ReduceOp]]:
    for op in REDUCE_OPS:
        yield from ((dtype, op) for dtype in FLOATS)
        if op != "avg":
            yield from ((dtype, op) for dtype in INTEGERS)


def compare_gathers() -> None:
    native, other = groups()
    for numel in SIZES:
        for dtype in ANY:
            part = values(numel, dtype, numel)
            ours, theirs = (
                torch.zeros(native.size * numel, device="cuda").to(dtype) for _ in range(2)
            )
            native.all_gather(ours, part).wait()
            other.all_gather(theirs, part).wait()
            assert bits(ours).equal(bits(theirs)), (numel, dtype)
            assert bits(ours[native.rank * numel :][:numel]).equal(bits(part))
            in_place = torch.zeros_like(ours)
            own = in_place[native.rank * numel :][:numel]
            own.copy_(part)
            native.all_gather(in_place, own).wait()
            assert bits(in_place).equal(bits(ours)), (numel, dtype)
            for root in range(native.size):
                ours, theirs = part.clone(), part.clone()
                native.broadcast(ours, root).wait()
                other.broadcast(theirs, root).wait()
                assert bits(ours).equal(bits(theirs)), (numel, dtype, root)


def compare_reductions() -> None:
    native, other = groups()
    for numel in SIZES:
        for dtype, op in reductions():
            whole = values(native.size * numel, dtype, numel)
            ours, theirs = whole.clone(), whole.clone()
            native.all_reduce(ours, op).wait()
            other.all_reduce(theirs, op).wait()
            assert bits(ours).equal(bits(theirs)), ("all_reduce", numel, dtype, op)
            ours, theirs = (torch.zeros(numel, dtype=dtype, device="cuda") for _ in range(2))
            native.reduce_scatter(ours, whole, op).wait()
            other.reduce_scatter(theirs, whole, op).wait()
            assert bits(ours).equal(bits(theirs)), ("reduce_scatter", numel, dtype, op)
        for dtype in (torch.float16, torch.bfloat16):
            for op in ("sum", "avg"):
                whole = values(native.size * numel, dtype, numel)
                ours, theirs = (torch.zeros(numel, device="cuda") for _ in range(2))
                native.reduce_scatter(ours, whole, op).wait()  # type: ignore[arg-type]
                other.reduce_scatter(theirs, whole, op).wait()  # type: ignore[arg-type]
                assert bits(ours).equal(bits(theirs)), ("in float32", numel, dtype, op)
    for dtype, op in (
        (torch.bool, "sum"),
        (torch.bool, "prod"),
        (torch.complex64, "sum"),
        (torch.complex64, "avg"),
    ):
        ours = values(1000, dtype, 3)
        theirs = ours.clone()
        native.all_reduce(ours, op).wait()  # type: ignore[arg-type]
        other.all_reduce(theirs, op).wait()  # type: ignore[arg-type]
        assert bits(ours).equal(bits(theirs)), (dtype, op)


def point_to_point() -> None:
    native, other = groups()
    rank, size = native.rank, native.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    for numel in SIZES:
        mine = values(numel, torch.bfloat16, numel)
        ours, theirs = torch.zeros_like(mine), torch.zeros_like(mine)
        native.exchange([(mine, following)], [(ours, previous)]).wait()
        other.exchange([(mine, following)], [(theirs, previous)]).wait()
        assert bits(ours).equal(bits(theirs)) and not bits(ours).equal(bits(mine))
        if rank < 2:
            one = torch.full((numel,), float(rank), device="cuda")
            (native.send(one, 1) if rank == 0 else native.recv(one, 0)).wait()
            assert one.eq(0).all()
    on_host, on_device = torch.full((3,), float(rank)), torch.full((3,), float(rank), device="cuda")
    to_host, to_device = torch.zeros(3), torch.zeros(3, device="cuda")
    work = native.exchange(
        [(on_host, following), (on_device, following)], [(to_host, previous), (to_device, previous)]
    )
    work.wait()
    assert to_host.eq(previous).all() and to_device.eq(previous).all()


def host_and_twins() -> None:
    native = current().world
    assert all_gather_object(("rank", native.rank), native) == [
        ("rank", rank) for rank in range(native.size)
    ]
    assert broadcast_object(native.rank, native, 1) == 1
    x = torch.ones(5)
    native.all_reduce(x).wait()
    assert x.tolist() == [native.size] * 5
    handle = current().topology.twin(native, "gather")
    assert isinstance(handle, LazyGroup)
    twin = handle.connected()
    assert isinstance(twin, NcclGroup) and twin is not native
    # Two communicators on two streams, in other orders on the device than on the host.
    side = torch.cuda.Stream()
    first, second = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(1000):  # without waiting: more than any queue of launches holds
        native.all_reduce(first, "avg").wait()
        with torch.cuda.stream(side):
            twin.all_reduce(second, "max").wait()
    torch.cuda.synchronize()
    assert first.eq(1).all() and second.eq(1).all()
    synchronize()


def runs_on_the_current_stream() -> None:
    """What is computed before on a stream is sent, and what comes after on it sees the result."""
    native = current().world
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 16, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(native.rank + 1.0)
        native.all_reduce(x).wait()
        x.add_(1)
    stream.synchronize()
    assert x.eq(native.size * (native.size + 1) / 2 + 1).all()


def captured_in_a_graph() -> None:
    native = current().world
    x = torch.ones(1000, device="cuda")
    native.all_reduce(x).wait()
    torch.cuda.synchronize()
    x.fill_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.all_reduce(x).wait()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert x.eq(native.size**3).all()


@pytest.mark.parametrize(
    "function",
    [
        compare_gathers,
        compare_reductions,
        point_to_point,
        host_and_twins,
        runs_on_the_current_stream,
        captured_in_a_graph,
    ],
)
def test_every_collective_gives_what_torch_gives(function: Any) -> None:
    run_ranks(function, RANKS, init=NATIVE, timeout=120)


def sleeping_program() -> None:
    """Compute for longer than it may take, calling nothing of ours."""
    deadline = time.monotonic() + 5 * TIMEOUT
    while time.monotonic() < deadline:
        time.sleep(0.01)


def one_rank_leaves(how: str, are_connected: bool) -> tuple[float, str]:
    native: Group = current().world
    handle = current().topology.twin(native, "reduce")
    assert isinstance(handle, LazyGroup)
    twin = handle.connected()  # joined; its members are connected by NCCL's first operation
    x, y = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    for group in (native, twin) if are_connected else ():
        group.all_reduce(x).wait()
    torch.cuda.synchronize()
    if native.rank == 1:
        if how == "dies":
            os._exit(3)
        if how == "returns":
            return 0.0, ""
    began = time.monotonic()
    try:
        if native.rank == 1:
            sleeping_program()  # not in a collective: it must learn that others have failed
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            twin.all_reduce(y).wait()
        native.all_reduce(x).wait()
        torch.cuda.synchronize()
        sleeping_program()
    except NcclError as error:
        for group in (native, twin):
            with pytest.raises(NcclError):
                group.broadcast(x)
        torch.cuda.synchronize()  # nothing hangs on the device any more
        return time.monotonic() - began, str(error)
    return -1.0, "no error"


@pytest.mark.parametrize("are_connected", [True, False])
@pytest.mark.parametrize("how", ["returns", "dies", "sleeps"])
def test_when_a_rank_leaves_the_others_raise_within_the_timeout(
    how: str, are_connected: bool
) -> None:
    pool = RankPool(RANKS)  # of its own: processes end
    try:
        outcomes = pool.outcomes(
            one_rank_leaves,
            how,
            are_connected,
            # Whose error would come before NCCL's.
            init={**NATIVE, "timeout": TIMEOUT, "check_calls": False},
            timeout=10 * TIMEOUT,
            grace=8 * TIMEOUT,
        )
    finally:
        pool.close()
    for outcome in outcomes:
        if outcome.rank == 1 and how == "dies":
            assert outcome.error_type == "Died"
            continue
        assert not outcome.failed, outcome
        seconds, message = outcome.value
        if outcome.rank == 1 and how == "returns":
            continue
        assert 0 < seconds < TIMEOUT + 5, message
        members = f"({', '.join(map(str, range(RANKS)))})"
        assert (
            "all_reduce of 1000 float32 on rank " in message
            and f"in the group of ranks {members}" in message
        ), message
        reasons = [f"has not finished within {TIMEOUT:g} s"]
        if not are_connected:  # the attempt to connect finds out
            reasons += [
                f"could not begin within {TIMEOUT:g} s",
                "failed: remote process exited",
                "failed: unhandled",
            ]
        if SHARES_GPUS:  # a socket that closes tells NCCL
            reasons.append("failed: remote process exited")
        assert any(reason in message for reason in reasons), message
        if outcome.rank == 1:
            assert message.startswith("NCCL was aborted on rank 1, as rank ")


def trains_after_a_failure() -> float:
    x = torch.ones(10, device="cuda")
    current().world.all_reduce(x).wait()
    return float(x.sum())


def test_runs_follow_each_other_in_one_process() -> None:
    for _ in range(3):
        assert (
            run_ranks(trains_after_a_failure, RANKS, init=NATIVE, timeout=120)
            == [10.0 * RANKS] * RANKS
        )


def bad_argument() -> str:
    with pytest.raises(ValueError) as caught:
        current().world.all_gather(torch.zeros(5, device="cuda"), torch.zeros(5))
    return str(caught.value)


def test_mistakes_do_not_end_the_run() -> None:
    (said, *_) = run_ranks(bad_argument, RANKS, init=NATIVE, timeout=120)
    assert said == "all_gather: input is on cpu, and must be on cuda:0 (or all tensors on the CPU)."
