"""``train_step`` and ``eval_step``: one step of a pipeline with the loss inside.

So backwards begin before all forwards are over, and no output of the whole batch is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.errors import ConfigError
from bmt_core.run.rank_results import as_count
from bmt_core.run.runtime import current
from bmt_params.gradient_sum import LeafGradients
from bmt_params.guards.same_data import LossComparison
from bmt_params.modules.block_use import Scheduled
from bmt_params.modules.layer_list import run_layers
from bmt_params.modules.outermost_call import gather_as_leaves, gather_once, module_call
from bmt_params.nested import map_tensors
from bmt_params.parameter import DistributedParameter
from bmt_pipeline.agreement import agreed_key, raise_together
from bmt_pipeline.block_list import PipelineTransformerBlockList, what_needs_gradients
from bmt_pipeline.payload import as_tuple, shapes_in
from bmt_pipeline.pipeline_model import PipelineModel
from bmt_pipeline.pipeline_ranks import group_of_pipelines, pipeline_group
from bmt_pipeline.schedules import Kind, Schedule, make_schedule
from bmt_pipeline.schedules.gpipe import gpipe
from bmt_pipeline.stage_runner import Layouts, StageRunner
from bmt_pipeline.step_batch import BatchDims, StepBatch
from bmt_pipeline.wait_errors import waiting_for_all
from bmt_pipeline.whole_batch import Arguments

Loss = Callable[[Any, Any], torch.Tensor]
Number = torch.Tensor | float
Count = Callable[[Any], Number]


class ScalesLoss(Protocol):
    """The part of ``OptimManager`` that :func:`train_step` uses."""

    def scale_loss(self, loss: torch.Tensor, *, count: Number | None = None) -> torch.Tensor:
        """Return ``loss`` times the loss scale, divided so that summed gradients are those of the
        global mean loss; with ``count``, of which ``loss`` is the sum, those of the mean over all
        that ranks count in this step.
        """


def train_step(
    model: PipelineModel,
    loss_fn: Loss,
    batch: tuple[Any, Any] | None,
    schedule: str | Schedule = "1f1b",
    num_micro_batches: int | None = None,
    *,
    manager: ScalesLoss | None = None,
    count: Number | None = None,
    count_fn: Count | None = None,
    batch_dim: int | tuple[int, int] | None = None,
    batch_related: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run forward and backward of one batch through the stages by ``schedule``. Return the mean
    loss, on every rank.

    ``batch`` is (inputs, targets), one batch per pipeline. Only the first stage reads the inputs,
    and only the stage of the last layer the targets; other ranks may pass the same batch or None.
    Inputs, a tensor or a tuple, go to ``model.before_layers``. Inputs and targets are divided along
    ``batch_dim`` (default 0; a pair for inputs and targets) into ``num_micro_batches`` (default:
    that of :func:`init_distributed`, else the number of stages). ``batch_related``: the numbers of
    the inputs that have the batch (default: all); micro-batches get the other inputs whole.
    ``loss_fn(output, targets)`` returns the mean loss of a micro-batch; the loss of the batch is
    the mean of these.

    That is another loss than the mean over tokens if micro-batches have different numbers of tokens
    that count, and NaN if a micro-batch has none (its gradients are then zero, and those of the
    others are applied, as when plain torch accumulates gradients). For the mean over tokens let
    ``loss_fn`` return the sum of the tokens' losses, and give ``count``, the number of tokens of
    this pipeline's batch, or ``count_fn``, which counts them in its targets::

        def loss_fn(logits, targets):
            logits, targets = logits.flatten(0, 1), targets.flatten()
            return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")

        tokens = (targets != -100).sum()
        loss = train_step(model, loss_fn, batch, count=tokens, manager=optim_manager)

    The loss is then the sum over all micro-batches of all pipelines, divided by the number of all
    their tokens, and so are its gradients; with a manager, those of several steps between two
    steps of the manager are divided by the number of tokens in all of them, as
    ``manager.backward(loss_sum, count=tokens)`` does. Only the stage of the last layer reads
    ``count``; the other ranks pass any number.

    ``schedule`` is ``"1f1b"``, ``"gpipe"``, ``"zero-bubble"`` (it computes weight gradients when a
    stage would wait), or a :class:`Schedule`. For a list of layers made with ``chunks=2`` or more
    it may be ``"interleaved"``; with ``chunks=2, placement="v"`` ``"zero-bubble"`` has the smallest
    bubble. The docstrings in ``bmt_pipeline.schedules`` say how large the bubble is and how many
    micro-batches are live. Inputs of linear layers and gradients of their outputs may be kept
    longer: see :meth:`PostponedGradients.number_to_join`.

    Gradients are added to ``.grad`` as ``manager.backward(loss)`` would add them, with the
    manager's scale and division. Without a manager they are those of ``loss.backward()`` on every
    rank: sums over all ranks, or means after ``init_distributed(gradients="mean")``. Then clip and
    step as usual::

        batch = ids, targets
        loss = train_step(model, loss_fn, batch, "1f1b", num_micro_batches=8, manager=optim_manager)
        optim_manager.step()

    Under ``torch.no_grad()`` it is :func:`eval_step`, whatever the schedule.

    Collective over all ranks. Raises :class:`ConfigError` on all ranks of a pipeline if the batch
    cannot be divided or the schedule is not defined for these sizes, or if its ranks pass different
    batches, which is looked for in the first steps and in those with new shapes. If a stage fails,
    that stage raises its error and the others :class:`RemoteError` with its traceback.
    """
    dims = BatchDims(batch_dim=batch_dim, batch_related=batch_related)
    count_fn = _one_count(count, count_fn)
    layers = _layers_of(model, "train_step")
    made = make_schedule(schedule, layers.stages, _count(layers, num_micro_batches), layers.chunks)
    _check_placement(made, layers)
    if not torch.is_grad_enabled():
        return _evaluated(model, layers, loss_fn, count_fn, batch, num_micro_batches, dims)
    if manager is not None and count_fn is None:
        # Only the last stage has losses to scale, but scaling also prepares the gradients that
        # every rank has.
        manager.scale_loss(torch.zeros((), device="cpu"))
    return _run(_Step(model, layers, loss_fn, count_fn, made, manager), batch, dims)


