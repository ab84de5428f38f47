"""``train_step``: one step of a pipeline with the loss inside, so that backwards begin before all forwards are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bmt_core.errors import ConfigError
from bmt_core.modules.block_use import Scheduled
from bmt_core.modules.layer_list import run_layers
from bmt_core.modules.outermost_call import gather_as_leaves, module_call
from bmt_core.nested import map_tensors, tensors_in
from bmt_core.params.parameter import DistributedParameter
from bmt_core.params.shard import summation_dtype
from bmt_core.run.runtime import current
from bmt_pipeline.agreement import agreed_key, raise_together
from bmt_pipeline.block_list import PipelineTransformerBlockList, what_needs_gradients
from bmt_pipeline.payload import Layout
from bmt_pipeline.pipeline_model import PipelineModel, as_tuple
from bmt_pipeline.pipeline_ranks import pipeline_group
from bmt_pipeline.schedules import Schedule, make_schedule
from bmt_pipeline.stage_runner import Layouts, StageRunner
from bmt_pipeline.whole_batch import Arguments

Loss = Callable[[Any, Any], torch.Tensor]


class ScalesLoss(Protocol):
    """The part of ``OptimManager`` that :func:`train_step` uses."""

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the loss scale, divided so that summed gradients are those of the global mean loss."""


def train_step(
    model: PipelineModel,
    loss_fn: Loss,
    batch: tuple[Any, Any],
    schedule: str | Schedule = "1f1b",
    num_micro_batches: int | None = None,
    *,
    manager: ScalesLoss | None = None,
) -> torch.Tensor:
    """Run forward and backward of one batch through the stages by ``schedule``. Return the batch's mean loss, on every rank.

    ``batch`` is (inputs, targets), one batch per pipeline. Only the first stage reads the inputs, and only the stage of the last
    layer the targets; other ranks may pass the same batch or None. Inputs, a tensor or a tuple, go to ``model.before_layers``.
    Inputs and targets are divided along dim 0 into ``num_micro_batches`` (default: that of :func:`init_distributed`, else the
    number of stages). ``loss_fn(output, targets)`` returns the mean loss of a micro-batch; the loss of the batch is the mean of
    these.

    ``schedule`` is ``"1f1b"``, ``"gpipe"``, ``"zero-bubble"`` (it computes weight gradients when a stage would wait), or a
    :class:`Schedule`. For a list of layers made with ``chunks=2`` or more it may be ``"interleaved"``; with
    ``chunks=2, placement="v"`` ``"zero-bubble"`` has the smallest bubble. The docstrings in ``bmt_pipeline.schedules`` say how
    large the bubble is and how many micro-batches are live. Inputs of linear layers and gradients of their outputs may be kept
    longer: see :meth:`PostponedGradients.number_to_join`.

    Gradients are added to ``.grad`` as ``manager.backward(loss)`` would add them, with the manager's scale and division. Without a
    manager they are those of ``loss.backward()`` on every rank: sums over all ranks, or means after
    ``init_distributed(gradients="mean")``. Then clip and step as usual::

        loss = train_step(model, loss_fn, (ids, targets), "1f1b", num_micro_batches=8, manager=optim_manager)
        optim_manager.step()

    Collective over all ranks. Raises :class:`ConfigError` on all ranks of a pipeline if the batch cannot be divided or the schedule
    is not defined for these sizes. If a stage fails, that stage raises its error and the others :class:`RemoteError` with its
    traceback.
    """
    if not isinstance(model, PipelineModel):
        raise TypeError(
            f"train_step runs a PipelineModel, not {type(model).__name__}. Derive the model from PipelineModel, and define"
            " before_layers and after_layers."
        )
    if manager is not None:
        # Only the last stage has losses to scale, but scaling also prepares the gradients that every rank has.
        manager.scale_loss(torch.zeros(()))
    layers = model.pipelined_layers()
    count = num_micro_batches or current().settings.num_micro_batches or layers.stages
    made = make_schedule(schedule, layers.stages, count, layers.chunks)
    _check_placement(made, layers)
    _check_blocks(model, layers)
    group = pipeline_group()
    problem: Exception | None = None
    text = ""
    try:
        step = _Step(model, layers, loss_fn, batch, made, manager)
        text = step.text
    except Exception as error:
        problem = error
    settings = f"train_step with {made.name}, num_micro_batches={count}"
    key = agreed_key(group, settings, f"{text} {what_needs_gradients(model)}", problem)
    with module_call(model), torch.enable_grad(), layers.layouts(key) as layouts:
        return step.run(layouts)


