"""Measures how fast ranks communicate: each operation is warmed up, then timed at several sizes.

For n ranks and a buffer of S bytes that takes t seconds, the algorithm bandwidth is S/t. The bus
bandwidth is the rate of each rank's link, which can be compared with the hardware's for any n
(NVIDIA, nccl-tests, doc/PERFORMANCE.md):

- all_gather and reduce_scatter: S/t · (n − 1)/n, where S is the *whole* buffer, n times a
  rank's part;
- send_recv: S/t, where S is what each sender sends.

t is the time of the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bmt_core.comm.protocols import Group, Work
from bmt_core.errors import ConfigError
from bmt_core.run import runtime

MIN_BYTES = 4 * 1024
MAX_BYTES = {"cpu": 64 * 1024**2, "cuda": 1024**3}
_GROWTH = 4  # from one size to the next
_DTYPE = torch.float32  # every backend reduces it natively
_WARM_UP = 2
# A short call is repeated more often, so that reading the clock and starting the first call
# hardly count.
_CALLS_BELOW = ((1024**2, 20), (32 * 1024**2, 8))
_CALLS_ABOVE = 3


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The time of one operation at one size. ``bytes`` is S of the module's formulas, ``seconds``
    t. Bandwidths: bytes/second.
    """

    operation: str
    ranks: int
    bytes: int
    seconds: float
    bus_factor: float

    @property
    def algorithm_bandwidth(self) -> float:
        """S/t."""
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """S/t times the operation's factor.

        >>> what = {"operation": "all_gather", "ranks": 4, "bus_factor": 3 / 4}
        >>> Measurement(**what, bytes=4000, seconds=2.0).bus_bandwidth
        1500.0
        """
        return self.algorithm_bandwidth * self.bus_factor


def all_gather(*, max_bytes: int | None = None, group: Group | None = None) -> list[Measurement]:
    """Measure all_gather over ``group`` (by default the world) for sizes up to ``max_bytes``.
    Collective; rank 0 prints.
    """
    return _sweep("all_gather", max_bytes, group)


def reduce_scatter(
    *, max_bytes: int | None = None, group: Group | None = None
) -> list[Measurement]:
    """Measure reduce_scatter (sum) like :func:`all_gather`."""
    return _sweep("reduce_scatter", max_bytes, group)


def send_recv(*, max_bytes: int | None = None, group: Group | None = None) -> list[Measurement]:
    """Measure rank 2i sending to rank 2i + 1, all pairs at once. With an odd number of ranks the
    last one takes no part.

    Raises ConfigError in a group of one rank.
    """
    return _sweep("send_recv", max_bytes, group)


OPERATIONS: dict[str, Callable[..., list[Measurement]]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "send_recv": send_recv,
}


def sizes_up_to(max_bytes: int, unit: int) -> list[int]:
    """Return the sizes of a sweep: multiples of ``unit`` that grow by the same factor; the last is
    the largest that fits.

    >>> sizes_up_to(100_000, 8)
    [4096, 16384, 65536, 100000]
    >>> sizes_up_to(100, 24)
    [96]
    """
    if max_bytes < unit:
        raise ConfigError(
            f"max_bytes must be at least {unit}: one element for each rank. It is {max_bytes}."
        )
    sizes = {max_bytes // unit * unit}
    size = MIN_BYTES
    while size < max_bytes:
        if size >= unit:
            sizes.add(size // unit * unit)
        size *= _GROWTH
    return sorted(sizes)


def format_measurements(measurements: Sequence[Measurement]) -> str:
    """Return a table of one operation as text: bytes, microseconds, and gigabytes (10⁹) per second.

    >>> row = Measurement(operation="send_recv", ranks=2, bytes=4096, seconds=1e-5, bus_factor=1.0)
    >>> print(format_measurements([row]))
    send_recv on 2 ranks
             bytes        time us     algo GB/s      bus GB/s
              4096           10.0         0.410         0.410
    """
    first = measurements[0]
    lines = [
        f"{first.operation} on {first.ranks} rank{'s' if first.ranks > 1 else ''}",
        f"{'bytes':>14} {'time us':>14} {'algo GB/s':>13} {'bus GB/s':>13}",
    ]
    for row in measurements:
        algorithm, bus = row.algorithm_bandwidth / 1e9, row.bus_bandwidth / 1e9
        lines.append(f"{row.bytes:>14} {row.seconds * 1e6:>14.1f} {algorithm:>13.3f} {bus:>13.3f}")
    return "\n".join(lines)


def _sweep(operation: str, max_bytes: int | None, group: Group | None) -> list[Measurement]:
    current = runtime.current()
    group = current.world if group is None else group
    if operation == "send_recv" and group.size == 1:
        raise ConfigError(
            "send_recv needs a second rank, and this group has one. Start more ranks,"
            " with torchrun."
        )
    if max_bytes is None:
        max_bytes = MAX_BYTES[current.device.type]
    rows = [
        _measure(operation, size, group, current.device)
        for size in sizes_up_to(max_bytes, group.size * _DTYPE.itemsize)
    ]
    if current.rank == 0:
        print(format_measurements(rows), flush=True)
    return rows


def _measure(operation: str, size: int, group: Group, device: torch.device) -> Measurement:
    call, bus_factor = _prepare(operation, size, group, device)
    calls = next((count for limit, count in _CALLS_BELOW if size <= limit), _CALLS_ABOVE)
    for _ in range(_WARM_UP):
        call()
    _synchronize(group, device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = torch.tensor(
        [(time.perf_counter() - start) / calls], dtype=torch.float64, device=device
    )
    group.all_reduce(elapsed, "max").wait()
    return Measurement(
        operation=operation,
        ranks=group.size,
        bytes=size,
        seconds=float(elapsed),
        bus_factor=bus_factor,
    )


def _prepare(
    operation: str, size: int, group: Group, device: torch.device
) -> tuple[Callable[[], None], float]:
    """Return the call to time, on buffers that are made once, and the factor from algorithm to
    bus bandwidth.
    """
    whole = torch.zeros(size // _DTYPE.itemsize, dtype=_DTYPE, device=device)
    part = torch.zeros(whole.numel() // group.size, dtype=_DTYPE, device=device)

    def start() -> Work | None:
        if operation == "all_gather":
            return group.all_gather(whole, part)
        if operation == "reduce_scatter":
            return group.reduce_scatter(part, whole)
        if group.rank % 2:
            return group.recv(whole, group.rank - 1)
        return group.send(whole, group.rank + 1) if group.rank + 1 < group.size else None

    def call() -> None:
        work = start()
        if work is not None:
            work.wait()

    return call, 1.0 if operation == "send_recv" else (group.size - 1) / group.size


def _synchronize(group: Group, device: torch.device) -> None:
    """Wait until all ranks of ``group`` are here, so that their clocks start together."""
    group.all_reduce(torch.zeros(1, device=device)).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
