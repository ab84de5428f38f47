"""Measure one case: build, warm up, time, and trace if asked."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.case import Case
from bench.device import StepClock, allocated_gib, peak_gib, synchronize
from bench.models import Size
from bench.ranks import largest, mean, together
from bench.real_models import RealModel
from bench.toolkits import toolkit_of
from bench.trace import write_trace
from bench.training import Training, make_batch


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one case gave: times and memory of the rank where they are largest, losses as the mean
    of all ranks.

    ``step_seconds`` is the median of ``seconds_of_steps``, by the device's clock; ``wall_seconds``
    is the host's for the same steps, divided by their number. ``losses`` are those of all steps,
    warm-up included. Memory is in GiB, None on the CPU; peaks are those of training, without the
    building of the model; ``left_over`` is what was not free before it.
    """

    step_seconds: float
    seconds_of_steps: list[float]
    wall_seconds: float
    tokens_per_second: float
    losses: list[float]
    peak_allocated: float | None
    peak_reserved: float | None
    left_over: float | None
    build_seconds: float
    warmup_seconds: float


def measure(case: Case, device: torch.device, trace: Path | None) -> Measurement:
    """Return what ``case`` gives on all ranks, or raise :class:`bench.ranks.CaseFailed`.
    Collective.
    """
    left_over = allocated_gib(device)
    started = time.perf_counter()
    training = together(lambda: toolkit_of(case)(case, device))
    try:
        together(lambda: _settle(device))
        build_seconds = time.perf_counter() - started
        return _measure(training, case, device, trace, left_over, build_seconds)
    finally:
        training.close()


def _measure(
    training: Training,
    case: Case,
    device: torch.device,
    trace: Path | None,
    left_over: float | None,
    build_seconds: float,
) -> Measurement:
    batch = first = _batch(training, case, case.shape, device)
    if case.first_sequence is not None and case.model is not None:
        shape = dataclasses.replace(case.model, sequence=case.first_sequence)
        first = _batch(training, case, shape, device)
    losses: list[torch.Tensor] = []

    def warm_up() -> None:
        for _ in range(case.warmup):
            losses.append(training.step(*first))

    clock = StepClock(device)

    def timed_steps() -> None:
        clock.mark()
        for _ in range(case.steps):
            losses.append(training.step(*batch))
            clock.mark()

    started = time.perf_counter()
    together(warm_up)
    together(lambda: synchronize(device))
    warmup_seconds = time.perf_counter() - started

    started = time.perf_counter()
    together(timed_steps)
    together(lambda: synchronize(device))
    wall_seconds = (time.perf_counter() - started) / case.steps

    peak = peak_gib(device)
    seconds = largest(clock.seconds())
    step_seconds = statistics.median(seconds)
    measurement = Measurement(
        step_seconds=step_seconds,
        seconds_of_steps=seconds,
        wall_seconds=largest([wall_seconds])[0],
        tokens_per_second=case.batch * case.shape.sequence / case.cp / step_seconds,
        losses=mean([loss.item() for loss in losses]),
        peak_allocated=None if peak is None else largest(peak)[0],
        peak_reserved=None if peak is None else largest(peak)[1],
        left_over=None if left_over is None else largest([left_over])[0],
        build_seconds=build_seconds,
        warmup_seconds=warmup_seconds,
    )
    if trace is not None:
        together(lambda: write_trace(lambda: training.step(*batch), trace / f"{case.name}.json.gz"))
        together(lambda: synchronize(device))
    return measurement


def _batch(
    training: Training, case: Case, shape: Size | RealModel, device: torch.device
) -> Sequence[torch.Tensor]:
    batches = [
        make_batch(shape, batch=case.batch, rank=rank, device=device)
        for rank in training.data_ranks()
    ]
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def _settle(device: torch.device) -> None:
    """Leave the peaks of building the model behind."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
