"""``PipelinedCall``: one call of a list of layers on the batches of all ranks of a pipeline,
by GPipe.

All forwards run in the call and all backwards in its backward: the loss comes after the list, so no
other order is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from bmt_core.comm.objects import broadcast_object
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.torch_internals import accumulates
from bmt_params.modules.layer_list import States, run_layers
from bmt_params.nested import tensors_in
from bmt_params.shard import summation_dtype
from bmt_pipeline.agreement import raise_together
from bmt_pipeline.failures import begin_step
from bmt_pipeline.pipeline_ranks import own_stage, pipeline_group
from bmt_pipeline.schedules import Kind, Schedule
from bmt_pipeline.stage_runner import Layouts, StageRunner
from bmt_pipeline.transfers import Transfers
from bmt_pipeline.wait_errors import waiting_for_all
from bmt_pipeline.whole_batch import Arguments, WholeBatch


class LayersOfStage:
    """A part of the list. Its output is the hidden states and, unless it is the last part, all
    other arguments.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        batch_dims: tuple[int, int],
        is_first: bool,
        is_last: bool,
        keeps_states: bool,
    ) -> None:
        self.blocks = layers
        self.states: dict[int, list[torch.Tensor]] = {}
        """The stacked inputs of the layers by micro-batch, one tensor per hidden state."""
        self.state_gradients: dict[int, list[torch.Tensor]] = {}
        self._batch_dims = batch_dims
        self._is_first = is_first
        self._is_last = is_last
        self._keeps_states = keeps_states

    def forward(self, micro_batch: int, inputs: Arguments) -> Any:
        states: States | None = [] if self._keeps_states else None
        self._check_dims_of_plan()
        hidden = run_layers(self.blocks, inputs.hidden, inputs.rest, inputs.kwargs, states)
        if states is not None:
            self.states[micro_batch] = [
                torch.stack(of_hidden) for of_hidden in zip(*states, strict=True)
            ]
        return hidden if self._is_last else Arguments(hidden, inputs.rest, inputs.kwargs)

    def _check_dims_of_plan(self) -> None:
        """Raise :class:`ConfigError` if the first or the last layer knows that the batch is another
        dim than the list says.
        """
        first, last = self.blocks[0], self.blocks[-1]
        into, out = self._batch_dims
        if self._is_first:
            into, _ = getattr(first, "_bmt_batch_dims", self._batch_dims)
        if self._is_last:
            _, out = getattr(last, "_bmt_batch_dims", self._batch_dims)
        wanted = into, out
        if wanted != self._batch_dims:
            raise ConfigError(
                f"This PipelineTransformerBlockList takes dims {self._batch_dims} of the hidden"
                " states that go in and come out for the batch, and by the tensor-parallel plan of"
                f" its layers it is dims {wanted}. Make it with batch_dim={wanted}."
            )

    def kept(self, micro_batch: int) -> list[torch.Tensor]:
        return [state for state in self.states.get(micro_batch, ()) if state.requires_grad]

    def kept_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        pairs = zip(
            self.states.pop(micro_batch, ()), self.state_gradients.pop(micro_batch, ()), strict=True
        )
        return [grad for state, grad in pairs if state.requires_grad]


