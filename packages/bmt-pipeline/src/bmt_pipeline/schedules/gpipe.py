"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules.schedule import Action, Kind, Schedule, check_sizes


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the schedule of Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".

    Each stage makes the forwards of all micro-batches and then their backwards, in the same order. With times f and b per
    micro-batch and stage a step takes (micro_batches + stages - 1) (f + b), of which (stages - 1) (f + b) is bubble. The
    activations of all micro-batches are live at once, on every stage.

    >>> " ".join(map(str, gpipe(2, 3).orders[0]))
    'F0 F1 F2 B0 B1 B2'
    """
    check_sizes(stages, micro_batches, chunks)
    if chunks != 1:
        raise ConfigError(f"The schedule 'gpipe' is defined for chunks=1, and got {chunks}. Use 'interleaved'.")
    order = tuple(Action(kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(micro_batches))
    return Schedule(name="gpipe", stages=stages, micro_batches=micro_batches, orders=(order,) * stages)
