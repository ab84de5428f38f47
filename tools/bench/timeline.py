"""``timeline``: what the GPU did in one step of a chrome trace, and how much of its communication
nothing hid.

[Note: rows of the timeline]
*compute*: everything but communication on the stream that is busiest with it. *gather* and
*reduce*: NCCL kernels and copies between devices; *exchange*: kernels that send and receive, where
no range says what for. *to host* and *to device*: copies of an optimizer that offloads, and *host*:
its steps there. *other*: everything else on other streams (copies, sums, an optimizer that
overlaps). Communication is **exposed** where nothing of *compute* runs; where a gather and a
reduction are exposed at once, the moment counts for both, and once in the total. A collective's
kernel also runs while it waits for a slower rank.

A step begins where the compute of the step before it ends, and ends where its own compute ends, so
steps tile the time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.drawing import draw
from bench.intervals import Interval, clip, subtract, total

STEP_RANGE = "bench step "
"""Name of the profiler's range around a step, before its number."""
GATHER, REDUCE, EXCHANGE = "gather", "reduce", "exchange"
HOST = "host"
_COPIES = {"DtoH": "to host", "HtoD": "to device"}
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

TraceEvent = dict[str, Any]


@dataclass(frozen=True)
class Activity:
    """One piece of work on the GPU. Times are in microseconds; ``kind`` is None where it does
    not communicate.
    """

    start: float
    end: float
    stream: int
    step: int | None
    kind: str | None
    copy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on the GPU: see [Note: rows of the timeline]."""

    bounds: Interval
    compute: list[Interval]
    gather: list[Interval]
    reduce: list[Interval]
    other: list[Interval]
    exchange: list[Interval] = field(default_factory=list)
    offload: dict[str, list[Interval]] = field(default_factory=dict)

    def exposed(self, communication: Iterable[Interval]) -> list[Interval]:
        """Return where ``communication`` runs and compute does not."""
        return subtract(communication, self.compute)

    def milliseconds(self) -> dict[str, float]:
        """Return how long the step was, and for how long each row was busy, was exposed, or
        everything idle.
        """
        communication = [*self.gather, *self.reduce, *self.exchange]
        copies = [interval for row in _COPIES.values() for interval in self.offload.get(row, [])]
        lengths = {
            "step": self.bounds[1] - self.bounds[0],
            "compute busy": total(self.compute),
            "communication busy": total(communication),
            "exposed communication": total(self.exposed(communication)),
            "exposed gather": total(self.exposed(self.gather)),
            "exposed reduce": total(self.exposed(self.reduce)),
            "other busy": total(self.other),
            "idle": total(
                subtract([self.bounds], [*self.compute, *communication, *copies, *self.other])
            ),
        }
        if self.exchange:
            lengths["exposed exchange"] = total(self.exposed(self.exchange))
        for row, intervals in self.offload.items():
            lengths |= {
                f"{row} busy": total(intervals),
                f"{row} beside no compute": total(self.exposed(intervals)),
            }
        return {name: microseconds / 1000 for name, microseconds in lengths.items()}


def main(arguments: Sequence[str]) -> int:
    """Print the figures of one step, and draw it if asked."""
    parser = argparse.ArgumentParser(
        prog="bench timeline", description="Say what the GPU did in one step of a trace."
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="what `measure --trace` wrote")
    parser.add_argument(
        "--step", type=int, metavar="N", help="which of its steps, from 0 (default: the last)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the step")
    options = parser.parse_args(arguments)
    steps = find_steps(read_activities(read_events(options.trace)))
    if not steps:
        print(
            f"{options.trace} has no GPU work in a step: it must be a trace of GPUs.",
            file=sys.stderr,
        )
        return 1
    number = max(steps) if options.step is None else options.step
    if number not in steps:
        parser.error(f"there is no step {number}; there are {', '.join(map(str, sorted(steps)))}")
    step = steps[number]
    milliseconds = step.milliseconds()
    for name, value in milliseconds.items():
        print(f"{name:<22} {value:9.3f} ms")
    if options.svg is not None:
        options.svg.write_text(
            drawing_of(step, f"{options.trace.name}, step {number}"), encoding="utf-8"
        )
    return 0


def read_events(path: Path) -> list[TraceEvent]:
    """Return the events of a chrome trace, compressed or not."""
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8") as file
    ):
        events: list[TraceEvent] = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def read_activities(events: Sequence[TraceEvent]) -> list[Activity]:
    """Return the GPU's work, each piece in the step that launched it."""
    launches = {
        event["args"]["correlation"]: event
        for event in _of(events, _LAUNCHES)
        if "correlation" in event["args"]
    }
    ranges = _of(events, ("user_annotation",))
    steps = _Ranges(
        [event for event in ranges if event["name"].startswith(STEP_RANGE)], any_thread=True
    )
    lanes = _Ranges(
        [event for event in ranges if event["name"].split(" ")[0] in (GATHER, REDUCE)],
        any_thread=False,
    )
    activities = []
    for event in _of(events, _GPU_WORK):
        launch = launches.get(event["args"].get("correlation"))
        step = steps.name_around(launch)
        activities.append(
            Activity(
                start=float(event["ts"]),
                end=float(event["ts"]) + float(event["dur"]),
                stream=int(event["args"]["stream"]),
                step=None if step is None else int(step.removeprefix(STEP_RANGE)),
                kind=kind_of(event["name"], lanes.name_around(launch)),
                copy=next((row for name, row in _COPIES.items() if name in event["name"]), None),
            )
        )
    return activities + _steps_on_host(events)