def eval_step(
    model: PipelineModel,
    loss_fn: Loss,
    batch: tuple[Any, Any] | None,
    num_micro_batches: int | None = None,
    *,
    count: Number | None = None,
    count_fn: Count | None = None,
    batch_dim: int | tuple[int, int] | None = None,
    batch_related: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run forward of one batch through the stages. Return the mean loss, on every rank; no
    gradient changes.

    The arguments are those of :func:`train_step`, and so are the errors. Call ``model.eval()``
    before, as for any model::

        losses = [eval_step(model, loss_fn, b, num_micro_batches=8) for b in validation_batches]
    """
    dims = BatchDims(batch_dim=batch_dim, batch_related=batch_related)
    layers = _layers_of(model, "eval_step")
    counted = _one_count(count, count_fn)
    return _evaluated(model, layers, loss_fn, counted, batch, num_micro_batches, dims)


@torch.no_grad()
def _evaluated(
    model: PipelineModel,
    layers: PipelineTransformerBlockList,
    loss_fn: Loss,
    count_fn: Count | None,
    batch: Any,
    num_micro_batches: int | None,
    dims: BatchDims,
) -> torch.Tensor:
    # Without backwards there is one order of a stage's actions that waits for nothing in vain: that
    # of GPipe's forwards.
    schedule = gpipe(
        layers.stages, _count(layers, num_micro_batches), layers.chunks, placement=layers.placement
    )
    return _run(_Step(model, layers, loss_fn, count_fn, schedule, None), batch, dims)


def _layers_of(model: PipelineModel, step: str) -> PipelineTransformerBlockList:
    if not isinstance(model, PipelineModel):
        raise TypeError(
            f"{step} runs a PipelineModel, not {type(model).__name__}. Derive the model from"
            " PipelineModel, and define before_layers and after_layers."
        )
    layers = model.pipelined_layers()
    _check_blocks(model, layers)
    return layers


def _one_count(count: Number | None, count_fn: Count | None) -> Count | None:
    """Return how targets are counted, as a function; None if they are not."""
    if count is None and count_fn is None and (parts := current().topology.parts_axes):
        raise ValueError(
            f"The losses of ranks along {parts[0]!r} are parts of one sum. Return the sum of losses"
            " from loss_fn, and give count_fn, which counts the target tokens of this rank."
        )
    if count is None:
        return count_fn
    if count_fn is not None:
        raise ConfigError("Give count, the number of tokens, or count_fn, which counts them.")
    return lambda targets: as_count(count, current().device)


def _count(layers: PipelineTransformerBlockList, num_micro_batches: int | None) -> int:
    if num_micro_batches is None:
        return current().settings.num_micro_batches or layers.stages
    if type(num_micro_batches) is not int or num_micro_batches < 1:
        raise ConfigError(
            f"num_micro_batches must be a whole number, at least 1, not {num_micro_batches!r}."
        )
    return num_micro_batches


def _run(step: _Step, batch: Any, dims: BatchDims) -> torch.Tensor:
    """Agree on the step with all stages, and run it. Collective."""
    group, layers, schedule = pipeline_group(), step.layers, step.schedule
    problem: Exception | None = None
    text = ""
    try:
        step.divide(batch, dims)
        text = step.batch.text()
    except Exception as error:
        problem = error
    name = f"train_step with {schedule.name}" if torch.is_grad_enabled() else "eval_step"
    settings = f"{name}, num_micro_batches={schedule.micro_batches}" + (
        ", count_fn" if step.counts else ""
    )
    key = agreed_key(group, settings, f"{text} {what_needs_gradients(step.model)}", problem)
    if layers._is_to_check(key):
        step.batch.check_is_same_on_all_stages(group, step.last_stage)
    with module_call(step.model), layers.layouts(key) as layouts:
        return step.run(layouts)


class _Step:
    """One step on this rank's stage; gives the first part its inputs and takes the losses."""

    batch: StepBatch

    def __init__(
        self,
        model: PipelineModel,
        layers: PipelineTransformerBlockList,
        loss_fn: Loss,
        count_fn: Count | None,
        schedule: Schedule,
        manager: ScalesLoss | None,
    ) -> None:
        self.model = model
        self.layers = layers
        self.schedule = schedule
        self.last_stage = schedule.place_of(schedule.parts - 1)[0]
        self.losses: dict[int, torch.Tensor] = {}
        self.counts = count_fn is not None
        self._loss_fn = loss_fn
        self._count_fn = count_fn
        # Of all pipelines, or the error of count_fn.
        self._count: torch.Tensor | Exception = torch.zeros((), device="cpu")
        # What the manager multiplies sums of losses by, if there are counts.
        self._factor: torch.Tensor | None = None
        self._manager = manager
        self._trains = torch.is_grad_enabled()

    def divide(self, batch: Any, dims: BatchDims) -> None:
        """Divide what this stage reads of ``batch`` into micro-batches."""
        stage, count = self.layers.stage_id, self.schedule.micro_batches
        is_last = stage == self.last_stage
        self.batch = StepBatch(batch, dims, count, reads_inputs=stage == 0, reads_targets=is_last)

    def run(self, layouts: Layouts) -> torch.Tensor:
        """Run the schedule; return the mean loss."""
        layers, schedule, group = self.layers, self.schedule, pipeline_group()
        outside = [
            p
            for p in self.model.parameters()
            if isinstance(p, DistributedParameter) and not p._in_block
        ]
        pairs = (
            gather_as_leaves(outside)
            if self._trains
            else [(whole := gather_once(p), whole) for p in outside]
        )
        sums = [LeafGradients(leaf) for whole, leaf in pairs if whole.requires_grad]
        parts = [
            _Part(self, blocks, schedule.part_of(layers.stage_id, chunk))
            for chunk, blocks in enumerate(layers.layers_of_chunks())
        ]
        runner = StageRunner(
            schedule,
            layers.stage_id,
            parts,
            self,
            layers.transfers(schedule),
            layouts,
            layers.split,
        )
        order = schedule.orders[layers.stage_id]
        # An OptimManager takes the count back if the step fails; others may have no such method.
        counted_pass = getattr(self._manager, "_counted_pass", nullcontext)
        with nullcontext() if self._count_fn is None else counted_pass():
            if self._count_fn is not None:
                self._count_tokens(self._count_fn)
            runner.run([action for action in order if self._trains or action.kind is Kind.FORWARD])
            runner.end()
            raise_together(group, runner.error, runner.has_failed)
            trained = [whole for whole, _ in pairs if whole.requires_grad]
            if trained:
                self._reduce(trained, sums)
        return self._loss_of_last_stage()

    def _reduce(self, trained: Sequence[torch.Tensor], sums: Sequence[LeafGradients]) -> None:
        """Reduce the gradients of those of the parameters ``trained`` that any rank has used; the
        others keep theirs, as in plain torch. Collective: ranks whose stage has not used a
        parameter take part too.
        """
        uses = torch.tensor([sum_.has_gradient for sum_ in sums], dtype=torch.int64, device="cpu")
        with waiting_for_all("to learn which parameters this step has used"):
            current().world.all_reduce(uses, "max").wait()
        pairs = zip(trained, sums, strict=True)
        used = [pair for pair, use in zip(pairs, uses.tolist(), strict=True) if use]
        if used:
            torch.autograd.backward(
                [whole for whole, _ in used], [sum_.rounded(whole) for whole, sum_ in used]
            )

    def compute(
        self, part: int, blocks: Sequence[torch.nn.Module], micro_batch: int, inputs: Any
    ) -> Any:
        """Run one part of the model: its layers, and ``before_layers`` or ``after_layers`` in the
        first or last part.
        """
        if part == 0:
            called = self.layers.split_arguments(as_tuple(self.model.before_layers(*inputs)))
            inputs = Arguments(*called, {})
            if micro_batch == 0:
                self.batch.check_rows(inputs.hidden[0], self.layers.batch_dims[0])
        hidden = run_layers(blocks, inputs.hidden, inputs.rest, inputs.kwargs)
        if part < self.schedule.parts - 1:
            return Arguments(hidden, inputs.rest, inputs.kwargs)
        output = self.model.after_layers(*hidden)
        with self.layers._computing_loss():
            loss = self._loss_fn(output, self.batch.targets[micro_batch])
        return self._take_loss(loss, micro_batch)

    def _take_loss(self, loss: Any, micro_batch: int) -> torch.Tensor:
        """Note the loss of a micro-batch, and return its share of the loss whose gradients
        are made.
        """
        if (
            not isinstance(loss, torch.Tensor)
            or loss.dim()
            or (self._trains and not loss.requires_grad)
        ):
            found = (
                shapes_in(loss) if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            )
            raise ValueError(
                f"loss_fn must return a scalar tensor that requires gradients, not {found}. Return"
                " the mean loss of a micro-batch, or the sum of its losses, and give count_fn"
                " to train_step."
            )
        if self._count_fn is None:
            # The mean over micro-batches, times the number of stages, as if every rank of the
            # pipeline computed it.
            share: float | torch.Tensor = self.schedule.stages / self.schedule.micro_batches
        else:
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
            if isinstance(self._count, Exception):
                raise self._count
            if self._trains:
                comparison = current().state(LossComparison)
                if comparison.axes:
                    comparison.check(loss)
            # Without a manager the part of the mean over all tokens, times the number of data
            # ranks, as if each of them computed that mean.
            factor = current().topology.data_size / self._count
            share = (factor if self._factor is None else self._factor).to(loss.dtype)
        self.losses[micro_batch] = loss.detach()
        if self._manager is not None and self._count_fn is None:
            loss = self._manager.scale_loss(loss)
        scaled: torch.Tensor = loss * share
        return scaled

    def inputs(self, micro_batch: int) -> Any:
        # A layer may write to an input that all micro-batches get.
        return map_tensors(torch.Tensor.clone, self.batch.inputs[micro_batch])

    def take_output(self, micro_batch: int, output: Any) -> None:
        pass

    def output_gradients(self, micro_batch: int) -> list[torch.Tensor]:
        return [torch.ones_like(self.losses[micro_batch])]

    def take_input_gradients(
        self, micro_batch: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        pass

    def _count_tokens(self, count_fn: Count) -> None:
        """Let the last stages set ``_count``, and all ranks ``_factor``. Collective.

        An error of ``count_fn`` is raised by the first loss, as errors of ``loss_fn`` are. Until
        other pipelines learn of it, they compute with NaN.
        """
        device = current().device
        own = torch.zeros((), dtype=torch.float64, device=device)
        if self.layers.stage_id == self.last_stage:
            error: Exception | None = None
            count = torch.full_like(own, float("nan"))
            try:
                own = as_count(count_fn(self.batch.all_targets), device, "count_fn must return")
                count.copy_(own)
            except Exception as raised:
                error = raised
            with waiting_for_all("to count the targets of all pipelines"):
                group_of_pipelines().all_reduce(count).wait()
            self._count = count if error is None else error
        if self._manager is not None:
            with waiting_for_all("to count the tokens of this step"):
                self._factor = self._manager.scale_loss(torch.ones_like(own), count=own)

    def _loss_of_last_stage(self) -> torch.Tensor:
        """Return the mean of :attr:`losses`: of this pipeline, or with counts of all. Collective,
        if no stage has failed.
        """
        loss = torch.zeros((), device=current().device)
        if self.losses:
            losses = torch.stack([self.losses[number].float() for number in sorted(self.losses)])
            loss = losses.mean() if self._count_fn is None else self._sum_of_all(losses)
        with annotate("for the mean of a loss"):
            pipeline_group().broadcast(loss, self.last_stage).wait()
        return loss

    def _sum_of_all(self, losses: torch.Tensor) -> torch.Tensor:
        assert isinstance(self._count, torch.Tensor)
        total = losses.sum()
        with waiting_for_all("to add the losses of all pipelines"):
            group_of_pipelines().all_reduce(total).wait()
        return (total / self._count).to(total.dtype)


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


def _check_placement(schedule: Schedule, layers: PipelineTransformerBlockList) -> None:
    if schedule.placement is not layers.placement and schedule.chunks > 1:
        raise ConfigError(
            f"The schedule {schedule.name!r} with chunks={schedule.chunks} needs the placement"
            f" {schedule.placement.value!r}, and the list of layers has {layers.placement.value!r}."
            f" Make it with placement={schedule.placement.value!r}."
        )


def _check_blocks(model: PipelineModel, layers: PipelineTransformerBlockList) -> None:
    inside = set(map(id, layers.modules()))
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Scheduled) and id(module) not in inside
    ]
    if found and layers.stages > 1:
        raise ConfigError(
            "A step runs before_layers on the first stage only and after_layers on the last stage"
            f" only, but {', '.join(found)} is a Block, which all ranks must run together. Use a"
            " DistributedModule there."
        )
