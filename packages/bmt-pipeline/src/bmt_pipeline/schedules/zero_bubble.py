"""Zero bubble: a stage computes weight gradients, which no other stage needs, while it would
otherwise wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules.list_scheduling import ListScheduler
from bmt_pipeline.schedules.schedule import Action, Kind, Placement, Schedule, check_sizes
from bmt_pipeline.schedules.timeline import make_timeline
from bmt_pipeline.schedules.times import Times

Orders = tuple[tuple[Action, ...], ...]


def zero_bubble(
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    times: Times | None = None,
    most_live: int | None = None,
) -> Schedule:
    """Return a schedule of Qi et al.: 2023, "Zero Bubble Pipeline Parallelism", or 2024, "... with
    Controllable Memory".

    Each backward is split: the input gradient is computed first, because the previous stage needs
    it, the weight gradient later.

    ``chunks=1`` is ZB-H1. With times f, i, w per micro-batch and stage the bubble is (stages - 1)
    (f + i - w), a third of that of 1F1B if all three are equal, and at most ``stages``
    micro-batches are live on a stage, the most that 1F1B has.

    ``chunks=2`` is ZB-V, in the placement "v". With equal times, no time for transfers and at least
    2 stages - 1 micro-batches, no stage waits between its first and its last action. A step takes 3
    micro_batches chunks + stages - 1 times the time of one action. At most 2 stages micro-batches
    of a chunk are live on a stage. A chunk is half of a stage, so this is as much memory as
    1F1B needs.

    The paper's order is compared with the one that :class:`ListScheduler` finds, which is often
    shorter for few micro-batches. The one that is shorter with these ``times`` is returned.
    ``most_live`` limits the micro-batches, counted once per chunk, that are live on a stage; by
    default it is stages x chunks.

    >>> " ".join(map(str, zero_bubble(2, 3).orders[1]))
    'F0 I0 F1 I1 W0 F2 I2 W1 W2'
    """
    check_sizes(stages, micro_batches, chunks)
    if chunks > 2:
        raise ConfigError(
            f"The schedule 'zero-bubble' is defined for chunks=1 and chunks=2, and got {chunks}."
            " Use one of these, or 'interleaved'."
        )
    times = times or Times()
    times.check(stages * chunks)
    most_live = stages * chunks if most_live is None else most_live
    placement = Placement.LOOP if chunks == 1 else Placement.V
    scheduler = ListScheduler(
        stages, micro_batches, chunks, placement, times=times, most_live=most_live
    )
    by_paper = h1_orders(stages, micro_batches) if chunks == 1 else v_orders(stages, micro_batches)
    candidates = [
        Schedule(
            name="zero-bubble",
            stages=stages,
            micro_batches=micro_batches,
            chunks=chunks,
            placement=placement,
            orders=orders,
        )
        for orders in (by_paper, scheduler.run())
    ]
    fitting = [one for one in candidates if max(map(one.peak_live, range(stages))) <= most_live]
    return min(fitting, key=lambda schedule: _duration(schedule, times))


def _duration(schedule: Schedule, times: Times) -> tuple[float, float]:
    timeline = make_timeline(schedule, times)
    return timeline.makespan, sum(map(timeline.waiting, range(schedule.stages)))


def h1_orders(stages: int, micro_batches: int) -> Orders:
    """Return the orders of ZB-H1: 1F1B in which stage s computes weight gradients s micro-batches
    after input gradients.
    """
    return tuple(tuple(_h1_order(stages, stage, micro_batches)) for stage in range(stages))


def _h1_order(stages: int, stage: int, micro_batches: int) -> Iterator[Action]:
    warm_up = min(stages - 1 - stage, micro_batches)
    yield from (Action(Kind.FORWARD, i) for i in range(warm_up))
    for i in range(micro_batches):
        if i + warm_up < micro_batches:
            yield Action(Kind.FORWARD, i + warm_up)
        yield Action(Kind.INPUT_GRADIENT, i)
        if i >= stage:
            yield Action(Kind.WEIGHT_GRADIENT, i - stage)
    yield from (
        Action(Kind.WEIGHT_GRADIENT, i) for i in range(max(0, micro_batches - stage), micro_batches)
    )


def v_orders(stages: int, micro_batches: int) -> Orders:
    """Return the orders of ZB-V, the same actions as in
    ``torch.distributed.pipelining.ScheduleZBVZeroBubble``.

    The pattern needs at least 2 stages - 1 micro-batches. For fewer, it is made for that many, and
    actions of surplus micro-batches are left out.
    """
    pattern_for = max(2 * stages - 1, micro_batches)
    return tuple(
        tuple(
            action
            for action in _numbered(_v_pattern(stages, stage, pattern_for))
            if action.micro_batch < micro_batches
        )
        for stage in range(stages)
    )


def _v_pattern(stages: int, stage: int, micro_batches: int) -> list[str]:
    """Return the kind and the chunk of each action: chunk 0 is on the way down, chunk 1 on the
    way back.

    The stage starts with forwards, alternates between both chunks while there are micro-batches,
    and drains. Weight gradients follow their input gradients, except the last ``stage`` ones, which
    come at the end.
    """
    from_end = stages - stage
    fill = ["F0"] * (2 * from_end - 1) + ["F1", "F0"] * stage + ["F1", "I1", "W1"] * from_end
    left = micro_batches - (2 * from_end - 1) - stage
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"] * left
    forwards_left = micro_batches - (stage + from_end + left)
    steady += ["I0", "W0", "F1", "I1", "W1"] * forwards_left
    drain = ["I0", "I1"] * stage + ["I0", "W0"] * from_end
    order = fill + steady + drain
    return order + [
        f"W{chunk}" for chunk in (1, 0) for _ in range(micro_batches - order.count(f"W{chunk}"))
    ]


def _numbered(pattern: Iterable[str]) -> Iterator[Action]:
    count: dict[str, int] = {}
    for text in pattern:
        yield Action(Kind(text[0]), count.get(text, 0), int(text[1]))
        count[text] = count.get(text, 0) + 1