class _Step:
    """One step on this rank's stage; gives the first part its inputs and takes the losses."""

    def __init__(
        self,
        model: PipelineModel,
        layers: PipelineTransformerBlockList,
        loss_fn: Loss,
        batch: tuple[Any, Any],
        schedule: Schedule,
        manager: ScalesLoss | None,
    ) -> None:
        self.losses: dict[int, torch.Tensor] = {}
        self._model = model
        self._layers = layers
        self._loss_fn = loss_fn
        self._schedule = schedule
        self._manager = manager
        stage, last = layers.stage_id, schedule.place_of(schedule.parts - 1)[0]
        count = schedule.micro_batches
        self._inputs = _micro_batches(as_tuple(batch[0]), count, "inputs") if stage == 0 else []
        self._targets = _micro_batches(batch[1], count, "targets") if stage == last else []
        self.text = " ".join(Layout(part[0]).text() for part in (self._inputs, self._targets) if part)

    def run(self, layouts: Layouts) -> torch.Tensor:
        """Run the schedule; return the mean loss."""
        layers, schedule, group = self._layers, self._schedule, pipeline_group()
        outside = [p for p in self._model.parameters() if isinstance(p, DistributedParameter) and not p._in_block]
        pairs = gather_as_leaves(outside)
        sums = [_GradientSum(leaf) for whole, leaf in pairs if whole.requires_grad]
        parts = [
            _Part(self, blocks, schedule.part_of(layers.stage_id, chunk))
            for chunk, blocks in enumerate(layers.layers_of_chunks())
        ]
        runner = StageRunner(schedule, layers.stage_id, parts, self, layers.transfers(schedule), layouts)
        runner.run(schedule.orders[layers.stage_id])
        runner.end()
        raise_together(group, runner.error, runner.has_failed)
        trained = [whole for whole, _ in pairs if whole.requires_grad]
        if trained:
            # Collective: ranks whose stage has not used a parameter take part too.
            torch.autograd.backward(trained, [sum_.rounded(whole) for whole, sum_ in zip(trained, sums, strict=True)])
        return self._mean_loss()

    def compute(self, part: int, blocks: Sequence[torch.nn.Module], micro_batch: int, inputs: Any) -> Any:
        """Run one part of the model: its layers, and ``before_layers`` or ``after_layers`` in the first or last part."""
        if part == 0:
            called = self._layers.split_arguments(as_tuple(self._model.before_layers(*inputs)))
            inputs = Arguments(*called, {})
        hidden = run_layers(blocks, inputs.hidden, inputs.rest, inputs.kwargs)
        if part < self._schedule.parts - 1:
            return Arguments(hidden, inputs.rest, inputs.kwargs)
        loss = self._loss_fn(self._model.after_layers(*hidden), self._targets[micro_batch])
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            found = Layout(loss) if isinstance(loss, torch.Tensor) else repr(loss)
            raise ValueError(
                f"loss_fn must return a scalar tensor that requires gradients, not {found}."
                " Return the mean loss of a micro-batch."
            )
        self.losses[micro_batch] = loss.detach()
        # The batch's loss is the mean over micro-batches, times the number of stages, as if every rank of the pipeline computed it.
        scaled = loss if self._manager is None else self._manager.scale_loss(loss)
        return scaled * (self._schedule.stages / self._schedule.micro_batches)

    def inputs(self, micro_batch: int) -> Any:
        """See :class:`bmt_pipeline.stage_runner.Ends`."""
        return self._inputs[micro_batch]

    def take_output(self, micro_batch: int, output: Any) -> None:
        pass

    def output_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        return [torch.ones_like(self.losses[micro_batch])]

    def take_input_gradients(self, micro_batch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        pass

    def _mean_loss(self) -> torch.Tensor:
        group, device = pipeline_group(), current().device
        own = [self.losses[number].float() for number in sorted(self.losses)]
        mean = torch.stack(own).mean() if own else torch.zeros((), device=device)
        group.broadcast(mean, self._schedule.place_of(self._schedule.parts - 1)[0]).wait()
        return mean


class _GradientSum:
    """Sums the gradients that ``leaf`` gets from micro-batches, from the second one on in float32."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self._total: torch.Tensor | None = None
        leaf.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]  # torch annotates nothing

    def rounded(self, like: torch.Tensor) -> torch.Tensor:
        """Return the sum in the dtype of ``like``; zeros if there was no gradient."""
        return torch.zeros_like(like) if self._total is None else self._total.to(like.dtype)

    def _take(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if self._total is None or grad is None:
            self._total = grad
        else:
            self._total = self._total.to(summation_dtype(grad.dtype))
            self._total += grad


class _Part:
    """See :class:`bmt_pipeline.stage_runner.Part`."""

    def __init__(self, step: _Step, blocks: Sequence[torch.nn.Module], part: int) -> None:
        self.blocks = blocks
        self._step = step
        self._part = part

    def forward(self, micro_batch: int, inputs: Any) -> Any:
        return self._step.compute(self._part, self.blocks, micro_batch, inputs)

    def kept(self, micro_batch: int) -> list[torch.Tensor]:
        return []

    def kept_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        return []


def _micro_batches(value: Any, count: int, what: str) -> list[Any]:
    """Divide every tensor in ``value`` along dim 0."""
    tensors = tensors_in(value)
    if not tensors:
        raise ConfigError(f"This stage needs the {what} of the batch, and got none: pass (inputs, targets).")
    rows = tensors[0].shape[0] if tensors[0].dim() else 0
    if any(tensor.dim() == 0 or tensor.shape[0] != rows for tensor in tensors):
        raise ConfigError(
            f"All tensors in the {what} must have the batch as dim 0, with the same size, but these are {Layout(value)}."
        )
    if rows == 0 or rows % count:
        raise ConfigError(
            f"The {what} have {rows} rows, which cannot be divided into num_micro_batches={count} equal parts."
            " Change the batch or num_micro_batches."
        )
    divided = [iter(tensor.detach().chunk(count)) for tensor in tensors]
    made = []
    for _ in range(count):
        parts = iter([next(of_tensor) for of_tensor in divided])
        made.append(map_tensors(lambda _, parts=parts: next(parts), value))  # type: ignore[misc]
    return made


def _check_placement(schedule: Schedule, layers: PipelineTransformerBlockList) -> None:
    if schedule.placement is not layers.placement and schedule.chunks > 1:
        raise ConfigError(
            f"The schedule {schedule.name!r} with chunks={schedule.chunks} needs the placement {schedule.placement.value!r}, and"
            f" the list of layers has {layers.placement.value!r}. Make it with placement={schedule.placement.value!r}."
        )


def _check_blocks(model: PipelineModel, layers: PipelineTransformerBlockList) -> None:
    inside = set(map(id, layers.modules()))
    found = [
        name for name, module in model.named_modules() if isinstance(module, Scheduled) and id(module) not in inside
    ]
    if found and layers.stages > 1:
        raise ConfigError(
            "train_step runs before_layers on the first stage only and after_layers on the last stage only, but"
            f" {', '.join(found)} is a Block, which all ranks must run together. Use a DistributedModule there."
        )
