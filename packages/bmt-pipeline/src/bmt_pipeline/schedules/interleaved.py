"""Interleaved 1F1B: each stage has several smaller parts of the model, so that the pipeline
fills sooner.
"""

from __future__ import annotations

import math

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules.one_forward_one_backward import in_turn
from bmt_pipeline.schedules.schedule import Action, Kind, Schedule, check_sizes


def interleaved(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Return the schedule of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
    on GPU Clusters", section 2.2.

    Micro-batches pass the stages in groups of ``stages``: a group passes chunk 0 of every stage,
    then chunk 1, and so on; backwards pass the chunks in the opposite order. Stage s starts with 2
    (stages - 1 - s) + (chunks - 1) group forwards and then alternates one forward and one backward.
    With times f and b per micro-batch and *chunk*, a step whose number of micro-batches is a
    multiple of ``stages`` takes (micro_batches chunks + stages - 1) (f + b): the bubble is that of
    1F1B divided by ``chunks``. The price: activations of up to 2 (stages - 1 - s) + (chunks - 1)
    group + 1 micro-batches of a chunk are live on stage s, and activations are sent ``chunks``
    times as often. If transfers took no time, stages - 1 - s forwards in advance would be enough;
    the others hide the transfers.

    The paper requires a multiple of ``stages`` micro-batches. Any other number is divided into the
    nearest number of groups. Either the groups are larger, up to one and a half times ``stages``,
    or the first one is not full. The order stays valid: in larger groups outputs only wait longer;
    and an action needs only actions of the same micro-batch, so leaving micro-batches out
    blocks none.

    >>> " ".join(map(str, interleaved(2, 2).orders[1]))
    'F0 F1 F0 of chunk 1 B0 of chunk 1 F1 of chunk 1 B1 of chunk 1 B0 B1'
    """
    check_sizes(stages, micro_batches, chunks)
    if chunks < 2:
        raise ConfigError(
            f"The schedule 'interleaved' is defined for chunks >= 2, and got {chunks}. Give more,"
            " or use '1f1b'."
        )
    group = group_size(stages, micro_batches)
    missing = -micro_batches % group
    order = [
        (micro_batch, chunk)
        for first in range(-missing, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, first + group)
    ]
    forwards = [Action(Kind.FORWARD, micro_batch, chunk) for micro_batch, chunk in order]
    backwards = [
        Action(Kind.BACKWARD, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in order
    ]
    full = (
        in_turn(forwards, backwards, 2 * (stages - 1 - stage) + (chunks - 1) * group)
        for stage in range(stages)
    )
    orders = tuple(tuple(action for action in order if action.micro_batch >= 0) for order in full)
    return Schedule(
        name="interleaved", stages=stages, micro_batches=micro_batches, chunks=chunks, orders=orders
    )


def group_size(stages: int, micro_batches: int) -> int:
    """Return how many micro-batches pass one chunk before the next chunk begins.

    >>> group_size(4, 8), group_size(4, 9), group_size(4, 7)
    (4, 5, 4)
    """
    num_groups = max(1, round(micro_batches / stages))
    return max(stages, math.ceil(micro_batches / num_groups))
