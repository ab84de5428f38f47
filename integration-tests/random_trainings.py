"""Trainings drawn at random, run by one process in plain torch, or by ranks through bmt."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from float8_models import in_float8
from offload_training import Offload, Room
from parallel_parts import parallelize
from random_models import (
    LENGTH,
    TOKENS,
    WIDTH,
    Adapted,
    Mlp,
    Model,
    Options,
    Sign,
    TorchAttention,
    random_parameter,
)
from random_plans import Plan, StepPlan
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from bmt_checkpoint import load_checkpoint, save_checkpoint
from bmt_core import sum_loss
from bmt_core.run import runtime
from bmt_core.run.collectives import all_gather
from bmt_optim import AdamOptimizer, OptimManager, whole
from bmt_optim.offload.placement import DeviceRoom
from bmt_params import PostponedGradients, postpone_weight_gradients
from bmt_params.parameter import DistributedParameter
from bmt_testing.comparison import Record
from bmt_tp import ColumnParallelLinear
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList, direct_linear, no_sync
from bmtrain.loss import FusedCrossEntropy

ADAM = {"lr": 0.05, "eps": 1e-3, "betas": (0.8, 0.9)}
MAX_NORM = 0.3
IGNORED = -100


def leave_alone(tensor: torch.Tensor) -> None:
    """Watch a gradient."""


class Interrupt(Exception):
    """What a first try of a step fails with."""


class Bounded(torch.optim.Optimizer):
    """Steps that are shorter than ``lr``, by the norm of the tensor's gradient, with momentum."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.5).add_(p.grad / (1 + p.grad.norm()))
                    p.sub_(momentum, alpha=group["lr"])


class SmallRoom(Room):
    """Room for a part of the states of most models."""

    def _measured(self, device: torch.device) -> int:
        return 1000


class OffloadOfSome(Offload):
    """Offloads the states that ``device_memory``, which may be "auto", has no room for."""

    def _device_room(self) -> DeviceRoom:
        return SmallRoom()


