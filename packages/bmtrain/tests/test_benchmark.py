from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmt_core.comm import Group, SingleGroup, Work
from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmtrain import _benchmark as benchmark
from bmtrain._benchmark import Measurement, sizes_up_to


class CountingGroup(Group):
    """A group that hands every call on and counts the bytes of each size."""

    def __init__(self, inner: Group) -> None:
        self.inner, self.ranks, self.rank = inner, inner.ranks, inner.rank
        self.calls: list[tuple[str, int]] = []

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        self.calls.append(("all_gather", output.nbytes))
        return self.inner.all_gather(output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str = "sum") -> Work:
        self.calls.append(("reduce_scatter", input.nbytes))
        return self.inner.reduce_scatter(output, input)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Work:
        return self.inner.all_reduce(tensor, "max")

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Work:
        raise NotImplementedError

    def send(self, tensor: torch.Tensor, dst: int) -> Work:
        self.calls.append((f"send to {dst}", tensor.nbytes))
        return self.inner.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> Work:
        self.calls.append((f"recv from {src}", tensor.nbytes))
        return self.inner.recv(tensor, src)


def sweep(
    operation: Callable[..., list[Measurement]], max_bytes: int
) -> tuple[list[Measurement], list[tuple[str, int]]]:
    group = CountingGroup(runtime.current().world)
    measurements = operation(max_bytes=max_bytes, group=group)
    return measurements, sorted(set(group.calls))


@pytest.mark.parametrize(
    ("operation", "factor"),
    [(benchmark.all_gather, 2 / 3), (benchmark.reduce_scatter, 2 / 3), (benchmark.send_recv, 1.0)],
)
def test_every_size_is_moved_and_measured_alike_on_all_ranks(
    operation: Callable[..., list[Measurement]], factor: float
) -> None:
    assert benchmark.OPERATIONS[operation.__name__] is operation
    results = run_ranks(sweep, 3, operation, 100_000)
    sizes = [4092, 16380, 65532, 99996]  # multiples of 3 ranks x 4 bytes
    for measurements, _ in results:
        assert [row.bytes for row in measurements] == sizes
        assert measurements == results[0][0], "the time is that of the slowest rank, on every rank"
        for row in measurements:
            assert row.seconds > 0
            assert row.bus_bandwidth == pytest.approx(row.bytes / row.seconds * factor)
    names = (
        [operation.__name__] * 3
        if operation is not benchmark.send_recv
        else ["send to 1", "recv from 0", None]
    )
    for (_, calls), name in zip(results, names, strict=True):
        assert calls == ([] if name is None else [(name, size) for size in sizes])


def test_rank_0_alone_prints(capfd: pytest.CaptureFixture[str]) -> None:
    runtime.init_distributed(device="cpu")
    try:
        benchmark.all_gather(max_bytes=4096)
    finally:
        runtime.shutdown()
    assert "all_gather on 1 rank\n" in capfd.readouterr().out


def test_send_recv_on_one_rank_is_refused() -> None:
    runtime.init_distributed(device="cpu")
    try:
        with pytest.raises(ConfigError, match="second rank"):
            benchmark.send_recv(group=SingleGroup(0))
    finally:
        runtime.shutdown()


@pytest.mark.parametrize("operation", benchmark.OPERATIONS)
def test_use_before_init_says_what_to_call(operation: str) -> None:
    with pytest.raises(RuntimeError, match=r"init_distributed\(\)"):
        benchmark.OPERATIONS[operation]()


@given(st.integers(1, 2**31), st.integers(1, 4096))
def test_sizes_are_sorted_multiples_up_to_the_limit(max_bytes: int, unit: int) -> None:
    if max_bytes < unit:
        with pytest.raises(ConfigError, match="at least"):
            sizes_up_to(max_bytes, unit)
        return
    sizes = sizes_up_to(max_bytes, unit)
    assert sizes == sorted(set(sizes))
    assert all(size > 0 and size % unit == 0 for size in sizes)
    assert max_bytes - unit < sizes[-1] <= max_bytes