def _steps_on_host(events: Sequence[TraceEvent]) -> list[Activity]:
    ranges = [
        event for event in _of(events, ("user_annotation",)) if event["name"].split(" ")[0] == HOST
    ]
    times = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in ranges]
    return [Activity(start=start, end=end, stream=-1, step=None, kind=HOST) for start, end in times]


def kind_of(name: str, lane: str | None) -> str | None:
    """Return whether a kernel or copy gathers, reduces, exchanges, or (None) does not communicate.

    ``lane`` is the range that it was launched in, ``gather blocks.3`` or ``reduce blocks.3``;
    without one the name decides.

    >>> kind_of("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "reduce blocks.3")
    'reduce'
    >>> kind_of("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None)
    'gather'
    >>> kind_of("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", None)
    'exchange'
    >>> kind_of("void at::native::vectorized_elementwise_kernel", "reduce blocks.3")
    """
    if not name.lower().startswith("nccl") and "PtoP" not in name:
        return None
    if lane is not None:
        return lane.split(" ")[0]
    if "SendRecv" in name:
        return EXCHANGE
    return GATHER if "AllGather" in name or "Broadcast" in name or "PtoP" in name else REDUCE


def find_steps(activities: Sequence[Activity]) -> dict[int, Step]:
    """Return the steps by number: see [Note: rows of the timeline]."""
    numbers = sorted({activity.step for activity in activities if activity.step is not None})
    compute_stream = busiest_stream(activities)
    steps = {}
    begin = None
    for number in numbers:
        own = [activity for activity in activities if activity.step == number]
        own_compute = [
            activity
            for activity in own
            if activity.stream == compute_stream and activity.kind is None
        ]
        if not own_compute:
            continue
        begin = min(activity.start for activity in own) if begin is None else begin
        bounds = (begin, max(activity.end for activity in own_compute))
        steps[number] = _step_within(bounds, activities, compute_stream)
        begin = bounds[1]
    return steps


def busiest_stream(activities: Sequence[Activity]) -> int | None:
    """Return the stream that is busy for longest with what is no communication."""
    busy: dict[int, float] = defaultdict(float)
    for activity in activities:
        if activity.kind is None:
            busy[activity.stream] += activity.end - activity.start
    return max(busy, key=lambda stream: busy[stream]) if busy else None


def drawing_of(step: Step, title: str) -> str:
    """Return the step as SVG, with what is exposed drawn strongly."""
    milliseconds = step.milliseconds()
    exposed = milliseconds["exposed communication"]
    subtitle = (
        f"{milliseconds['step']:.1f} ms; exposed communication {exposed:.2f} ms, idle"
        f" {milliseconds['idle']:.2f} ms"
    )
    communication = {
        GATHER: step.gather,
        REDUCE: step.reduce,
        **({EXCHANGE: step.exchange} if step.exchange else {}),
    }
    rows = {"compute": step.compute, **communication, **step.offload, "other": step.other}
    strong = {name: step.exposed(intervals) for name, intervals in communication.items()}
    return draw(f"{title}: {subtitle}", step.bounds, rows, strong)


def _step_within(
    bounds: Interval, activities: Sequence[Activity], compute_stream: int | None
) -> Step:
    rows: dict[str, list[Interval]] = defaultdict(list)
    for activity in activities:
        row = activity.kind or (
            "compute" if activity.stream == compute_stream else activity.copy or "other"
        )
        rows[row].append((activity.start, activity.end))
    clipped = {row: clip(intervals, bounds) for row, intervals in rows.items()}
    return Step(
        bounds=bounds,
        compute=clipped.get("compute", []),
        gather=clipped.get(GATHER, []),
        reduce=clipped.get(REDUCE, []),
        other=clipped.get("other", []),
        exchange=clipped.get(EXCHANGE, []),
        offload={row: clipped[row] for row in (*_COPIES.values(), HOST) if row in clipped},
    )


class _Ranges:
    """Ranges of the host, to be asked which of them a launch lies in; those of one thread must
    not nest.
    """

    def __init__(self, events: Sequence[TraceEvent], *, any_thread: bool) -> None:
        self._any_thread = any_thread
        self._by_thread: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            start = float(event["ts"])
            self._by_thread[self._thread(event)].append(
                (start, start + float(event["dur"]), event["name"])
            )
        for ranges in self._by_thread.values():
            ranges.sort()

    def name_around(self, launch: TraceEvent | None) -> str | None:
        """Return the name of the range in which ``launch`` was made; None if there is none."""
        if launch is None:
            return None
        ranges = self._by_thread.get(self._thread(launch), [])
        index = bisect_right(ranges, float(launch["ts"]), key=lambda item: item[0]) - 1
        return ranges[index][2] if index >= 0 and float(launch["ts"]) <= ranges[index][1] else None

    def _thread(self, event: TraceEvent) -> Any:
        return None if self._any_thread else (event["pid"], event["tid"])


def _of(events: Sequence[TraceEvent], categories: Sequence[str]) -> list[TraceEvent]:
    return [event for event in events if event.get("cat") in categories]
