"""``measure``: run every case, one after the other in one process group, and print the table."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import bmtrain as bmt
from bench.case import Case
from bench.device import free_memory, is_drained, prepare
from bench.measure import measure
from bench.options import Options
from bench.ranks import FAILED, CaseFailed, gather_texts, largest
from bench.record import Record, append, describe_case, describe_run
from bench.table import OK, SKIPPED, format_tables
from bench.toolkits import toolkit_of
from bmt_core.settings import DEFAULT_REDUCE_DTYPE

# Long enough for one rank to compile while the others wait, short enough to leave time for
# other cases.
TIMEOUT_SECONDS = 300
# The host starts a step of minutes at once, and its last collective waits for all of it.
TIMEOUT_OF_LONG_STEPS = 1800
# GiB: more than the workspaces that libraries keep.
MAX_LEFT_OVER = 0.2


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line asks; the exit status is 1 if a case failed otherwise than for
    lack of memory.
    """
    options = Options.parse(arguments)
    bmt.init_distributed(
        device=options.device,
        timeout=TIMEOUT_SECONDS if options.first_sequence is None else TIMEOUT_OF_LONG_STEPS,
        tp_size=options.tp,
        axis_sizes={"cp": options.cp} if options.cp > 1 else {},
        sequence_dim=0,
        pipe_size=options.pp,
        shard_size=options.shard_size,
        optimizer_shards=options.optimizer_shards,
        reduce_dtype=options.reduce_dtype or DEFAULT_REDUCE_DTYPE,
        check_calls=False,  # as in a training after its first 200 calls of each group
    )
    if options.pp > 1:
        # Toolkits without stages are measured in the same run, which is refused unless some layers
        # lie on stages.
        bmt.PipelineTransformerBlockList([torch.nn.Identity() for _ in range(options.pp)])
    try:
        records = measure_all(options, describe_run(arguments, bmt.current().device))
    finally:
        bmt.shutdown()
    return int(any(record["status"] == FAILED for record in records))


def measure_all(options: Options, run: Record) -> list[Record]:
    """Measure every case and return the records; rank 0 writes and prints. Collective."""
    device = bmt.current().device
    prepare(device)
    cases = options.cases()
    records: list[Record] = []
    for number, case in enumerate(cases, start=1):
        started = time.perf_counter()
        result = measure_case(case, device, options.trace)
        records.append({**run, **describe_case(case), **result})
        free_memory(device, compiled=case.compile)
        if bmt.rank() == 0:
            append(options.output, records[-1])
            took = time.perf_counter() - started
            print(
                f"[{number}/{len(cases)}] {case.name}: {summary(records[-1])} (took {took:.1f} s)",
                flush=True,
            )
        stop_if_stuck(device, records[-1]["status"], lambda: format_tables(records))
    if bmt.rank() == 0:
        print(f"\n{format_tables(records)}", flush=True)
    return records


def measure_case(case: Case, device: torch.device, trace: Path | None) -> Record:
    """Return what ``case`` adds to its settings: a status and why, or a status and figures.
    Collective.
    """
    toolkit = toolkit_of(case)
    obstacles = [obstacle for obstacle in gather_texts(toolkit.obstacle(case) or "") if obstacle]
    if obstacles:
        return {"status": SKIPPED, "reason": obstacles[0]}
    version = {"toolkit_version": toolkit.version()}
    try:
        return {"status": OK, **version, **dataclasses.asdict(measure(case, device, trace))}
    except CaseFailed as failure:
        return {"status": failure.status, **version, "reason": failure.reason}


def summary(record: Record) -> str:
    """Return one line for the impatient."""
    if record["status"] != OK:
        return f"{record['status']}: {record['reason']}"
    memory = ""
    if record["peak_allocated"] is not None:
        memory = f", {record['peak_allocated']:.1f} GiB"
        if record["left_over"] > MAX_LEFT_OVER:
            memory += f" of which {record['left_over']:.1f} GiB WERE LEFT OVER by earlier cases"
    return (
        f"{record['step_seconds']:.4f} s per step, {record['tokens_per_second']:.0f} tokens/s per"
        f" rank{memory}, loss {record['losses'][0]:.4f} -> {record['losses'][-1]:.4f}"
    )


def stop_if_stuck(device: torch.device, status: str, table: Callable[[], str]) -> None:
    """End the process if the last case, of ``status``, left kernels that wait for each other: no
    later could run. Collective.
    """
    if status in (OK, SKIPPED) or largest([not is_drained(device)]) == [0.0]:
        return
    if bmt.rank() == 0:
        print(
            f"\n{table()}\n\nRanks failed at different places: the cases after that were not run."
        )
    sys.stdout.flush()
    # An ordinary exit would wait for the kernels.
    os._exit(1)
