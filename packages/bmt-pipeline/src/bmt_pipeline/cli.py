"""``bmt pipeline-plan``: show the time and memory that a pipeline schedule costs, without
running it.
"""

from __future__ import annotations

from pathlib import Path

import click

from bmt_core.cli.output import make_console, make_table, styled
from bmt_pipeline.schedules import SCHEDULES, Times, ideal_step_time, make_schedule, make_timeline
from bmt_pipeline.schedules.drawing import draw_svg, draw_text
from bmt_pipeline.schedules.timeline import Timeline


@click.command()
@click.option("--stages", type=int, required=True, help="Number of stages of the pipeline.")
@click.option("--micro-batches", type=int, required=True, help="Number of micro-batches in a step.")
@click.option(
    "--schedule",
    "name",
    default="1f1b",
    show_default=True,
    help=f"One of {', '.join(sorted(SCHEDULES))}.",
)
@click.option(
    "--chunks", type=int, default=1, show_default=True, help="Parts of the model on each stage."
)
@click.option(
    "--forward-ms",
    type=float,
    default=1.0,
    show_default=True,
    help="Forward of a micro-batch in one part.",
)
@click.option(
    "--backward-ms",
    type=float,
    default=2.0,
    show_default=True,
    help="Whole backward; half of it counts as the input gradient, half as the weight gradient.",
)
@click.option(
    "--transfer-ms",
    type=float,
    default=0.0,
    show_default=True,
    help="Sending an output to another stage.",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the picture to this file.",
)
def pipeline_plan(
    stages: int,
    micro_batches: int,
    name: str,
    chunks: int,
    forward_ms: float,
    backward_ms: float,
    transfer_ms: float,
    svg: Path | None,
) -> None:
    """Show the order, the bubble and the live activations of a pipeline schedule.

    This simulates the schedule that a training runs. The bubble is the fraction of the step in
    which a stage computes nothing; "waits" is the part of that time between the stage's first and
    last action. Live activations are the largest number of micro-batches, counted once per chunk,
    whose activations a stage holds at once.
    """
    schedule = make_schedule(name, stages, micro_batches, chunks)
    times = Times(
        forward=forward_ms,
        input_gradient=backward_ms / 2,
        weight_gradient=backward_ms / 2,
        transfer=transfer_ms,
    )
    timeline = make_timeline(schedule, times)
    console = make_console()
    console.print(draw_text(timeline, width=console.width))
    _print_costs(timeline, ideal_step_time(schedule, times))
    if svg is not None:
        svg.write_text(draw_svg(timeline), encoding="utf-8")
        console.print(styled(f"Wrote {svg}."))


def _print_costs(timeline: Timeline, ideal: float | None) -> None:
    console = make_console()
    schedule = timeline.schedule
    table = make_table("", "stage", "parts of the model", "bubble", "waits, ms", "live activations")
    for stage in range(schedule.stages):
        parts = ", ".join(str(schedule.part_of(stage, chunk)) for chunk in range(schedule.chunks))
        row = (
            str(stage),
            parts,
            f"{timeline.bubble(stage):.1%}",
            f"{timeline.waiting(stage):g}",
            str(schedule.peak_live(stage)),
        )
        table.add_row(*map(styled, row))
    console.print(table)
    formula = (
        ""
        if ideal is None
        else f" The formula of its paper, without transfers, gives {ideal:g} ms."
    )
    console.print(styled(f"A step of {schedule.name} takes {timeline.makespan:g} ms.{formula}"))
