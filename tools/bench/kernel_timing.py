"""Cases of the kernel benchmark that take turns, so that what else the machine does meets all
of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

COPY = "copy of memory"
# More than the caches of a GPU hold, so that no case finds there what the one before has left. It
# is read: what was written would be written back while the case runs.
_FLUSH_BYTES = 1 << 28
# Cycles that a GPU is kept busy for, while the host launches what is timed.
_HEAD_START = 2_000_000


@dataclass(frozen=True)
class Case:
    """Something to time. ``moved``: bytes that it must read and write, 0 if that is not
    the point.
    """

    name: str
    run: Callable[[], object]
    moved: int = 0
    is_peer: bool = False
    """Whether the others are compared with this one; the first such case of the list counts."""


@dataclass(frozen=True)
class Result:
    """What was found: the median, the quickest, and what they are beside those of the copy and of
    the peer.
    """

    name: str
    seconds: float
    quickest: float
    moved: int
    of_copy: float | None
    """This one's bandwidth over the copy's."""
    of_peer: float | None
    """The peer's time over this one's: above 1 is faster."""
    quickest_of_peer: float | None
    peer: str
    extra_bytes: int | None
    """Memory beyond what the case was given, at its highest; None on the CPU."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.moved / self.seconds

    def as_record(self) -> dict[str, Any]:
        """The figures, for a file."""
        return {**asdict(self), "bandwidth": self.bandwidth}


def copy_case(device: torch.device, elements: int, dtype: torch.dtype = torch.float32) -> Case:
    """Return the copy of ``elements`` to compare with: what the memory gives to whoever
    only moves.
    """
    source = torch.ones(elements, dtype=dtype, device=device)
    target = torch.zeros_like(source)
    return Case(COPY, lambda: target.copy_(source), moved=2 * source.nbytes)


def measure(cases: Sequence[Case], device: torch.device, rounds: int) -> list[Result]:
    """Time the cases ``rounds`` times, in turns, after two rounds that do not count."""
    timer = _time_on_gpu if device.type == "cuda" else _time_on_cpu
    extra = [_extra_bytes(case, device) for case in cases]
    for case in cases:
        timer(case.run, device)
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, seconds in zip(cases, times, strict=True):
            seconds.append(timer(case.run, device))
    medians = [statistics.median(seconds) for seconds in times]
    quickest = [min(seconds) for seconds in times]
    copy = next((c.moved / m for c, m in zip(cases, medians, strict=True) if c.name == COPY), None)
    peer = next((i for i, case in enumerate(cases) if case.is_peer), None)
    return [
        Result(
            name=case.name,
            seconds=median,
            quickest=best,
            moved=case.moved,
            of_copy=case.moved / median / copy if copy else None,
            of_peer=None if peer is None or case.name == COPY else medians[peer] / median,
            quickest_of_peer=None if peer is None or case.name == COPY else quickest[peer] / best,
            peer="" if peer is None else cases[peer].name,
            extra_bytes=bytes_,
        )
        for case, median, best, bytes_ in zip(cases, medians, quickest, extra, strict=True)
    ]


def _extra_bytes(case: Case, device: torch.device) -> int | None:
    if device.type != "cuda":
        case.run()
        return None
    case.run()  # what is allocated once (workspaces, compiled code) does not count
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    case.run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _time_on_cpu(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _time_on_gpu(run: Callable[[], object], device: torch.device) -> float:
    flushed = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    flushed.amax()
    torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3
