"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from bmt_pipeline.schedules.schedule import Action, Kind, Placement, Schedule, check_sizes


def gpipe(
    stages: int, micro_batches: int, chunks: int = 1, *, placement: Placement = Placement.LOOP
) -> Schedule:
    """Return the schedule of Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks
    using Pipeline Parallelism".

    Each stage computes the forwards of all micro-batches and then their backwards, in the same
    order, chunk after chunk. With times f and b per micro-batch and stage, a step of one chunk
    takes (micro_batches + stages - 1) (f + b), of which (stages - 1) (f + b) is bubble. The
    activations of all micro-batches are live at once, on every stage.

    >>> " ".join(map(str, gpipe(2, 3).orders[0]))
    'F0 F1 F2 B0 B1 B2'
    """
    check_sizes(stages, micro_batches, chunks)
    forwards = [
        Action(Kind.FORWARD, i, chunk) for chunk in range(chunks) for i in range(micro_batches)
    ]
    backwards = [
        Action(Kind.BACKWARD, i, chunk)
        for chunk in reversed(range(chunks))
        for i in range(micro_batches)
    ]
    return Schedule(
        name="gpipe",
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        placement=placement,
        orders=((*forwards, *backwards),) * stages,
    )