class BatchEnds:
    """Gives the first part its inputs and takes the last part's output: see
    :class:`bmt_pipeline.stage_runner.Ends`.

    Separate from :class:`PipelinedCall` to avoid a reference cycle with the runner, which only
    garbage collection would free.
    """

    def __init__(self, batch: WholeBatch, output_dim: int) -> None:
        self.batch = batch
        self._output_dim = output_dim
        self.outputs: dict[int, Any] = {}
        self.given: list[torch.Tensor] = []
        """The gradients of the outputs of the whole batch."""
        self.input_gradients: list[torch.Tensor | None] = [None] * len(batch.tensors)
        self._inputs = [tensor.detach() for tensor in batch.tensors]

    def inputs(self, micro_batch: int) -> Any:
        arguments = self.batch.micro_batch(self._inputs, micro_batch)
        for tensor, whole in zip(tensors_in(arguments), self.batch.tensors, strict=True):
            tensor.requires_grad_(whole.requires_grad and torch.is_grad_enabled())
        return arguments

    def take_output(self, micro_batch: int, output: Any) -> None:
        rows, dim = self.batch.shape.rows_of_micro_batch, self._output_dim
        shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
        if any(len(shape) <= dim or shape[dim] != rows for shape in shapes):
            raise ConfigError(
                f"The last layer returned hidden states of shapes {shapes}, whose dim {dim} should"
                f" be the {rows} rows of a micro-batch. If the batch is another dim there, make the"
                " PipelineTransformerBlockList with batch_dim=(dim of the batch in what goes in,"
                " dim of the batch in what comes out)."
            )
        self.outputs[micro_batch] = output

    def output_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        rows = self.batch.rows_of(micro_batch)
        outputs = tensors_in(self.outputs.pop(micro_batch))
        dim = self._output_dim
        pairs = zip(outputs, self.given, strict=True)
        return [grad[rows].movedim(0, dim) for output, grad in pairs if output.requires_grad]

    def take_input_gradients(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        remaining = iter(gradients)
        for index, (whole, dim) in enumerate(
            zip(self.batch.tensors, self.batch.shape.batch_dims, strict=True)
        ):
            grad = next(remaining) if whole.requires_grad else None
            if grad is None:
                continue
            total = self.input_gradients[index]
            if total is None:
                # Only an argument that all rows share gets several gradients, which are summed
                # in float32.
                dtype = whole.dtype if dim is not None else summation_dtype(whole.dtype)
                total = self.input_gradients[index] = torch.zeros_like(whole, dtype=dtype)
            if dim is None:
                total[self.batch.ranks_of(micro_batch)[0]] += grad
            else:
                total[self.batch.rows_of(micro_batch)] = grad.movedim(dim, 0)


class PipelinedCall:
    """One call of the list with ``batch``, in which this rank's stage computes ``parts``.
    Collective over the pipeline.

    ``output_dim``: the dim of the batch in the hidden states after the last layer.
    """

    def __init__(
        self,
        schedule: Schedule,
        parts: Sequence[LayersOfStage],
        batch: WholeBatch,
        output_dim: int,
        transfers: Transfers,
        layouts: Layouts,
        layers: Sequence[range],
    ) -> None:
        self._schedule = schedule
        self._parts = parts
        self._batch = batch
        self._ends = BatchEnds(batch, output_dim)
        self._output_dim = output_dim
        self._group = pipeline_group()
        self._is_last = own_stage() == schedule.place_of(schedule.parts - 1)[0]
        self._layouts = layouts
        self._runner = StageRunner(
            schedule, own_stage(), parts, self._ends, transfers, layouts, layers
        )
        order = schedule.orders[own_stage()]
        self._forwards = [action for action in order if action.kind is Kind.FORWARD]
        self._backwards = [action for action in order if action.kind is not Kind.FORWARD]

    def run(self, needs_gradients: bool) -> list[torch.Tensor]:
        """Return the output of the whole batch on the last stage, and tensors with 0 rows on
        the others.

        There is one tensor per hidden state of the last layer. If hidden states are kept, one more
        per hidden state follows, with the inputs of this stage's layers: its rows are ordered by
        (rank, layer, row of the rank).
        """
        if not needs_gradients:
            return self._run_forward()
        leaf = torch.empty(0, requires_grad=True, device="cpu")
        made: Any = _Differentiable.apply(self, leaf, *self._batch.tensors)  # type: ignore[no-untyped-call]
        return list(made)

    def _run_forward(self) -> list[torch.Tensor]:
        runner, parts = self._runner, self._schedule.parts
        is_new = parts not in self._layouts
        runner.run(self._forwards)
        runner.end()
        raise_together(self._group, runner.error, runner.has_failed)
        if is_new:
            source = self._schedule.place_of(parts - 1)[0]
            with waiting_for_all("to learn what the last stage returns"):
                self._layouts[parts] = broadcast_object(
                    self._layouts.get(parts), self._group, source
                )
        layout = self._layouts[parts]
        assert layout is not None
        made = [
            self._joined(index, like.movedim(self._output_dim, 0))
            for index, like in enumerate(layout.tensors())
        ]
        return made + self._joined_states()

    def run_backward(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients of the whole batch, given those of the results of :meth:`run`.
        Collective.
        """
        # Failures in backward have a number of their own: another pipeline may still be in forward.
        begin_step()
        layout = self._layouts[self._schedule.parts]
        assert layout is not None
        count = len(layout.tensors())
        self._ends.given = list(grads[:count])
        self._divide_state_gradients(grads[count:])
        runner = self._runner
        runner.run(self._backwards)
        runner.end()
        raise_together(self._group, runner.error, runner.has_failed)
        pairs = zip(self._ends.input_gradients, self._batch.tensors, strict=True)
        return [None if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs]

    def _joined(self, index: int, like: torch.Tensor) -> torch.Tensor:
        if not self._is_last:
            return torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=current().device)
        outputs = [
            tensors_in(self._ends.outputs[number])[index]
            for number in range(self._schedule.micro_batches)
        ]
        return torch.cat([output.detach().movedim(self._output_dim, 0) for output in outputs])

    def _joined_states(self) -> list[torch.Tensor]:
        """Return, per hidden state, rows of (rank, layer of this stage, row of the rank)."""
        shape, dim = self._batch.shape, self._output_dim
        by_part = [
            [
                torch.cat([s.detach().movedim(dim + 1, 1) for s in of_hidden], 1)
                for of_hidden in zip(*states, strict=True)
            ]
            for part in self._parts
            if (states := [part.states[number] for number in sorted(part.states)])
        ]
        joined = [torch.cat(of_hidden) for of_hidden in zip(*by_part, strict=True)]
        return [
            torch.unflatten(s, 1, (shape.ranks, shape.rows)).transpose(0, 1).flatten(0, 2)
            for s in joined
        ]

    def _divide_state_gradients(self, grads: Sequence[torch.Tensor]) -> None:
        shape, dim = self._batch.shape, self._output_dim
        lengths = [len(part.blocks) for part in self._parts]
        sizes = (shape.ranks, sum(lengths), shape.rows)
        by_layer = [torch.unflatten(grad, 0, sizes).transpose(0, 1).flatten(1, 2) for grad in grads]
        by_hidden = [torch.split(layers, lengths) for layers in by_layer]
        for number, part in enumerate(self._parts):
            for micro_batch in part.states:
                rows = self._batch.rows_of(micro_batch)
                part.state_gradients[micro_batch] = [
                    g[number][:, rows].movedim(1, dim + 1) for g in by_hidden
                ]


class _Differentiable(torch.autograd.Function):
    """(call, leaf, tensors of the whole batch…) -> results of the call…"""

    @staticmethod
    def forward(
        ctx: Any, call: PipelinedCall, leaf: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.leaf = call, leaf
        with torch.enable_grad():
            made = call._run_forward()
        whole_numbers = [t for t in made if not t.is_floating_point() and not t.is_complex()]
        ctx.mark_non_differentiable(*whole_numbers)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        if not accumulates(ctx.leaf):
            raise RuntimeError(
                "Stages compute the gradients of all their parameters, so torch.autograd.grad() and"
                " backward(inputs=...) cannot go through a pipelined list. Use backward(), and"
                " read .grad."
            )
        call, ctx.call = ctx.call, None
        if call is None:
            raise RuntimeError(
                "Backward runs a second time through one call of a pipelined list, whose stages"
                " have freed their graphs. Call the list again, or add the losses and run"
                " backward once."
            )
        return None, None, *call.run_backward(grads)
