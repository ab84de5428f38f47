"""``ListScheduler``: finds the order of each stage by greedy list scheduling on a virtual clock."""

from __future__ import annotations

from typing import NamedTuple

from bmt_core.errors import ConfigError
from bmt_pipeline.schedules.schedule import Action, Kind, Output, Placement, inputs_of, output_of
from bmt_pipeline.schedules.times import Times

_PREFERRED = {Kind.INPUT_GRADIENT: 0, Kind.FORWARD: 1, Kind.WEIGHT_GRADIENT: 2}


class _Choice(NamedTuple):
    """An action that a stage can do next. Choices are compared field by field, and the smallest
    is taken.
    """

    start: float
    preference: int
    micro_batch: int
    last_part_first: int
    action: Action


class ListScheduler:
    """Gives each stage the action that can start first; among several, input gradients before
    forwards before weight gradients.

    A stage holds activations of at most ``most_live`` micro-batches, counted once per chunk, from
    the forward to the end of the weight gradient. A forward of any chunk but the last must leave
    one of these places free. So the oldest micro-batch of a stage can always proceed, and no stage
    waits forever.
    """

    def __init__(
        self,
        stages: int,
        micro_batches: int,
        chunks: int,
        placement: Placement,
        *,
        times: Times,
        most_live: int,
    ) -> None:
        if most_live < chunks:
            raise ConfigError(
                f"Each stage has {chunks} chunks, and most_live={most_live}. Allow at"
                f" least {chunks}."
            )
        self.stages = stages
        self.micro_batches = micro_batches
        self.chunks = chunks
        self.placement = placement
        self.times = times
        self.most_live = most_live
        self.orders: list[list[Action]] = [[] for _ in range(stages)]
        self._next = [
            {(kind, chunk): 0 for kind in _PREFERRED for chunk in range(chunks)}
            for _ in range(stages)
        ]
        self._live = [0] * stages
        self._free_at = [0.0] * stages
        self._made: dict[Output, tuple[int, float]] = {}

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Return the order of each stage."""
        choices = [self._choose(stage) for stage in range(self.stages)]
        for _ in range(len(_PREFERRED) * self.stages * self.chunks * self.micro_batches):
            _, stage = min((choice.start, stage) for stage, choice in enumerate(choices) if choice)
            chosen = choices[stage]
            assert chosen is not None
            receiver = self._do(stage, chosen)
            for changed in {stage, receiver}:
                choices[changed] = self._choose(changed)
        return tuple(map(tuple, self.orders))

    def _choose(self, stage: int) -> _Choice | None:
        choices = (
            self._choice(stage, Action(kind, index, chunk))
            for (kind, chunk), index in self._next[stage].items()
        )
        return min((choice for choice in choices if choice), default=None)

    def _choice(self, stage: int, action: Action) -> _Choice | None:
        if action.micro_batch == self.micro_batches or not self._fits(stage, action):
            return None
        part = self.placement.part_of(stage, action.chunk, self.stages)
        start = self._free_at[stage]
        for needed in inputs_of(action, part, self.stages * self.chunks):
            if needed not in self._made:
                return None
            source, end = self._made[needed]
            start = max(start, end if source == stage else end + self.times.transfer)
        return _Choice(start, _PREFERRED[action.kind], action.micro_batch, -part, action)

    def _fits(self, stage: int, action: Action) -> bool:
        if action.kind is not Kind.FORWARD:
            return True
        kept_free = 0 if action.chunk == self.chunks - 1 else 1
        return self._live[stage] + kept_free < self.most_live

    def _do(self, stage: int, choice: _Choice) -> int:
        """Append the chosen action and return the stage that gets its output, or
        ``stage`` itself.
        """
        action = choice.action
        part = self.placement.part_of(stage, action.chunk, self.stages)
        self.orders[stage].append(action)
        self._next[stage][action.kind, action.chunk] += 1
        self._free_at[stage] = choice.start + self.times.of(action.kind, part)
        if action.kind is Kind.FORWARD:
            self._live[stage] += 1
        if action.kind is Kind.WEIGHT_GRADIENT:
            self._live[stage] -= 1
        output = output_of(action, part)
        if output is None:
            return stage
        self._made[output] = (stage, self._free_at[stage])
        neighbour = part + 1 if action.kind is Kind.FORWARD else part - 1
        if not 0 <= neighbour < self.stages * self.chunks:
            return stage
        return self.placement.place_of(neighbour, self.stages)[0]
