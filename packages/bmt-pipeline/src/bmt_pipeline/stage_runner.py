"""``StageRunner``: executes one stage's actions of a schedule.

[Note: a stage that fails] Stages cannot stop where they are: others wait for what they would send. So a stage whose computation
fails goes on with the schedule, computes nothing more, and sends what has the right shapes. When all actions are over, all
stages learn of the failure and raise. Before the first micro-batch the shapes are not known: then the layout says that there will
be none, and nothing travels over that edge.

[Note: joined products] The weight gradients of several micro-batches are one product of all their rows. It reads and writes the sum
of gradients once, where several products would do so each, and takes less time itself. One product of all micro-batches of a step
needs no sum. So weight gradients are computed when those of the last of these micro-batches are due. Until then a chunk keeps the
inputs of its linear layers and the gradients of their outputs for more micro-batches than the schedule says;
``PostponedGradients.number_to_join`` limits that memory. Where a schedule has so few micro-batches that it fills waits with most of
its weight gradients, each is computed when it is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bmt_core.inspect import BatchParts
from bmt_core.modules.block_use import BlockUse, Scheduled, scheduled_step
from bmt_core.modules.postponed_gradients import PostponedGradients, postpone_weight_gradients
from bmt_core.nested import tensors_in
from bmt_core.run.runtime import current
from bmt_pipeline.agreement import failure_text
from bmt_pipeline.block_uses import block_uses
from bmt_pipeline.failures import tell_failure
from bmt_pipeline.payload import Layout
from bmt_pipeline.schedules import Action, Content, Kind, Output, Schedule
from bmt_pipeline.transfers import Arriving, Transfers


class Part(Protocol):
    """One of the parts into which the model is cut, on the stage that has it."""

    blocks: Sequence[nn.Module]

    def forward(self, micro_batch: int, inputs: Any) -> Any:
        """Return what the next part gets, or of the last part, what :class:`Ends` gets. ``inputs``: of the part before."""

    def kept(self, micro_batch: int) -> list[torch.Tensor]:
        """Return tensors of that forward, besides what it returned, whose gradients backward starts from."""

    def kept_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        """Return their gradients."""


class Ends(Protocol):
    """What is before the first part and after the last one; only the stages that have those ask."""

    def inputs(self, micro_batch: int) -> Any:
        """Return what the first part gets."""

    def take_output(self, micro_batch: int, output: Any) -> None:
        """Take what the last part has made."""

    def output_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        """Return the gradients of the tensors in the last part's output that need them."""

    def take_input_gradients(self, micro_batch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the tensors in the first part's inputs that need them."""


Layouts = dict[int, Layout | None]
"""By part: how what it gets is laid out, and by the number of parts, how what the last one makes is.

None: it gets nothing, because a stage before it has failed.
"""


class StageRunner:
    """Runs this rank's ``stage`` of ``schedule``, whose chunks are ``parts``.

    ``layouts`` is empty in a step of new shapes, and then gets those of what this stage receives and makes.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        parts: Sequence[Part],
        ends: Ends,
        transfers: Transfers,
        layouts: Layouts,
    ) -> None:
        self.error: Exception | None = None
        """What the computation of this stage has raised. Nothing is computed after it: see [Note: a stage that fails]."""
        self.has_failed = False
        """Whether this stage or one before it has failed."""
        self._schedule = schedule
        self._stage = stage
        self._parts = parts
        self._ends = ends
        self._transfers = transfers
        self._layouts = layouts
        self._untold = {part + 1 for part in range(schedule.parts - 1) if part + 1 not in layouts}
        self._uses = [block_uses(schedule.orders[stage], chunk) for chunk in range(schedule.chunks)]
        others = [other for other in range(schedule.stages) if other != stage]
        self._batch_parts = BatchParts()
        self._expected = {other: deque(schedule.receives(stage, other)) for other in others}
        self._arriving: dict[Output, Arriving | None] = {}
        # Of micro-batches between their forward and their backward: what a part got, and the roots of its graph.
        self._live: dict[_Key, tuple[list[torch.Tensor], list[GradientEdge]]] = {}
        self._here: dict[Output, list[torch.Tensor]] = {}  # what one part of this stage has made for another one
        self._postponed: dict[_Key, PostponedGradients] = {}
        self._due: list[list[PostponedGradients]] = [[] for _ in parts]  # by chunk: see [Note: joined products]
        self._joins: dict[int, int] = {}  # by chunk: of how many micro-batches
        self._left = [schedule.micro_batches for _ in parts]  # by chunk: whose weight gradients are not due yet

    def run(self, actions: Sequence[Action]) -> None:
        """Execute ``actions``, which go on where those before ended. What the model raises becomes :attr:`error`."""
        with scheduled_step():
            for action in actions:
                if action.kind is Kind.FORWARD:
                    self._forward(action)
                elif action.kind is not Kind.WEIGHT_GRADIENT:
                    self._backward(action)
                if action.kind in (Kind.WEIGHT_GRADIENT, Kind.BACKWARD):
                    self._try(lambda action=action: self._compute_weight_gradients(action))  # type: ignore[misc]

    def end(self) -> None:
        """Wait for what was sent, and let the blocks be used as usual."""
        for postponed in [*self._postponed.values(), *(one for due in self._due for one in due)]:
            postponed.drop()  # after a failure
        for part in self._parts:
            _set_use(part.blocks, BlockUse())
        self._transfers.finish()

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
                self._transfers.send_layout(layout, destination)
        layout = self._layouts[part + 1]
        if layout is not None:
            made_tensors = [self._zeros(t) for t in layout.tensors()] if output is None else tensors_in(output)
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
        layout = Layout(output)
        if self._layouts.setdefault(part + 1, layout) != layout:
            raise ValueError(
                f"Part {part} of the model returned {layout}, and for another micro-batch of the same shapes"
                f" {self._layouts[part + 1]}. What goes from stage to stage must be laid out alike: pad tensors to one shape, and"
                " pass numbers that change as tensors."
            )
        if part == self._schedule.parts - 1:
            self._ends.take_output(action.micro_batch, output)
        if torch.is_grad_enabled():
            roots = [*_differentiable(output), *chunk.kept(action.micro_batch)]
            self._live[_key(action)] = _differentiable(inputs), [get_gradient_edge(root) for root in roots]
        return output

    def _backward(self, action: Action) -> None:
        part = self._schedule.part_of(self._stage, action.chunk)
        gradients = self._gradients_for(action, part)
        found = self._try(lambda: self._differentiate(action, part, gradients))
        layout = self._layouts.get(part)
        if part > 0 and layout is not None:
            like = layout.differentiable()
            found = found or [None] * len(like)
            tensors = [self._zeros(t) if grad is None else grad for t, grad in zip(like, found, strict=True)]
            self._hand_over(Output(Content.GRADIENT, action.micro_batch, part), tensors)

    def _differentiate(self, action: Action, part: int, gradients: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
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
        """Return for how many micro-batches weight gradients are one product, of which ``first`` is one."""
        schedule = self._schedule
        fills_waits = any(action.kind is Kind.WEIGHT_GRADIENT for action in schedule.orders[self._stage])
        if fills_waits and schedule.micro_batches < 2 * schedule.stages:
            return 1
        return first.number_to_join(schedule.micro_batches)

    def _inputs_of(self, action: Action, part: int) -> list[torch.Tensor]:
        return self._received(Output(Content.ACTIVATION, action.micro_batch, part - 1)) if part > 0 else []

    def _gradients_for(self, action: Action, part: int) -> list[torch.Tensor]:
        is_last = part == self._schedule.parts - 1
        return [] if is_last else self._received(Output(Content.GRADIENT, action.micro_batch, part + 1))

    def _received(self, made: Output) -> list[torch.Tensor]:
        """Return what another part has made, on this stage or another; nothing if it has failed."""
        source = self._schedule.place_of(made.part)[0]
        if source == self._stage:
            return self._here.pop(made, [])
        self._receive_until(made, source)
        arriving = self._arriving.pop(made)
        if arriving is None:
            self.has_failed = True
            return []
        return self._transfers.wait(arriving)

    def _receive_until(self, made: Output, source: int) -> None:
        """Start to receive what the stage ``source`` sends up to ``made``.

        Not ahead of its use: on GPUs, a receive that waits for its sender takes multiprocessors from the computation.
        """
        expected = self._expected[source]
        while made not in self._arriving:
            coming = expected[0]
            boundary = coming.part + 1 if coming.content is Content.ACTIVATION else coming.part
            if boundary not in self._layouts:
                self._untold.discard(boundary)
                self._layouts[boundary] = self._transfers.receive_layout(source)
            layout = self._layouts[boundary]
            expected.popleft()
            if layout is None:
                self._arriving[coming] = None
                continue
            like = layout.tensors() if coming.content is Content.ACTIVATION else layout.differentiable()
            self._arriving[coming] = self._transfers.receive(like, source)

    def _hand_over(self, made: Output, tensors: list[torch.Tensor]) -> None:
        destination = self._destination(made)
        if destination == self._stage:
            self._here[made] = [tensor.detach() for tensor in tensors]
        else:
            self._transfers.send(tensors, destination)

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
            self.error = error
            self.has_failed = True
            tell_failure(failure_text(error, current().rank, self._stage, "the computation of"))
            return None


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
    return [tensor.requires_grad_(like.requires_grad and torch.is_grad_enabled()) for tensor, like in pairs]


def _differentiable(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]
