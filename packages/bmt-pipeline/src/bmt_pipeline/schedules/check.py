"""Check that a schedule can run: every action occurs once, and no stage waits forever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules.schedule import Action, Kind, Output, Schedule

_WHOLE = {Kind.FORWARD: 1, Kind.BACKWARD: 1}
_SPLIT = {Kind.FORWARD: 1, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 1}


def check_schedule(schedule: Schedule) -> None:
    """Raise :class:`ConfigError` unless every micro-batch passes every part once and no stage
    waits forever.

    The check runs all stages without computing anything. A receive waits for its output; a send
    waits for nobody. Each stage has a fixed order and takes outputs by name, so its next action
    never depends on when something arrives (a Kahn process network). So a schedule that finishes
    here finishes however long computations and transfers take, and one that blocks here
    always blocks.
    """
    for stage in range(schedule.stages):
        _check_actions(schedule, stage)
    for _ in run_abstractly(schedule):
        pass


def _check_actions(schedule: Schedule, stage: int) -> None:
    kinds: dict[tuple[int, int], Counter[Kind]] = {
        (micro_batch, chunk): Counter()
        for micro_batch in range(schedule.micro_batches)
        for chunk in range(schedule.chunks)
    }
    for action in schedule.orders[stage]:
        found = kinds.get((action.micro_batch, action.chunk))
        if found is None:
            raise _broken(
                schedule,
                f"stage {stage} has the action {action}, and there are {schedule.micro_batches}"
                f" micro-batches and {schedule.chunks} chunks per stage",
            )
        found[action.kind] += 1
    for (micro_batch, chunk), found in kinds.items():
        if found not in (_WHOLE, _SPLIT):
            listed = (
                ", ".join(f"{count} x {kind.value}" for kind, count in found.items()) or "nothing"
            )
            raise _broken(
                schedule,
                f"stage {stage} has {listed} for micro-batch {micro_batch} in chunk {chunk}, and"
                " needs F and B, or F, I and W, once each",
            )


def run_abstractly(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (stage, action) in an order in which each action comes after everything that it needs.

    Raises :class:`ConfigError` if stages wait for each other.
    """
    made: set[Output] = set()
    done = [0] * schedule.stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(schedule.orders):
            while done[stage] < len(order) and made.issuperset(
                schedule.inputs_of(stage, order[done[stage]])
            ):
                action = order[done[stage]]
                yield stage, action
                if output := schedule.output_of(stage, action):
                    made.add(output)
                done[stage] += 1
                moved = True
    stuck = [stage for stage, order in enumerate(schedule.orders) if done[stage] < len(order)]
    if stuck:
        waiting = "; ".join(
            _waiting(schedule, stage, schedule.orders[stage][done[stage]], made) for stage in stuck
        )
        raise _broken(schedule, f"stages wait for each other: {waiting}")


def _waiting(schedule: Schedule, stage: int, action: Action, made: set[Output]) -> str:
    missing = next(output for output in schedule.inputs_of(stage, action) if output not in made)
    return (
        f"on stage {stage}, {action} waits for the {missing.content.value} of micro-batch"
        f" {missing.micro_batch} from part {missing.part} on stage"
        f" {schedule.place_of(missing.part)[0]}"
    )


def _broken(schedule: Schedule, what: str) -> ConfigError:
    sizes = f"{schedule.stages} stages and {schedule.micro_batches} micro-batches"
    return ConfigError(f"The schedule {schedule.name!r} for {sizes} cannot run: {what}.")
