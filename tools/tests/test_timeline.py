"""Interval arithmetic against sets of points, and a step of a made-up trace with known lengths."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import timeline
from bench.drawing import draw
from bench.intervals import Interval, clip, merge, subtract, total

COMPUTE, GATHERS, REDUCES, COPIES = 7, 20, 24, 28

some_intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    ),
    max_size=12,
)


def points(intervals: list[Any]) -> set[int]:
    """The unit cells that integer intervals cover."""
    return {cell for start, end in intervals for cell in range(start, end)}


def is_sorted_and_disjoint(intervals: list[Interval]) -> bool:
    edges = [edge for interval in intervals for edge in interval]
    return all(start < end for start, end in intervals) and edges == sorted(edges)


@given(some_intervals, some_intervals)
def test_intervals_behave_like_sets(left: list[Any], right: list[Any]) -> None:
    assert points(merge(left)) == points(left)
    assert points(subtract(left, right)) == points(left) - points(right)
    assert total(left) == len(points(left))
    assert is_sorted_and_disjoint(merge(left)) and is_sorted_and_disjoint(subtract(left, right))


@given(some_intervals, st.integers(0, 40), st.integers(1, 20))
def test_clip_keeps_what_is_inside(intervals: list[Any], start: int, length: int) -> None:
    assert points(clip(intervals, (start, start + length))) == points(intervals) & set(
        range(start, start + length)
    )


@given(some_intervals, st.integers(1, 5))
def test_merge_closes_gaps_up_to_the_one_given(intervals: list[Any], gap: int) -> None:
    merged = merge(intervals, gap)
    assert points(intervals) <= points(merged)
    assert all(later[0] - earlier[1] > gap for earlier, later in itertools.pairwise(merged))


class Trace:
    """Writes events as the profiler does: a launch on the host for each piece of work on
    the GPU.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "args": {"name": "python"}}
        ]
        self._launches = 0

    def add(
        self,
        start: float,
        end: float,
        stream: int,
        name: str,
        *,
        at: float,
        category: str = "kernel",
    ) -> None:
        self._launches += 1
        arguments = {"correlation": self._launches, "stream": stream}
        self._event(
            "cuda_runtime", "cudaLaunchKernel", at, at + 1, thread=2, correlation=self._launches
        )
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start,
                "dur": end - start,
                "pid": 0,
                "tid": stream,
            }
            | {"args": arguments}
        )

    def range(self, name: str, start: float, end: float, *, thread: int = 1) -> None:
        self._event("user_annotation", name, start, end, thread=thread)

    def _event(
        self, category: str, name: str, start: float, end: float, *, thread: int, **arguments: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start,
                "dur": end - start,
                "pid": 9,
                "tid": thread,
            }
            | {"args": arguments}
        )


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Two steps: the first computes from 1000 to 2000; the second, from 2000 to 4000, has every
    kind of work.
    """
    trace = Trace()
    trace.range("bench step 0", 0, 100)
    trace.range("bench step 1", 100, 200)
    trace.range("gather blocks.0", 110, 120, thread=2)
    trace.range("reduce blocks.0", 140, 150, thread=2)
    trace.add(1000, 2000, COMPUTE, "gemm", at=50)
    trace.add(2300, 3000, COMPUTE, "gemm", at=125)
    trace.add(3200, 4000, COMPUTE, "Memset (Device)", at=160, category="gpu_memset")
    # 1900 to 2300: the first 100 us beside the step before, the next 300 beside nothing.
    trace.add(
        1900,
        2300,
        GATHERS,
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        at=115,
    )
    # 2900 to 3150: 150 us exposed; an all-to-all that its range calls a reduction.
    trace.add(
        2900, 3150, REDUCES, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", at=145
    )
    # A gather that no range names, 50 us of it at the same time as the exposed reduction.
    trace.add(
        3100,
        3160,
        GATHERS,
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        at=130,
    )
    trace.add(2100, 2200, COPIES, "chunk_cat", at=155)
    # After the last computation: the next step's.
    trace.add(4000, 4500, COPIES, "adam", at=190)
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": trace.events}, file)
    return path


def test_exposed_communication_of_a_step(trace_file: Path) -> None:
    steps = timeline.find_steps(timeline.read_activities(timeline.read_events(trace_file)))
    assert steps[0].bounds == (1000, 2000)
    assert steps[1].milliseconds() == pytest.approx(
        {
            "step": 2.0,
            "compute busy": 1.5,
            "communication busy": 0.3 + 0.26,
            "exposed communication": 0.3 + 0.16,
            "exposed gather": 0.3 + 0.06,
            "exposed reduce": 0.15,
            "other busy": 0.1,
            "idle": 0.04,
        }
    )
    assert steps[0].milliseconds()["exposed communication"] == 0


def test_rows_and_gaps_add_up_to_the_step(trace_file: Path) -> None:
    step = timeline.find_steps(timeline.read_activities(timeline.read_events(trace_file)))[1]
    lengths = step.milliseconds()
    other_alone = total(subtract(step.other, [*step.compute, *step.gather, *step.reduce])) / 1000
    parts = (
        lengths["compute busy"] + lengths["exposed communication"] + other_alone + lengths["idle"]
    )
    assert parts == pytest.approx(lengths["step"])


def test_command_prints_and_draws(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = trace_file.with_name("step.svg")
    assert timeline.main([str(trace_file), "--svg", str(picture)]) == 0
    assert "exposed gather             0.360 ms" in capsys.readouterr().out
    text = picture.read_text()
    assert text.startswith("<svg") and "trace.json.gz, step 1: 2.0 ms" in text
    assert text.count("#d62728") == 2  # the exposed parts of two rows


def test_exchanges_that_no_range_names_have_a_row(tmp_path: Path) -> None:
    trace = Trace()
    trace.range("bench step 0", 0, 100)
    trace.add(1000, 2000, COMPUTE, "gemm", at=50)
    trace.add(3000, 4000, COMPUTE, "gemm", at=60)
    trace.add(
        1500, 2700, GATHERS, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", at=55
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace.events}))
    step = timeline.find_steps(timeline.read_activities(timeline.read_events(path)))[0]
    lengths = step.milliseconds()
    assert (lengths["exposed communication"], lengths["exposed exchange"]) == pytest.approx(
        (0.7, 0.7)
    )
    assert lengths["exposed reduce"] == 0 and ">exchange</text>" in timeline.drawing_of(
        step, "one block"
    )


def test_trace_of_a_cpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 0, "dur": 1}]})
    )
    assert timeline.main([str(path)]) == 1
    assert "no GPU work" in capsys.readouterr().err


def test_picture_of_very_many_kernels_is_small() -> None:
    kernels = [(10.0 * number, 10.0 * number + 9) for number in range(100_000)]
    sparse = [(400.0 * number, 400.0 * number + 1) for number in range(2_500)]
    text = draw(
        "dense",
        (0.0, 1e6),
        {"compute": kernels, "gather": sparse, "reduce": sparse, "other": sparse},
        {},
    )
    assert len(text) < 200_000
