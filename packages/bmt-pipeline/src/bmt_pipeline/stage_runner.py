"""``StageRunner``: executes one stage's actions of a schedule.

[Note: a stage that fails] A stage that fails cannot simply stop, because other stages wait for its
outputs. So it goes on with the schedule, computes nothing more, and sends zeros of the right
shapes. After the last action all stages learn of the failure and raise. If a stage fails in its
first micro-batch and does not know the shapes of its output, it sends None in place of the layout,
and then nothing else over that edge.

[Note: joined products] The weight gradients of several micro-batches are computed as one product of
all their rows. It takes less time than several products, and reads and writes the float32 sum of
gradients once, not once per micro-batch. One product of all micro-batches of a step needs no such
sum. The product is computed when the weight gradient of the last of these micro-batches is due.
Until then a chunk keeps the inputs of its linear layers and the gradients of their outputs, for
more micro-batches than the schedule says; ``PostponedGradients.number_to_join`` limits that memory.
If a schedule that splits backwards has fewer than 2 x stages micro-batches, it needs most weight
gradients to fill waits, so each is computed when it is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bmt_core.comm.annotate import annotate
from bmt_core.errors import CallError, RemoteError
from bmt_core.run.runtime import current
from bmt_params.guards.equal_values import first_difference
from bmt_params.modules.batch_parts import BatchParts
from bmt_params.modules.block_use import BlockUse, Scheduled, scheduled_step
from bmt_params.modules.postponed_gradients import PostponedGradients, postpone_weight_gradients
from bmt_params.nested import tensors_in
from bmt_pipeline.agreement import failure_text, raise_own
from bmt_pipeline.block_uses import block_uses
from bmt_pipeline.failures import give_up, step_transfers
from bmt_pipeline.payload import Layout
from bmt_pipeline.schedules import Action, Content, Kind, Output, Schedule
from bmt_pipeline.transfers import Arriving, Transfers


class Part(Protocol):
    """One of the parts of the model, on the stage that computes it."""

    blocks: Sequence[nn.Module]

    def forward(self, micro_batch: int, inputs: Any) -> Any:
        """Compute the part. The output goes to the next part, or from the last part to
        :meth:`Ends.take_output`.
        """

    def kept(self, micro_batch: int) -> list[torch.Tensor]:
        """Return the results of that forward, besides its output, from which backward must
        start too.
        """

    def kept_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        """Return the gradients of :meth:`kept`."""


class Ends(Protocol):
    """The source of the first part's inputs and the sink of the last part's output; used on the
    stages that have these parts.
    """

    def inputs(self, micro_batch: int) -> Any:
        """Return the inputs of the first part."""

    def take_output(self, micro_batch: int, output: Any) -> None:
        """Take the output of the last part."""

    def output_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        """Return the gradients of the tensors in the last part's output that need them."""

    def take_input_gradients(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Take the gradients of the tensors in the first part's inputs that need them."""


Layouts = dict[int, Layout | None]
"""The layout of each part's inputs, by part; under the number of parts, the layout of the last
part's output.

None: the part gets no inputs, because a stage before it has failed.
"""


class StageRunner:
    """Runs this rank's ``stage`` of ``schedule``; ``parts`` are its chunks. ``layers`` are the
    numbers of the layers of each part of the model, on all stages.

    In a step with new shapes ``layouts`` is empty, and the runner adds the layouts of the values
    that this stage receives and computes.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        parts: Sequence[Part],
        ends: Ends,
        transfers: Transfers,
        layouts: Layouts,
        layers: Sequence[range],
    ) -> None:
        self.error: Exception | None = None
        """The error of this stage's computation. Nothing is computed after it: see
        [Note: a stage that fails].
        """
        self.has_failed = False
        """Whether this stage or one before it has failed."""
        self._schedule = schedule
        self._stage = stage
        self._parts = parts
        self._ends = ends
        self._transfers = transfers
        self._layouts = layouts
        self._layers = layers
        # See [Note: the first step goes through host memory] in bmt_pipeline.transfers.
        self._through_host = not layouts
        for told in [
            part
            for part, layout in layouts.items()
            if layout is not None and layout.has_plain_values
        ]:
            # Numbers and other values may change from step to step, on a stage alone. So they are
            # told in every step.
            del layouts[told]
        self._untold = {part + 1 for part in range(schedule.parts - 1) if part + 1 not in layouts}
        self._uses = [block_uses(schedule.orders[stage], chunk) for chunk in range(schedule.chunks)]
        others = [other for other in range(schedule.stages) if other != stage]
        self._batch_parts = BatchParts()
        self._expected = {other: deque(schedule.receives(stage, other)) for other in others}
        self._arriving: dict[Output, Arriving | None] = {}
        # For micro-batches between forward and backward: the inputs of a part that need gradients,
        # and the roots of its graph.
        self._live: dict[_Key, tuple[list[torch.Tensor], list[GradientEdge]]] = {}
        # Outputs for another part of this same stage.
        self._here: dict[Output, list[torch.Tensor]] = {}
        self._postponed: dict[_Key, PostponedGradients] = {}
        # By chunk: see [Note: joined products].
        self._due: list[list[PostponedGradients]] = [[] for _ in parts]
        # By chunk: how many micro-batches are joined in one product.
        self._joins: dict[int, int] = {}
        # By chunk: how many weight gradients are not due yet.
        self._left = [schedule.micro_batches for _ in parts]

    def run(self, actions: Sequence[Action]) -> None:
        """Execute ``actions``, the next ones of the stage's order. An exception of the model
        becomes :attr:`error`.
        """
        with scheduled_step(), self._transfers_of_step():
            for action in actions:
                if action.kind is Kind.FORWARD:
                    self._forward(action)
                elif action.kind is not Kind.WEIGHT_GRADIENT:
                    self._backward(action)
                if action.kind in (Kind.WEIGHT_GRADIENT, Kind.BACKWARD):
                    self._try(lambda action=action: self._compute_weight_gradients(action))  # type: ignore[misc]

    def end(self) -> None:
        """Wait until everything sent has arrived, and reset the blocks to ordinary use."""
        for postponed in [*self._postponed.values(), *(one for due in self._due for one in due)]:
            postponed.drop()  # after a failure
        for part in self._parts:
            _set_use(part.blocks, BlockUse())
        with self._transfers_of_step():
            self._transfers.finish()

    @contextmanager
    def _transfers_of_step(self) -> Iterator[None]:
        """Inside, transfers are made; if one fails after :attr:`error`, that is raised."""
        with step_transfers():
            try:
                yield
            except RemoteError:
                raise_own(self.error)
                raise

    def _forward(self, action: Action) -> None:
        part = self._schedule.part_of(self._stage, action.chunk)
        tensors = self._inputs_of(action, part)
        output = self._try(lambda: self._compute(action, part, tensors))
        if part == self._schedule.parts - 1:
            return
        made = Output(Content.ACTIVATION, action.micro_batch, part)
        destination = self._destination(made)
        if part + 1 in self._untold:
            self._untold.discard(part + 1)
            layout = self._layouts.setdefault(part + 1, None)
            if destination != self._stage:
                with self._purpose(made):
                    self._transfers.send_layout(layout, destination)
        layout = self._layouts[part + 1]
        if layout is not None:
            made_tensors = (
                [self._zeros(t) for t in layout.tensors()] if output is None else tensors_in(output)
            )
            self._hand_over(made, made_tensors)

    def _compute(self, action: Action, part: int, tensors: list[torch.Tensor]) -> Any:
        chunk = self._parts[action.chunk]
        if part == 0:
            inputs = self._ends.inputs(action.micro_batch)
        else:
            layout = self._layouts[part]
            assert layout is not None
            inputs = layout.filled(_leaves(tensors, layout))
        _set_use(chunk.blocks, self._uses[action.chunk][action.micro_batch])
        with self._batch_parts.forward(part, action.micro_batch):
            output = chunk.forward(action.micro_batch, inputs)
        layout = Layout(output, "output")
        if part + 1 in self._untold:
            layout.check_can_be_sent()
        before = self._layouts.setdefault(part + 1, layout)
        if before is not None and before != layout:
            found, wanted = first_difference(layout.text, before.text)
            raise ValueError(
                f"Part {part} of the model returned {found}, but {wanted} for another micro-batch"
                " of the same shapes. A part must return the same shapes and dtypes for every"
                " micro-batch, and other values must be those of the step's first: pad tensors to"
                " one shape, and pass numbers that change as tensors."
            )
        if part == self._schedule.parts - 1:
            self._ends.take_output(action.micro_batch, output)
        if torch.is_grad_enabled():
            roots = [*_differentiable(output), *chunk.kept(action.micro_batch)]
            self._live[_key(action)] = (
                _differentiable(inputs),
                [get_gradient_edge(root) for root in roots],
            )
        return output

    def _backward(self, action: Action) -> None:
        part = self._schedule.part_of(self._stage, action.chunk)
        gradients = self._gradients_for(action, part)
        found = self._try(lambda: self._differentiate(action, part, gradients))
        layout = self._layouts.get(part)
        if part > 0 and layout is not None:
            like = layout.differentiable()
            found = found or [None] * len(like)
            tensors = [
                self._zeros(t) if grad is None else grad
                for t, grad in zip(like, found, strict=True)
            ]
            self._hand_over(Output(Content.GRADIENT, action.micro_batch, part), tensors)

    def _differentiate(
        self, action: Action, part: int, gradients: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        leaves, roots = self._live.pop(_key(action))
        if part == self._schedule.parts - 1:
            gradients = self._ends.output_gradients(action.micro_batch)
        gradients = [*gradients, *self._parts[action.chunk].kept_gradients(action.micro_batch)]
        with postpone_weight_gradients() as postponed:
            if roots:
                torch.autograd.backward(roots, gradients)
        self._postponed[_key(action)] = postponed
        found = [leaf.grad for leaf in leaves]
        if part == 0:
            self._ends.take_input_gradients(action.micro_batch, found)
        return found

    def _compute_weight_gradients(self, action: Action) -> None:
        due = self._due[action.chunk]
        due.append(self._postponed.pop(_key(action)))
        self._left[action.chunk] -= 1
        if action.chunk not in self._joins:
            self._joins[action.chunk] = self._number_to_join(due[0])
        if len(due) == self._joins[action.chunk] or self._left[action.chunk] == 0:
            postponed = PostponedGradients.joined(due)
            due.clear()
            postponed.compute()

    def _number_to_join(self, first: PostponedGradients) -> int:
        """Return how many micro-batches' weight gradients to compute as one product; ``first`` has
        those of one of them.
        """
        schedule = self._schedule
        fills_waits = any(
            action.kind is Kind.WEIGHT_GRADIENT for action in schedule.orders[self._stage]
        )
        if fills_waits and schedule.micro_batches < 2 * schedule.stages:
            return 1
        return first.number_to_join(schedule.micro_batches)

    def _inputs_of(self, action: Action, part: int) -> list[torch.Tensor]:
        return (
            self._received(Output(Content.ACTIVATION, action.micro_batch, part - 1))
            if part > 0
            else []
        )

    def _gradients_for(self, action: Action, part: int) -> list[torch.Tensor]:
        is_last = part == self._schedule.parts - 1
        return (
            []
            if is_last
            else self._received(Output(Content.GRADIENT, action.micro_batch, part + 1))
        )

    def _received(self, made: Output) -> list[torch.Tensor]:
        """Return the output of another part, on this stage or another; an empty list if that part
        has failed.
        """
        source = self._schedule.place_of(made.part)[0]
        if source == self._stage:
            return self._here.pop(made, [])
        self._receive_until(made, source)
        arriving = self._arriving.pop(made)
        if arriving is None:
            self.has_failed = True
            give_up(f"A stage before stage {self._stage} of the pipeline has failed.")
            return []
        return self._transfers.wait(arriving)

    def _receive_until(self, made: Output, source: int) -> None:
        """Start to receive all outputs of the stage ``source`` up to and including ``made``.

        Called only when ``made`` is needed: on GPUs, a receive that waits for its sender
        occupies multiprocessors.
        """
        expected = self._expected[source]
        while made not in self._arriving:
            coming = expected[0]
            boundary = coming.part + 1 if coming.content is Content.ACTIVATION else coming.part
            if boundary not in self._layouts:
                self._untold.discard(boundary)
                with self._purpose(coming):
                    self._layouts[boundary] = self._transfers.receive_layout(source)
            layout = self._layouts[boundary]
            expected.popleft()
            if layout is None:
                self._arriving[coming] = None
                continue
            like = (
                layout.tensors()
                if coming.content is Content.ACTIVATION
                else layout.differentiable()
            )
            with self._purpose(coming):
                self._arriving[coming] = self._transfers.receive(
                    like, source, through_host=self._through_host
                )

    def _hand_over(self, made: Output, tensors: list[torch.Tensor]) -> None:
        destination = self._destination(made)
        if destination == self._stage:
            self._here[made] = [tensor.detach() for tensor in tensors]
        else:
            with self._purpose(made):
                self._transfers.send(tensors, destination, through_host=self._through_host)

    def _purpose(self, made: Output) -> annotate:
        is_forward = made.content is Content.ACTIVATION
        kind, taken_by = ("forward", made.part + 1) if is_forward else ("backward", made.part - 1)
        after, before = (layer_names(self._layers[part]) for part in (made.part, taken_by))
        micro_batch = f"of micro-batch {made.micro_batch}"
        return annotate(f"{micro_batch} after the {kind} of {after}, for the {kind} of {before}")

    def _destination(self, made: Output) -> int:
        destination = self._schedule.destination_of(made)
        assert destination is not None
        return destination

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device=current().device)

    def _try(self, compute: Callable[[], _T]) -> _T | None:
        if self.has_failed:
            return None
        try:
            return compute()
        except Exception as error:
            if isinstance(error, CallError) and current().observer.failure is None:
                raise  # the transfers that follow would fail as well, each after a timeout
            self.error = error
            self.has_failed = True
            give_up(failure_text(error, current().rank, self._stage, "the computation of"))
            return None


def layer_names(layers: range) -> str:
    """Return what errors call the ``layers`` of a part.

    >>> layer_names(range(2, 4)), layer_names(range(2, 3))
    ('layers 2 to 3', 'layer 2')
    """
    first, last = layers[0], layers[-1]
    return f"layers {first} to {last}" if last > first else f"layer {first}"


_T = TypeVar("_T")
_Key = tuple[int, int]


def _key(action: Action) -> _Key:
    return action.micro_batch, action.chunk


def _set_use(blocks: Sequence[nn.Module], use: BlockUse) -> None:
    for block in blocks:
        if isinstance(block, Scheduled):
            block.set_use(use)


def _leaves(tensors: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    pairs = zip(tensors, layout.tensors(), strict=True)
    return [
        tensor.requires_grad_(like.requires_grad and torch.is_grad_enabled())
        for tensor, like in pairs
    ]


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]
