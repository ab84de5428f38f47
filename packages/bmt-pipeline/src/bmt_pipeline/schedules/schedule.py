"""``Schedule``: the order of actions of each stage of a pipeline in one step, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from bmt_core.errors import ConfigError


class Kind(Enum):
    """What an action computes. ``BACKWARD`` computes the input gradient and the weight
    gradient together.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One computation of a stage, for one micro-batch and one of the stage's parts of the model,
    its ``chunk``.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (
            f" of chunk {self.chunk}" if self.chunk else ""
        )


class Content(Enum):
    """The kinds of data that parts send each other: activations to the next part, gradients to the
    previous one.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Output(NamedTuple):
    """The result of ``part`` for one micro-batch: the activation that it returns, or the gradient
    of its input.
    """

    content: Content
    micro_batch: int
    part: int


class Placement(Enum):
    """The assignment of the model's parts to stages.

    ``LOOP``: part p is chunk p // stages of stage p % stages. ``V``: two chunks. The first half of
    the parts is assigned from the first stage to the last and the second half from the last to the
    first, so the first stage has the first and the last part.
    """

    LOOP = "loop"
    V = "v"

    def part_of(self, stage: int, chunk: int, stages: int) -> int:
        """Return the part of the model that is ``chunk`` of ``stage``.

        >>> [Placement.V.part_of(stage, 1, stages=4) for stage in range(4)]
        [7, 6, 5, 4]
        """
        if self is Placement.V and chunk == 1:
            return 2 * stages - 1 - stage
        return chunk * stages + stage

    def place_of(self, part: int, stages: int) -> tuple[int, int]:
        """Return the stage and the chunk of ``part``.

        >>> Placement.LOOP.place_of(5, stages=4), Placement.V.place_of(5, stages=4)
        ((1, 1), (2, 1))
        """
        chunk, stage = divmod(part, stages)
        return (stages - 1 - stage if self is Placement.V and chunk == 1 else stage), chunk


_CHANGES_OF_LIVE = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: -1,
    Kind.INPUT_GRADIENT: 0,
    Kind.WEIGHT_GRADIENT: -1,
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of the actions of each stage in one step of ``micro_batches`` micro-batches.

    The model is divided into ``stages`` x ``chunks`` parts, and :class:`Placement` assigns them to
    stages. A forward needs the forward of the previous part. A backward or input gradient needs the
    forward of its own part and the backward or input gradient of the next part. A weight gradient
    needs the input gradient of its own part.

    An output that is needed on another stage is sent there. Outputs from one stage to another are
    sent in the order in which the sender computes them (:meth:`sends`), and received in the
    same order.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int = 1
    placement: Placement = Placement.LOOP
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        check_sizes(self.stages, self.micro_batches, self.chunks)
        if len(self.orders) != self.stages:
            raise ConfigError(
                f"The schedule {self.name!r} has {self.stages} stages and orders of"
                f" {len(self.orders)}. Give one order per stage."
            )
        if self.placement is Placement.V and self.chunks != 2:
            raise ConfigError(
                f"In the placement 'v' each stage has 2 chunks, and {self.name!r} has"
                f" {self.chunks}. Set chunks=2, or use 'loop'."
            )

    @property
    def parts(self) -> int:
        """The number of parts of the model."""
        return self.stages * self.chunks

    def part_of(self, stage: int, chunk: int) -> int:
        """Return the part of the model that is ``chunk`` of ``stage``."""
        return self.placement.part_of(stage, chunk, self.stages)

    def place_of(self, part: int) -> tuple[int, int]:
        """Return the stage and the chunk of ``part``."""
        return self.placement.place_of(part, self.stages)

    def output_of(self, stage: int, action: Action) -> Output | None:
        """Return the output of ``action`` on ``stage``; None for a weight gradient, which no other
        action needs.
        """
        return output_of(action, self.part_of(stage, action.chunk))

    def inputs_of(self, stage: int, action: Action) -> tuple[Output, ...]:
        """Return the outputs that ``action`` on ``stage`` needs, from this stage or another."""
        return inputs_of(action, self.part_of(stage, action.chunk), self.parts)

    def destination_of(self, output: Output) -> int | None:
        """Return the stage whose part needs ``output``; None for the model's output and the
        gradient of the model's input.
        """
        neighbour = output.part + 1 if output.content is Content.ACTIVATION else output.part - 1
        return self.place_of(neighbour)[0] if 0 <= neighbour < self.parts else None

    def sends(self, stage: int, destination: int) -> tuple[Output, ...]:
        """Return the outputs that ``stage`` sends to the stage ``destination`` in one step,
        in order.
        """
        return tuple(
            output
            for output in self._outputs(stage)
            if self.destination_of(output) == destination != stage
        )

    def receives(self, stage: int, source: int) -> tuple[Output, ...]:
        """Return the outputs that ``stage`` receives from the stage ``source`` in one step, in the
        order of sending.
        """
        return self.sends(source, stage)

    def peak_live(self, stage: int) -> int:
        """Return the largest number of micro-batches, counted once per chunk, whose activations
        ``stage`` holds at once.

        Activations are held from the forward to the end of the backward or of the weight gradient.
        """
        changes = (_CHANGES_OF_LIVE[action.kind] for action in self.orders[stage])
        return max(accumulate(changes), default=0)

    def _outputs(self, stage: int) -> Iterator[Output]:
        for action in self.orders[stage]:
            if output := self.output_of(stage, action):
                yield output


def output_of(action: Action, part: int) -> Output | None:
    """Return the output of ``action`` in ``part``; None if no other action needs one."""
    if action.kind is Kind.WEIGHT_GRADIENT:
        return None
    content = Content.ACTIVATION if action.kind is Kind.FORWARD else Content.GRADIENT
    return Output(content, action.micro_batch, part)


def inputs_of(action: Action, part: int, parts: int) -> tuple[Output, ...]:
    """Return the outputs that ``action`` needs in ``part``, one of the model's ``parts``."""
    micro_batch = action.micro_batch
    if action.kind is Kind.FORWARD:
        return (Output(Content.ACTIVATION, micro_batch, part - 1),) if part > 0 else ()
    if action.kind is Kind.WEIGHT_GRADIENT:
        return (Output(Content.GRADIENT, micro_batch, part),)
    own_forward = Output(Content.ACTIVATION, micro_batch, part)
    return (
        (own_forward, Output(Content.GRADIENT, micro_batch, part + 1))
        if part < parts - 1
        else (own_forward,)
    )


def check_sizes(stages: int, micro_batches: int, chunks: int) -> None:
    """Raise :class:`ConfigError` unless all three are at least 1."""
    for noun, size in {"stages": stages, "micro-batches": micro_batches, "chunks": chunks}.items():
        if size < 1:
            raise ConfigError(f"The number of {noun} must be at least 1, and got {size}.")
