"""``pipeline``: forward and backward of one step through the stages of a pipeline, under torch's
schedules and bmt's.

Start it with torchrun. Every rank is one stage. Each variant is built once and measured at all
numbers of micro-batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import bmtrain as bmt
from bench.case import DTYPES
from bench.device import allocated_gib, free_memory, peak_gib, prepare, synchronize
from bench.models import SIZES, Size
from bench.pipelines import ALONE, VARIANTS, Pipeline, Setting, StageAlone, Variant
from bench.ranks import FAILED, CaseFailed, largest, mean, together
from bench.record import append, describe_run
from bench.run import MAX_LEFT_OVER, TIMEOUT_SECONDS, stop_if_stuck
from bench.steps import repeat
from bench.table import OK
from bench.trace import write_trace
from bench.training import make_batch
from bmt_pipeline.schedules import Times, make_schedule, make_timeline

_HEADER = (
    "schedule",
    "micro-batches",
    "step, s",
    "tokens/s per rank",
    "of the stage alone",
    "bubble",
    "in theory",
    "peak GiB, by stage",
    "first loss",
    "norm of gradients",
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One variant at one number of micro-batches. Lists have a number for each stage, in order.

    ``step_seconds`` is the median step, each step on its slowest rank. Bubbles are means over the
    stages. Loss and norm of all gradients are those of the first step. ``forward_seconds`` and
    ``backward_seconds`` are of one micro-batch, of the stage alone.
    """

    variant: str
    micro_batches: int
    status: str
    reason: str = ""
    step_seconds: float | None = None
    seconds_of_steps: list[float] | None = None
    tokens_per_second: float | None = None
    of_alone: float | None = None
    bubble: float | None = None
    bubble_in_theory: float | None = None
    peak_allocated: list[float] | None = None
    left_over: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    forward_seconds: list[float] | None = None
    backward_seconds: list[float] | None = None


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table; the exit status is 1 if a case failed otherwise than for lack
    of memory.
    """
    options = _parse(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    bmt.init_distributed(
        device=options.device,
        timeout=TIMEOUT_SECONDS,
        pipe_size=world,
        reduce_dtype="param",
        check_calls=False,
    )
    try:
        rows = _measure_all(options, arguments)
    finally:
        bmt.shutdown()
    return int(any(row.status == FAILED for row in rows))


def _measure_all(options: argparse.Namespace, arguments: Sequence[str]) -> list[Figures]:
    device = bmt.current().device
    prepare(device)
    setting = _setting(options, device)
    run = {
        **describe_run(arguments, device),
        "shape": asdict(setting.size),
        **_settings_of(options),
    }
    measuring = Measuring(setting, options)
    for name in options.variants:
        started = time.perf_counter()
        for row in measuring.measure(name):
            if bmt.rank() == 0:
                append(options.output, {**run, **asdict(row)})
                print(_summary(row), flush=True)
        free_memory(device, compiled=False)
        if bmt.rank() == 0:
            print(f"{name} took {time.perf_counter() - started:.1f} s", flush=True)
        stop_if_stuck(device, measuring.rows[-1].status, lambda: format_table(measuring.rows))
    if bmt.rank() == 0:
        print(f"\n{format_table(measuring.rows)}", flush=True)
    return measuring.rows


class Measuring:
    """The variants that were measured, and what the stage alone took, with which they
    are compared.
    """

    def __init__(self, setting: Setting, options: argparse.Namespace) -> None:
        self.rows: list[Figures] = []
        self._setting = setting
        self._options = options
        self._alone: Figures | None = None

    def measure(self, name: str) -> list[Figures]:
        """Measure a variant at all numbers of micro-batches until it fails; the stage alone at the
        smallest. Collective.
        """
        counts = self._options.micro_batches
        left_over = allocated_gib(self._setting.device)
        pipeline: Pipeline | None = None
        made: list[Figures] = []
        for count in sorted(counts) if name != ALONE else [min(counts)]:
            try:
                if pipeline is None:
                    pipeline = together(lambda: VARIANTS[name].make(self._setting))
                row = self._measure(name, pipeline, count)
            except CaseFailed as failure:
                made.append(
                    Figures(
                        variant=name,
                        micro_batches=count,
                        status=failure.status,
                        reason=failure.reason,
                    )
                )
                break
            made.append(
                dataclasses.replace(
                    row, left_over=None if left_over is None else largest([left_over])[0]
                )
            )
        if pipeline is not None:
            pipeline.close()
        if name == ALONE and made[0].status == OK:
            self._alone = made[0]
        self.rows += made
        return made

    def _measure(self, name: str, pipeline: Pipeline, count: int) -> Figures:
        setting, options = self._setting, self._options
        device = setting.device
        batch = make_batch(setting.size, batch=count * setting.micro_batch, rank=0, device=device)
        together(lambda: pipeline.prepare(count))
        loss = together(lambda: pipeline.step(*batch))
        squares = together(pipeline.squared_gradients)
        together(pipeline.clear)

        def step() -> None:
            pipeline.step(*batch)
            pipeline.clear()

        repeat(step, options.warmup - 1, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = largest(repeat(step, options.steps, device))
        peak = peak_gib(device)
        median = statistics.median(seconds)
        row = Figures(
            variant=name,
            micro_batches=count,
            status=OK,
            step_seconds=median,
            seconds_of_steps=seconds,
            tokens_per_second=_tokens(setting, count) / median,
            peak_allocated=None if peak is None else of_all_ranks(peak[0]),
            gradient_norm=(mean([squares])[0] * bmt.world_size()) ** 0.5,
        )
        if isinstance(pipeline, StageAlone):
            forward, backward = map(statistics.median, pipeline.seconds(options.steps))
            row = dataclasses.replace(
                row,
                forward_seconds=of_all_ranks(forward),
                backward_seconds=of_all_ranks(backward),
                gradient_norm=None,
            )
        else:
            row = self._compared(dataclasses.replace(row, loss=mean([loss.item()])[0]), median)
        if options.trace is not None:
            path = options.trace / f"{name.replace(' ', '-')}-{count}.json.gz"
            together(lambda: write_trace(step, path))
            together(lambda: synchronize(device))
        return row

    def _compared(self, row: Figures, seconds: float) -> Figures:
        """Return ``row`` with what its steps of ``seconds`` are beside the stage alone, and beside
        the plan of its schedule.
        """
        alone, variant, count = self._alone, VARIANTS[row.variant], row.micro_batches
        if alone is None or alone.forward_seconds is None or alone.backward_seconds is None:
            return dataclasses.replace(row, bubble_in_theory=bubble_in_theory(variant, count))
        forward, backward = alone.forward_seconds, alone.backward_seconds
        busy = [count * (one + other) for one, other in zip(forward, backward, strict=True)]
        return dataclasses.replace(
            row,
            of_alone=max(busy) / seconds,
            bubble=1 - statistics.mean(busy) / seconds,
            bubble_in_theory=bubble_in_theory(variant, count, forward, backward),
        )


def bubble_in_theory(
    variant: Variant,
    count: int,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
) -> float:
    """Return which part of a step the stages compute nothing, by the plan of the schedule, with no
    time for transfers.

    ``forward`` and ``backward`` are the times of each stage, whose chunks take equal parts of them;
    by default all forwards and gradients take the same time.

    >>> bubble_in_theory(VARIANTS["bmt 1f1b"], 4, [1.0], [2.0])
    0.0
    """
    stages = bmt.world_size() if forward is None else len(forward)
    schedule = make_schedule(variant.planned, stages, count, variant.chunks)
    times = Times()
    if forward is not None and backward is not None:
        places = [schedule.place_of(part)[0] for part in range(schedule.parts)]
        # Half of a backward is the gradient of inputs: in products, both gradients take as long.
        half = [backward[stage] / 2 for stage in places]
        times = Times(
            forward=[forward[stage] for stage in places], input_gradient=half, weight_gradient=half
        )
    timeline = make_timeline(schedule, times)
    return statistics.mean(timeline.bubble(stage) for stage in range(stages))


def of_all_ranks(value: float) -> list[float]:
    """Return the ``value`` of every rank, which is 0 or more. Collective."""
    return largest([value if rank == bmt.rank() else 0.0 for rank in range(bmt.world_size())])


def format_table(rows: Sequence[Figures]) -> str:
    """Return a line for each variant at each number of micro-batches."""
    lines = [_HEADER, tuple("---" for _ in _HEADER)]
    lines += [_cells(row) for row in sorted(rows, key=lambda row: row.micro_batches)]
    notes = [f"{row.variant}: {row.reason}" for row in rows if row.reason]
    for row in rows:
        if row.forward_seconds is not None and row.backward_seconds is not None:
            pairs = zip(row.forward_seconds, row.backward_seconds, strict=True)
            texts = [f"{1000 * forward:.2f} + {1000 * backward:.2f}" for forward, backward in pairs]
            notes.append(
                f"ms of forward + backward of one micro-batch, by stage: {', '.join(texts)}"
            )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes]).rstrip()


def _cells(row: Figures) -> tuple[str, ...]:
    start = (row.variant, str(row.micro_batches))
    if row.status != OK:
        return *start, row.status, *[""] * (len(_HEADER) - 3)
    return (
        *start,
        f"{row.step_seconds:.4f}",
        f"{row.tokens_per_second:.0f}",
        "" if row.of_alone is None else f"{row.of_alone:.3f}",
        "" if row.bubble is None else f"{row.bubble:.1%}",
        "" if row.bubble_in_theory is None else f"{row.bubble_in_theory:.1%}",
        "–"
        if row.peak_allocated is None
        else ", ".join(f"{peak:.1f}" for peak in row.peak_allocated),
        "" if row.loss is None else f"{row.loss:.6f}",
        "" if row.gradient_norm is None else f"{row.gradient_norm:.5f}",
    )


def _summary(row: Figures) -> str:
    if row.status != OK:
        return f"{row.variant}, {row.micro_batches} micro-batches: {row.status}: {row.reason}"
    texts = [
        f"{title} {cell}" for title, cell in zip(_HEADER[2:], _cells(row)[2:], strict=True) if cell
    ]
    if row.left_over is not None and row.left_over > MAX_LEFT_OVER:
        texts.append(f"{row.left_over:.1f} GiB WERE LEFT OVER by earlier variants")
    return f"{row.variant}, {row.micro_batches} micro-batches: {'; '.join(texts)}"


def _tokens(setting: Setting, count: int) -> float:
    """Return how many tokens a step has for each rank."""
    return count * setting.micro_batch * setting.size.sequence / bmt.world_size()


def _setting(options: argparse.Namespace, device: torch.device) -> Setting:
    return Setting(
        size=with_layers(options.size, options.layers),
        dtype=DTYPES[options.dtype],
        device=device,
        micro_batch=options.micro_batch,
        recompute=options.recompute,
        level=options.level,
    )


def with_layers(name: str, layers: int | None) -> Size:
    """Return the size of that name, with so many layers if a number is given."""
    return SIZES[name] if layers is None else dataclasses.replace(SIZES[name], num_layers=layers)


def _settings_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that a record of the run holds."""
    names = ("size", "dtype", "micro_batch", "recompute", "level", "warmup", "steps")
    return {name: getattr(options, name) for name in names}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench pipeline", description=__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="13b", help="default: 13b")
    add(
        "--layers",
        type=int,
        metavar="N",
        help="instead of those of the size; at least two for each rank",
    )
    add(
        "--micro-batch",
        type=int,
        default=2,
        metavar="N",
        help="sequences in a micro-batch (default: 2)",
    )
    add(
        "--micro-batches",
        default="4,8,16",
        help="in a step, a multiple of the ranks (default: 4,8,16)",
    )
    add("--variants", default=",".join(VARIANTS), help="default: all")
    add("--recompute", action="store_true", help="recompute the blocks' activations in backward")
    add(
        "--level",
        type=int,
        choices=(0, 1, 2, 3),
        default=2,
        help="ZeRO level of bmt's Blocks (default: 2)",
    )
    add(
        "--warmup",
        type=int,
        default=2,
        metavar="N",
        help="steps before those that count, at least 1 (default: 2)",
    )
    add(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps that count; the result is their median (default: 5)",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add(
        "--output",
        type=Path,
        default=Path("runs/pipeline.jsonl"),
        metavar="FILE",
        help="records are added to it",
    )
    add(
        "--trace",
        type=Path,
        metavar="DIR",
        help="also profile two steps of each case on rank 0 into DIR",
    )
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    options.micro_batches = [int(text) for text in options.micro_batches.split(",")]
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants: {', '.join(unknown)}. There are: {', '.join(VARIANTS)}")
    if options.warmup < 1:
        parser.error("--warmup must be at least 1: the first step is compared, not timed")
    # First, for the others are compared with it.
    options.variants.sort(key=lambda name: name != ALONE)
    return options
