"""1F1B: one forward and one backward in turn, so that few activations are live."""

from __future__ import annotations

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules.schedule import Action, Kind, Schedule, check_sizes


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the schedule of Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN
    Training" (PipeDream-Flush).

    Stage s starts with stages - 1 - s forwards, then alternates one forward and one backward, and
    ends with the remaining backwards. The bubble is the same as GPipe's: a step takes
    (micro_batches + stages - 1) (f + b). But at most min(stages - s, micro_batches) micro-batches
    are live on stage s, however many the step has.

    >>> " ".join(map(str, one_forward_one_backward(2, 3).orders[0]))
    'F0 F1 B0 F2 B1 B2'
    """
    check_sizes(stages, micro_batches, chunks)
    if chunks != 1:
        raise ConfigError(
            f"The schedule '1f1b' is defined for chunks=1, and got {chunks}. Use 'interleaved'."
        )
    forwards = [Action(Kind.FORWARD, i) for i in range(micro_batches)]
    backwards = [Action(Kind.BACKWARD, i) for i in range(micro_batches)]
    orders = tuple(in_turn(forwards, backwards, stages - 1 - stage) for stage in range(stages))
    return Schedule(name="1f1b", stages=stages, micro_batches=micro_batches, orders=orders)


def in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """Return ``warm_up`` forwards, then a forward and a backward in turn, then the backwards that
    are left.
    """
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return (
        *forwards[:warm_up],
        *(action for pair in pairs for action in pair),
        *backwards[len(forwards) - warm_up :],
    )
