"""Trainings drawn at random: what they are made of and what happens in each step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from random_models import WIDTH, Model, Other, Recomputed, Scale, Statistics

STEPS = 4


@dataclass(frozen=True)
class BlockPlan:
    """How a layer is wrapped."""

    level: int
    recomputes: bool
    reduce_dtype: Any
    shard_size: Literal["all"] | None = None


@dataclass(frozen=True)
class PipelinePlan:
    """How the layers lie on ``stages``, as far as there are ranks, and by which schedule
    they run.
    """

    stages: int
    schedule: str | None  # of train_step; None: the list is called
    chunks: int
    placement: str
    members: str  # what the list is made of: "blocks", "modules" or "factories"
    costs: tuple[int, ...] | None  # one per layer
    rows: int  # of a rank's batch
    micro_batches: tuple[int, ...]  # by step; a list has those of the first step in all
    layout: str = (
        # Or "sequence first": of hidden states; or "all sequence first": of a schedule's
        # batch, too.
        "batch first"
    )
    extras: bool = False  # layers get a mask, a table and plain values, and the list a declaration
    counts: bool = False  # the loss is a mean over tokens, of which some do not count
    evaluates_by: str = "model"  # without gradients: "model", "train_step" or "eval_step"


@dataclass(frozen=True)
class StepPlan:
    """What happens in a step."""

    fails: str | None  # where a first try of the step fails
    keeps_zeros: bool  # zero_grad(set_to_none=False)
    frozen: tuple[int, ...]  # numbers of parameters
    levels: tuple[int, ...]
    recompute: tuple[bool, ...]
    orders: tuple[tuple[int, ...], ...]  # of the layers, for each micro-batch
    held: tuple[bool, ...]  # which of them run in no_sync
    one_backward: bool
    twice: bool  # each backward is run twice
    asks_for_gradients: bool
    between: str | None  # what comes between forward and backward
    writes: bool  # parameters are changed by hand after the step
    evaluates: bool
    overflows: bool
    resumes: bool
    # After how many more micro-batches the weight gradients of each are computed.
    postponed: tuple[int | None, ...]
    device_memory: int | Literal["auto"] = 0  # of the optimizer "offload", from this step on
    changes: str | None = None  # what is put into the model before the step
    penalizes: bool = False  # the loss reads the weight of a layer


@dataclass(frozen=True)
class Plan:
    """A training; ``seed`` draws its model. ``tp`` ranks, if there are as many, compute some of its
    layers together.
    """

    seed: int
    tp: int
    shard_size: int | None  # over how many of the ranks with different data to shard, at most
    optimizer_shards: Literal["all"] | None  # whether states are sharded over all of them
    whole: bool  # ranks along tp have the same sequences
    pipeline: PipelinePlan | None
    dtype: torch.dtype
    wraps: str
    blocks: tuple[BlockPlan, ...]
    optimizer: str  # "whole": of whole tensors
    splits: bool  # the parameters among two optimizers
    manages: bool
    means: bool  # gradients are means over the ranks, not sums
    loss_scale: float | None
    clips: bool
    may_reenter: bool
    prefetch_bytes: int | None
    hooked: tuple[int, ...]  # numbers of the parameters that somebody watches
    steps: tuple[StepPlan, ...] = field(repr=True)
    float8: str | None = None  # the recipe by which linear layers in Blocks compute
    counts: bool = False  # losses are sums over tokens, of which ranks have different numbers
    has_statistics: bool = False  # norms of layers keep statistics of each rank's own data
    has_attributes: bool = False  # of parameters, which forward reads

    def model(self) -> Model:
        """Return the model in plain torch."""
        r = random.Random(self.seed)
        torch.manual_seed(self.seed)
        parts = None if self.pipeline is None else self.pipeline.stages * self.pipeline.chunks
        model = Model(
            r,
            self.dtype,
            tensors_only=self.wraps in ("list", "pipeline"),
            may_tie=self.wraps == "wrapper",
            tp=self.tp,
            parts=parts,
        )
        model.gives_extras = self.pipeline is not None and self.pipeline.extras
        for module in model.modules():
            if isinstance(module, Recomputed):
                module.is_reentrant = self.may_reenter and r.random() < 0.5
            if isinstance(module, Scale) and self.has_attributes:
                module.vector.factor = 0.5  # type: ignore[attr-defined]
        if self.has_statistics:
            for layer in model.layers:
                layer.parts.append(Statistics(WIDTH).to(self.dtype))
        return model

    @property
    def rows(self) -> int:
        """Rows of a rank's batch."""
        return 2 if self.pipeline is None else self.pipeline.rows

    def pipe_size(self, world_size: int) -> int:
        """Return how many stages ``world_size`` ranks have."""
        return 1 if self.pipeline is None else math.gcd(self.pipeline.stages, world_size)

    def micro_batches(self, world_size: int, step: int) -> int:
        """Return into how many micro-batches the batch of a pipeline is divided."""
        assert self.pipeline is not None
        return math.gcd(self.pipeline.micro_batches[step], self.rows * self.pipe_size(world_size))

    def tp_size(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks compute layers together."""
        return math.gcd(self.tp, world_size // self.pipe_size(world_size))

    def shard_size_of(self, world_size: int) -> int | None:
        """Return over how many of ``world_size`` ranks to shard."""
        if self.shard_size is None:
            return None
        data_size = world_size // self.pipe_size(world_size) // self.tp_size(world_size)
        return math.gcd(self.shard_size, data_size)

    def data_size(self, world_size: int) -> int:
        """Return by what the manager divides losses. Rows are cut among ranks along tp: each brings
        sequences of its own.
        """
        return world_size // self.tp_size(world_size)

    def batches(self, world_size: int) -> int:
        """Return how many ranks have different batches."""
        return self.data_size(world_size) if self.whole else world_size


def draw(
    seed: int,
    tp: int | None = None,
    pp: int | None = None,
    pipeline: PipelinePlan | None = None,
    *,
    whole: bool | None = None,
    whole_tensors: bool | None = None,
    shard_size: int | None = None,
    may_round: bool = False,
) -> Plan:
    """Return training number ``seed``; ``tp`` and ``pp``, or all of ``pipeline``, ``whole``,
    whether the optimizer needs ``whole_tensors``, and ``shard_size`` are drawn, unless given.
    ``may_round``: linear layers may be torchao's, which compute in float8, if all is on the CPU.
    """
    r = random.Random(f"grid {seed}")
    tp = tp or (r.choice([2, 2, 4]) if r.random() < 0.35 else 1)
    of_pipeline = random.Random(f"pipeline {seed}")
    pp = pp or (of_pipeline.choice([2, 2, 4]) if of_pipeline.random() < 0.25 else 1)
    if pipeline is None and pp > 1:
        pipeline = _draw_pipeline(of_pipeline, pp)
    of_shards = random.Random(f"shards {seed}")
    if shard_size is None and of_shards.random() < 0.25:
        shard_size = of_shards.choice([1, 2, 2])
    of_states = random.Random(f"shards of states {seed}")
    r = random.Random(f"plan {seed}")
    dtype = r.choice([torch.float32, torch.float64])
    wraps = r.choice(["blocks", "list", "wrapper"])
    if pipeline is not None:
        wraps = "pipeline"
    manages = r.random() < 0.8
    offloads = dtype == torch.float32 and r.random() < 0.3
    asks = r.random() < 0.2 and pipeline is None
    plan = Plan(
        seed=seed,
        tp=tp,
        shard_size=shard_size,
        optimizer_shards=None if shard_size is None else of_states.choice([None, "all"]),
        whole=pipeline is None
        and (random.Random(f"whole {seed}").random() < 0.5 if whole is None else whole),
        pipeline=pipeline,
        dtype=dtype,
        wraps=wraps,
        blocks=(),
        optimizer="offload" if offloads else r.choice(["adam", "adamw", "torch", "sgd"]),
        splits=r.random() < 0.3,
        manages=manages,
        means=random.Random(f"means {seed}").random() < 0.3,
        loss_scale=r.choice([None, 8.0]) if manages else None,
        clips=manages and r.random() < 0.5,
        # torch's reentrant checkpoint gives no gradients if its input needs none, which a frozen
        # beginning makes so.
        may_reenter=not asks and pipeline is None,
        prefetch_bytes=r.choice([None, None, 0, 10**9]),
        hooked=(),
        steps=(),
    )
    if manages and pipeline is None and tp == 1:
        plan = replace(plan, counts=random.Random(f"counts {seed}").random() < 0.4)
    of_optimizer = random.Random(f"whole tensors {seed}")
    if of_optimizer.random() < 0.15 if whole_tensors is None else whole_tensors:
        plan = replace(plan, optimizer="whole")
    of_changes = random.Random(f"changes {seed}")
    is_simple = pipeline is None and tp == 1
    if is_simple:
        plan = replace(
            plan, has_statistics=of_changes.random() < 0.3, has_attributes=of_changes.random() < 0.5
        )
    model = plan.model()
    count, parameters = len(model.layers), len(list(model.parameters()))
    makes_blocks = wraps == "wrapper" or (pipeline is not None and pipeline.members == "modules")
    blocks = tuple(
        BlockPlan(
            level=3 if makes_blocks else r.randint(0, 3),
            recomputes=r.random() < 0.5,
            reduce_dtype=r.choice(["param", "fp32", "fp32-sum"]),
        )
        for _ in range(count)
    )
    of_levels = random.Random(f"levels {seed}")
    if not makes_blocks and of_levels.random() < 0.4:  # as most models have it
        level = of_levels.randint(0, 3)
        blocks = tuple(replace(block, level=level) for block in blocks)
    if shard_size is not None and not makes_blocks:
        of_sizes = random.Random(f"shard sizes {seed}")
        blocks = tuple(
            replace(block, shard_size=of_sizes.choice([None, "all"])) for block in blocks
        )
    settings = {
        "count": count,
        "parameters": parameters,
        "blocks": blocks,
        "asks": asks,
        "plan": plan,
    }
    postponing = random.Random(f"postponing {seed}")
    postpones = postponing.random() < 0.3
    numbers = range(STEPS if pipeline is None else len(pipeline.micro_batches))
    steps = tuple(_draw_step(r, postponing if postpones else None, **settings) for _ in numbers)
    hooked = tuple(n for n in range(parameters) if r.random() < 0.1) if r.random() < 0.2 else ()
    if pipeline is not None:
        steps = tuple(_as_pipelines_can(of_pipeline, step, count, parameters) for step in steps)
        if of_pipeline.random() < 0.2:
            costs = tuple(of_pipeline.randint(1, 9) for _ in range(count))
            pipeline = replace(pipeline, costs=costs)
        pipeline = _draw_form(random.Random(f"form {seed}"), pipeline, tp)
    if plan.optimizer == "offload":
        steps = _with_device_memory(random.Random(f"device memory {seed}"), steps)
    if is_simple:
        may_change = plan.optimizer in ("adam", "adamw", "torch", "sgd") and not plan.splits
        steps = tuple(_with_changes(of_changes, step, may_change=may_change) for step in steps)
    plan = replace(plan, blocks=blocks, steps=steps, hooked=hooked, pipeline=pipeline)
    of_float8 = random.Random(f"float8 {seed}")
    if may_round and of_float8.random() < 0.5 and _ranks_round_alike(plan):
        plan = replace(plan, float8=of_float8.choice(["tensorwise", "gathered"]))
    return plan


def _ranks_round_alike(plan: Plan) -> bool:
    """Return whether ranks find the same numbers and scales as one process.

    They do not if float32 rounds sums in another order, where a little may become a step of float8,
    nor if a product has other rows.
    """
    parts = plan.model().modules()
    is_float64 = plan.dtype == torch.float64 and not any(isinstance(part, Other) for part in parts)
    is_scaled = plan.clips or plan.counts or any(step.changes for step in plan.steps)
    return is_float64 and not is_scaled and plan.tp == 1 and plan.pipeline is None


def _draw_pipeline(r: random.Random, stages: int) -> PipelinePlan:
    schedule = r.choice([None, None, "gpipe", "1f1b", "interleaved", "zero-bubble"])
    chunks = {"1f1b": [1], "interleaved": [2, 3]}.get(str(schedule), [1, 2])
    rows = r.choice([1, 2, 4, 6])
    counts = [number for number in range(1, rows * stages + 1) if rows * stages % number == 0]
    return PipelinePlan(
        stages=stages,
        schedule=schedule,
        chunks=(count := r.choice(chunks)),
        placement="v" if count == 2 and schedule in (None, "zero-bubble") else "loop",
        members=r.choice(["blocks", "modules", "factories"]),
        costs=None,
        rows=rows,
        micro_batches=tuple(r.choice(counts) for _ in range(STEPS)),
    )


def _draw_form(r: random.Random, pipeline: PipelinePlan, tp: int) -> PipelinePlan:
    """Return ``pipeline`` with what was added later, from a generator of its own, so that older
    draws stay.
    """
    layout = r.choice(["batch first", "batch first", "sequence first", "all sequence first"])
    extras, counts = r.random() < 0.4, r.random() < 0.4
    evaluates_by = r.choice(["model", "train_step", "eval_step"])
    # Ranks along tp have parts of the embedding, which is the table, and rows of their own, which
    # are counted together.
    return replace(
        pipeline,
        layout=layout,
        extras=extras and tp == 1,
        counts=counts and tp == 1,
        evaluates_by=evaluates_by,
    )


def _as_pipelines_can(r: random.Random, step: StepPlan, layers: int, parameters: int) -> StepPlan:
    """Return ``step`` without what a pipeline refuses; what is frozen is often a whole end of
    the model.
    """
    bound = r.randrange(max(1, parameters - 3))
    return replace(
        step,
        orders=(tuple(range(layers)),) * len(step.orders),
        twice=False,
        postponed=(None,) * len(step.orders),
        frozen=r.choice(
            [step.frozen, step.frozen, tuple(range(bound)), tuple(range(bound + 3, parameters))]
        ),
    )


def _with_device_memory(r: random.Random, steps: Sequence[StepPlan]) -> tuple[StepPlan, ...]:
    """Return ``steps`` with memory for none, some or all of the states: the same in all, or not."""
    budgets: list[int | Literal["auto"]] = [0, 200, 1000, "auto"]
    first, changes = r.choice(budgets), r.random() < 0.4
    return tuple(
        replace(step, device_memory=r.choice(budgets) if changes else first) for step in steps
    )


def _with_changes(r: random.Random, step: StepPlan, *, may_change: bool) -> StepPlan:
    """Return ``step`` with something that is put into the model before, and a loss that reads
    a weight.
    """
    changes = r.choice(["assign", "remove", "adapter", "outside"]) if r.random() < 0.3 else None
    return replace(
        step,
        changes=changes if may_change else None,
        penalizes=r.random() < 0.3 and set(step.postponed) == {None},
    )


def _draw_step(
    r: random.Random,
    postponing: random.Random | None,
    count: int,
    parameters: int,
    blocks: Sequence[BlockPlan],
    asks: bool,
    plan: Plan,
) -> StepPlan:
    orders = []
    for _ in range(r.randint(1, 3)):
        order = list(range(count))
        if r.random() < 0.3:  # skipped, repeated, in another order
            order = [r.randrange(count) for _ in range(r.randint(0, count + 1))]
        orders.append(tuple(order))
    changes = r.random() < 0.3
    fails = r.choice(["forward", "backward"]) if r.random() < 0.2 else None
    return StepPlan(
        fails=fails,
        keeps_zeros=fails is None
        and r.random() < 0.2,  # which gradients a backward pass leaves that failed is undefined
        frozen=tuple(n for n in range(2, parameters) if r.random() < 0.3)
        if r.random() < 0.3
        else (),
        levels=tuple(
            r.randint(1, 3) if changes and block.level else block.level for block in blocks
        ),
        recompute=tuple(r.random() < 0.5 if changes else block.recomputes for block in blocks),
        orders=tuple(orders),
        held=tuple(plan.manages and r.random() < 0.4 for _ in orders),
        one_backward=r.random() < 0.2,
        twice=r.random() < 0.15,
        asks_for_gradients=asks and r.random() < 0.5,
        between=r.choice(["no_grad", "inference", "state_dict"]) if r.random() < 0.3 else None,
        writes=r.random() < 0.15,
        evaluates=r.random() < 0.3,
        overflows=plan.loss_scale is not None and r.random() < 0.2,
        resumes=plan.manages and r.random() < 0.15,
        postponed=tuple(postponing.choice([None, 0, 1, 2]) if postponing else None for _ in orders),
    )