class Training:
    """A training by one process, which has the data of all ranks."""

    device = torch.device("cpu")

    def __init__(self, plan: Plan, world_size: int) -> None:
        self.plan, self.world_size, self.record = plan, world_size, Record()
        self.model: Any = self.build(plan.model())
        self.named: list[tuple[str, nn.Parameter]] = list(self.model.named_parameters())
        self.parameters = [parameter for _, parameter in self.named]
        self.numbered = dict(self.numbers())
        for number, parameter in self.numbered.items():
            if number in plan.hooked and number % 2:
                parameter.register_post_accumulate_grad_hook(leave_alone)
            elif number in plan.hooked:
                parameter.register_hook(leave_alone)
        halves = [[p for n, p in self.numbered.items() if n % 2 == half] for half in range(2)]
        self.optimizers = [
            self.optimizer(half) for half in (halves if plan.splits else [self.parameters])
        ]

    def run(self) -> Record:
        """Take all steps."""
        for number, plan in enumerate(self.plan.steps):
            self.step(number, plan)
        return self.record

    def step(self, number: int, plan: StepPlan) -> None:
        """Take a step."""
        if plan.changes is not None:
            self.change(number, plan.changes)
            for name, value in self.model.state_dict().items():  # before the next forward
                self.record.add(f"{name} changed before step {number}", self.first(name, value))
        self.prepare(plan)
        self.model.options = Options(1.0 / (number + 1), Sign.MINUS if number % 2 else Sign.PLUS)
        if plan.fails is not None:
            self.fail(number, plan.fails)
            self.prepare(plan)
        for index, parameter in self.numbered.items():
            parameter.requires_grad_(index not in plan.frozen)
        total = torch.zeros((), dtype=self.plan.dtype)
        for micro, (order, is_held) in enumerate(zip(plan.orders, plan.held, strict=True)):
            self.counted = number, [micro]
            with self.holding(is_held):
                loss = self.loss(number, micro, order)
                self.record.add(f"loss {micro} of step {number}", self.mean(loss))
                if plan.asks_for_gradients:
                    weight = self.parameters[0]
                    (asked,) = torch.autograd.grad(self.averaged(loss), [weight], retain_graph=True)
                    self.record.add(
                        f"gradient {micro} asked for in step {number}", self.whole(weight, asked)
                    )
                self.look(number, plan.between)
                if plan.one_backward:
                    total = total + loss
                else:
                    self.backward(loss, plan, micro)
        if plan.one_backward:
            self.counted = number, list(range(len(plan.orders)))
            self.backward(total, plan, 0)
        self.end_backward()
        if plan.overflows:
            self.overflow()
            return
        self.complete(plan)
        if self.plan.clips:
            self.record.add(f"norm of step {number}", self.clip())
        if self.plan.clips or True not in plan.held:
            for name, parameter in self.named:
                if parameter.grad is not None:
                    grad = self.whole(parameter, parameter.grad) / self.loss_scale()
                    self.record.add(f"gradient of {name} in step {number}", grad)
        self.update()
        for name, parameter in self.named:
            self.record.add(f"{name} after step {number}", self.whole(parameter, parameter.data))
        if plan.writes:
            with torch.no_grad():
                for parameter in self.parameters:
                    parameter.mul_(0.9)
        for name, buffer in sorted(self.model.named_buffers()):
            self.record.add(f"{name} after step {number}", self.first(name, buffer))
        if plan.evaluates:
            with torch.no_grad():
                loss = self.loss(number, 9, range(len(self.model.layers)))
            self.record.add(f"loss evaluated after step {number}", self.mean(loss))
        if plan.resumes:
            self.resume(number)

    def change(self, number: int, how: str) -> None:
        """Put something into the model, in a Block or outside, or take it out; let an optimizer
        have what is new.
        """
        r, generator = random.Random(number), torch.Generator().manual_seed(number)
        mlps = [part for part in self.model.layers.modules() if isinstance(part, Mlp)]
        mlp: Any = r.choice(mlps) if mlps else None
        if mlp is None or how == "outside":
            self.model.norm = nn.LayerNorm(WIDTH).to(self.model.norm.weight)
            self.model.norm.weight = random_parameter((WIDTH,), self.model.norm.bias, generator)
        elif how == "assign":
            mlp.down.bias = random_parameter((mlp.down.out_features,), mlp.down.weight, generator)
        elif how == "remove":
            mlp.down.bias = None
        elif isinstance(mlp.up, nn.Linear):
            mlp.up = Adapted(mlp.up, generator)
        known = {id(p) for p in self.parameters}
        self.named = list(self.model.named_parameters())
        gone = known - {id(p) for _, p in self.named}
        optimizer = self.optimizers[0]
        for group in optimizer.param_groups:
            for p in [p for p in group["params"] if id(p) in gone]:
                optimizer.state.pop(p, None)
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        new = [p for _, p in self.named if id(p) not in known]
        if new:
            optimizer.add_param_group({"params": new})
        self.parameters = [p for p in self.parameters if id(p) not in gone] + new

    def first(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return the first rank's ``buffer``: the others' statistics are those of their own data
        until the next call.
        """
        return buffer

    def penalty(self) -> torch.Tensor:
        """Return what a loss takes of the weight of a layer outside of its forward."""
        weights = [p for p in self.model.layers.parameters() if p.ndim == 2]
        if not weights:
            return torch.zeros((), dtype=self.plan.dtype)
        weight = self.read(weights[len(weights) // 2])
        rows = weight.softmax(-1).square().sum() + weight.norm(dim=1).mean()
        return 0.01 * (rows + (weight @ weight.t()).square().sum()).to(self.plan.dtype)

    def read(self, weight: Any) -> torch.Tensor:
        """Return the whole of ``weight``, part of the graph."""
        whole: torch.Tensor = weight
        return whole

    def fail(self, number: int, where: str) -> None:
        """Begin a step that fails in the middle of the layers."""

        def interrupt(module: nn.Module, args: Any, output: Any) -> None:
            if where == "forward":
                raise Interrupt
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(interrupt_backward)

        def interrupt_backward(grad: torch.Tensor) -> None:
            raise Interrupt

        handles = [layer.register_forward_hook(interrupt) for layer in self.middle_layers()]
        try:
            loss = self.loss(number, 8, range(len(self.model.layers)))
            if loss.requires_grad:  # a pipeline's schedule has run backward
                loss.backward()
        except Interrupt:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def middle_layers(self) -> list[nn.Module]:
        """Return the layer in the middle, if this process has it."""
        return [self.model.layers[len(self.model.layers) // 2]]

    def look(self, number: int, how: str | None) -> None:
        """Use the model between forward and backward."""
        if how == "state_dict":
            for name, value in self.model.state_dict().items():
                self.record.add(f"{name} read in step {number}", self.first(name, value))
        elif how is not None:
            with torch.no_grad() if how == "no_grad" else torch.inference_mode():
                loss = self.loss(number, 7, range(len(self.model.layers)))
                self.record.add(f"loss evaluated in step {number}", self.mean(loss))

    def loss(self, step: int, micro: int, order: Iterable[int]) -> torch.Tensor:
        """Return the sum over the ranks whose data this process has of their losses: means, or
        sums over tokens.
        """
        total = torch.zeros((), dtype=self.plan.dtype)
        places = [
            (module._buffers, name) for module in self.model.modules() for name in module._buffers
        ]
        before = [holder[name] for holder, name in places]
        after: list[Any] = []  # of the first rank: those of all ranks when the next call begins
        for ranks in self.calls():
            for (holder, name), buffer in zip(places, before, strict=True):
                holder[name] = buffer.clone()  # every rank changes its own
            tokens = torch.cat([self.tokens(step, micro, rank) for rank in ranks])
            targets = torch.cat([self.targets(step, micro, rank).flatten() for rank in ranks])
            logits = self.logits(tokens, order).flatten(0, 1)
            if self.counts:
                loss = self.sum_of_tokens(logits, targets)
                if not self.plan.manages:
                    # As if each rank computed the mean over the tokens of all of them.
                    loss = loss * (self.world_size / self.count(step, [micro]))
            else:
                loss = len(ranks) * self.loss_of_tokens(logits, targets)
            if self.plan.steps[step].penalizes:
                loss = loss + len(ranks) * self.penalty()
            total = total + loss + len(ranks) * 0.1 * self.model.aux
            after = after or [holder[name] for holder, name in places]
        for (holder, name), buffer in zip(places, after, strict=True):
            holder[name] = buffer
        return total

    @property
    def counts(self) -> bool:
        """Whether the loss is a mean over tokens, of which some do not count."""
        pipeline = self.plan.pipeline
        return self.plan.counts if pipeline is None else pipeline.counts

    def targets(self, step: int, micro: int, rank: int) -> torch.Tensor:
        """Return the targets of a batch of ``rank``."""
        targets = self.tokens(step, micro, rank).roll(1)
        if self.counts:
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            share = torch.rand(1, generator=generator).round(decimals=1)  # all, some or none
            drawn = torch.rand(targets.shape, generator=generator)
            if not self.plan.manages:
                drawn[0, 0] = 1.0  # one counts
            targets[(drawn < share).to(targets.device)] = IGNORED
        return targets

    def count(self, step: int, micros: Iterable[int], ranks: Iterable[int] | None = None) -> int:
        """Return how many targets of ``ranks``, by default all, count."""
        return sum(
            int((self.targets(step, micro, rank) != IGNORED).sum())
            for micro in micros
            for rank in (range(self.world_size) if ranks is None else ranks)
        )

    def sum_of_tokens(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of the tokens that count."""
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    def tokens(self, step: int, micro: int, rank: int) -> torch.Tensor:
        """Return a batch of ``rank``."""
        generator = torch.Generator().manual_seed(
            ((self.plan.seed * 10 + step) * 10 + micro) * 10 + rank
        )
        tokens = torch.randint(TOKENS, (self.plan.rows, LENGTH), generator=generator)
        return tokens.to(self.device)

    def logits(self, tokens: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
        """Return what the model makes of ``tokens``."""
        logits: torch.Tensor = self.model(tokens, list(order))
        return logits

    def loss_of_tokens(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens."""
        return F.cross_entropy(logits, targets)

    def end_backward(self) -> None:
        """All backward passes of a step are over."""

    def backward(self, loss: torch.Tensor, plan: StepPlan, micro: int) -> None:
        """Run backward of a micro-batch, maybe twice."""
        loss = self.scaled(loss)
        if plan.twice:
            loss.backward(retain_graph=True)
        loss.backward()

    def build(self, model: Model) -> nn.Module:
        """Return the model that is trained."""
        # What ranks gather in float8 is what a layer makes of the weight.
        self.convert(model, "tensorwise" if self.plan.float8 == "gathered" else self.plan.float8)
        return model

    def convert(self, model: Model, recipe: str | None) -> None:
        """Let linear layers that are called compute in float8, if there is a ``recipe``."""
        if recipe is None:
            return
        for part in [part for layer in model.layers for part in layer.parts]:
            if not isinstance(part, TorchAttention):
                in_float8(part, recipe)
        for module in model.modules():
            if isinstance(module, Mlp):
                module.in_place = False  # torchao's layers return views, which nobody may write

    def numbers(self) -> Iterable[tuple[int, nn.Parameter]]:
        """Return the parameters with their numbers in the plain model."""
        return enumerate(self.parameters)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        if self.plan.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.8)
        if self.plan.optimizer == "whole":
            return Bounded(parameters)
        kind = torch.optim.AdamW if self.plan.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, weight_decay=0.01, **ADAM)

    def ranks(self) -> Iterable[int]:
        """Return the ranks whose data this process has, of those that have different data."""
        return range(self.plan.batches(self.world_size))

    def prepare(self, plan: StepPlan) -> None:
        """Begin a step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not plan.keeps_zeros)

    def calls(self) -> list[list[int]]:
        """Return, for each call of the model, the ranks whose data it takes: all at once, except
        where statistics or scales are those of a rank's own data.
        """
        ranks = list(self.ranks())
        is_of_ranks = self.plan.has_statistics or self.plan.float8 is not None
        return [[rank] for rank in ranks] if is_of_ranks else [ranks]

    def holding(self, is_held: bool) -> AbstractContextManager[Any]:
        """Inside, gradients may stay local."""
        return nullcontext()

    def averaged(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradient is what ranks reduce."""
        return loss / self.plan.data_size(self.world_size) if self.plan.means else loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what backward is run on."""
        if self.counts and self.plan.manages:
            step, _ = self.counted
            return loss / max(1, self.count(step, range(len(self.plan.steps[step].orders))))
        return (
            loss / self.plan.data_size(self.world_size)
            if self.plan.manages or self.plan.means
            else loss
        )

    def loss_scale(self) -> float:
        """Return how much larger gradients are than those of the loss."""
        return 1.0

    def overflow(self) -> None:
        """Take a step with infinite gradients: none; they are cleared."""
        for parameter in self.parameters:
            parameter.grad = None

    def complete(self, plan: StepPlan) -> None:
        """Make gradients as complete as those of blocks: zero, where a block that ran did not use a
        parameter of its own.
        """
        homes = [{id(p) for p in layer.parameters()} for layer in self.model.layers]
        shared = {one for home in homes for one in home if sum(one in other for other in homes) > 1}
        visited = {one for order in plan.orders for index in order for one in homes[index]} - shared
        for parameter in self.parameters:
            if parameter.grad is None and parameter.requires_grad and id(parameter) in visited:
                parameter.grad = torch.zeros_like(parameter)

    def resume(self, number: int) -> None:
        """Go on as if from a checkpoint, which holds no gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self) -> torch.Tensor:
        """Clip all gradients to ``MAX_NORM`` and return their norm."""
        return nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)

    def update(self) -> None:
        """Update the parameters."""
        for optimizer in self.optimizers:
            optimizer.step()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks of what a loss came to."""
        return value / self.plan.batches(self.world_size)

    def whole(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of ``tensor``, which is laid out like ``parameter``."""
        return tensor


class ShardedTraining(Training):
    """The same by the ranks of this run."""

    def __init__(self, plan: Plan, folder: str) -> None:
        self.device = runtime.current().device
        super().__init__(plan, runtime.world_size())
        self.folder = folder
        self.postponed: list[tuple[int, PostponedGradients]] = []
        self.manager = OptimManager(loss_scale=plan.loss_scale)
        for optimizer in self.optimizers:
            self.manager.add_optimizer(optimizer)

    def run(self) -> Record:
        """Train, in half of the plans with layers that pass the gradients of all weights to their
        Block, and not of large ones only.
        """
        smallest = random.Random(f"small {self.plan.seed}").choice([0, direct_linear.SMALL])
        with patch.object(direct_linear, "SMALL", smallest):
            return super().run()

    def resume(self, number: int) -> None:
        """Go on with another model, from a checkpoint."""
        save_checkpoint(self.folder, self.model, self.manager, step=number)
        other = type(self)(self.plan, self.folder)
        for earlier, plan in enumerate(self.plan.steps[: number + 1]):
            if plan.changes is not None:
                other.change(earlier, plan.changes)
        with torch.no_grad():
            for parameter in other.parameters:
                parameter.zero_()
        load_checkpoint(self.folder, other.model, other.manager)
        for name in ("model", "named", "parameters", "numbered", "optimizers", "manager"):
            setattr(self, name, getattr(other, name))

    def build(self, model: Model) -> nn.Module:
        """Return the model, of blocks."""
        self.convert(model, self.plan.float8)
        if self.plan.tp > 1:
            size, r = (
                runtime.current().topology.axis_size("tp"),
                random.Random(f"parts {self.plan.seed}"),
            )
            parallelize(model, size, r, whole=self.plan.whole)
        blocks: list[nn.Module] = list(model.layers)
        keep = self.keep()
        if self.plan.wraps != "wrapper":
            for layer, b in zip(blocks, self.plan.blocks, strict=True):
                Block(
                    layer,
                    use_checkpoint=b.recomputes,
                    zero_level=b.level,
                    reduce_dtype=b.reduce_dtype,
                    shard_size=b.shard_size,
                    keep=keep if b.recomputes and self.plan.wraps == "blocks" else None,
                )
        if self.plan.wraps == "list":
            model.layers = TransformerBlockList(blocks, keep=keep)
        return BMTrainModelWrapper(model, keep=keep)

    def keep(self) -> Any:
        """Return what Blocks keep of a forward that they recompute."""
        return random.Random(f"keep {self.plan.seed}").choice(
            [
                None,
                "attention",
                "products",
                ("attention", "products"),
                3_000,
                100_000,
                lambda operation, args: operation in (F.linear, F.gelu, F.layer_norm, torch.tanh),
            ]
        )

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        if self.plan.optimizer in ("torch", "sgd"):
            return super().optimizer(parameters)
        if self.plan.optimizer == "whole":
            bucket_bytes = random.Random(f"buckets {self.plan.seed}").choice([100, 10_000])
            return whole(Bounded, parameters, bucket_bytes=bucket_bytes)
        if self.plan.optimizer == "offload":
            budget = self.plan.steps[0].device_memory
            return OffloadOfSome(
                parameters,
                weight_decay=0.01,
                decoupled_weight_decay=False,
                device_memory=budget,
                **ADAM,
            )
        return AdamOptimizer(
            parameters,
            weight_decay=0.01,
            decoupled_weight_decay=self.plan.optimizer == "adamw",
            **ADAM,
        )

    def ranks(self) -> Iterable[int]:
        """Return this rank, or the number of its batch."""
        return [runtime.current().topology.data_rank if self.plan.whole else runtime.rank()]

    def loss_of_tokens(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of this rank's tokens, or, where the head is cut, of the tokens of
        the ranks along tp.
        """
        if not isinstance(self.model.head, ColumnParallelLinear) or self.model.head.gather_output:
            return super().loss_of_tokens(logits, targets)
        if self.plan.whole:
            loss_of: nn.Module = FusedCrossEntropy(parallel=True)
            own: torch.Tensor = loss_of(logits, targets)
            return own.to(self.plan.dtype)
        group = runtime.current().topology.group(("tp",))
        loss = FusedCrossEntropy(parallel=True)(logits, all_gather(targets, group).flatten())
        # The gradient is that of the sum of these ranks' losses, as everywhere here; the value is
        # their mean.
        return loss + (group.size - 1) * (loss - loss.detach())

    def prepare(self, plan: StepPlan) -> None:
        """Begin a step."""
        if self.plan.manages and not plan.keeps_zeros:
            self.manager.zero_grad()
        else:
            super().prepare(plan)
        for index, layer in self.layers():
            layer._zero_level, layer._use_checkpoint = plan.levels[index], plan.recompute[index]
        for optimizer in self.optimizers:
            # A new value, even an equal one, places all states anew.
            if isinstance(optimizer, Offload) and optimizer.device_memory != plan.device_memory:
                optimizer.device_memory = plan.device_memory

    def layers(self) -> Iterable[tuple[int, Any]]:
        """Return the layers of this rank with their numbers."""
        return enumerate(self.model.layers)

    def first(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        if not name.endswith(("running_mean", "running_var")):
            return buffer  # is that of every rank
        sent = buffer.clone()
        runtime.current().world.broadcast(sent).wait()
        return sent

    def read(self, weight: Any) -> torch.Tensor:
        whole: torch.Tensor = weight.gather()
        return whole

    def holding(self, is_held: bool) -> AbstractContextManager[Any]:
        """Inside, gradients may stay local."""
        return no_sync(self.model) if is_held else nullcontext()

    def averaged(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss whose gradient is what ranks reduce: they average themselves."""
        return loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what backward is run on."""
        if not self.plan.manages:
            return loss
        own = self.count(*self.counted, self.ranks()) if self.counts else None
        return self.manager.scale_loss(loss, count=own)

    def backward(self, loss: torch.Tensor, plan: StepPlan, micro: int) -> None:
        """Run backward, and compute what micro-batches before have left to be computed now."""
        delay = plan.postponed[micro]
        if delay is None:
            super().backward(loss, plan, micro)
        else:
            with postpone_weight_gradients() as left:
                super().backward(loss, plan, micro)
            self.postponed.append((micro + delay, left))
        self.compute_postponed(micro)

    def fail(self, number: int, where: str) -> None:
        """Begin a step that fails; what it leaves to be computed is dropped."""
        postpones = any(delay is not None for delay in self.plan.steps[number].postponed)
        with postpone_weight_gradients() if postpones else nullcontext():
            super().fail(number, where)

    def end_backward(self) -> None:
        """Compute all that is left to be computed."""
        self.compute_postponed(9)

    def compute_postponed(self, now: int) -> None:
        """Compute what was to be computed after micro-batch ``now``."""
        due = [left for when, left in self.postponed if when <= now]
        self.postponed = [(when, left) for when, left in self.postponed if when > now]
        for left in due:
            left.compute()

    def loss_scale(self) -> float:
        """Return how much larger gradients are than those of the loss."""
        return self.manager.loss_scale

    def overflow(self) -> None:
        """Take a step with infinite gradients: none."""
        skipped = self.manager.skipped_steps
        self.manager.backward(
            self.model(torch.zeros(1, 1, dtype=torch.int64, device=self.device), []).sum()
            * float("inf"),
            count=1 if self.counts else None,
        )
        self.manager.step()
        self.manager.read_outcome()
        assert self.manager.skipped_steps == skipped + 1
        # On a GPU they are zero until now: the host did not know that the step would be skipped.
        self.manager.zero_grad()

    def complete(self, plan: StepPlan) -> None:
        """Gradients are complete, once they are divided by counts."""
        if self.counts and True not in plan.held:
            self.manager.unscaled_gradients(self.parameters)

    def clip(self) -> torch.Tensor:
        """Clip all gradients to ``MAX_NORM`` and return their norm."""
        return self.manager.clip_grad_norm(self.parameters, MAX_NORM)

    def update(self) -> None:
        """Update the parameters."""
        if self.plan.manages:
            self.manager.step()
        else:
            super().update()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks of what a loss came to."""
        return sum_loss(value.detach())

    def whole(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of ``tensor``, which is laid out like ``parameter``. Collective."""
        assert isinstance(parameter, DistributedParameter)
        return parameter.gather_all_like(tensor)
