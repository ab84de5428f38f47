"""The pipelines that ``pipeline`` compares: torch's, bmt's, and one stage without communication.
All have the same first values.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import bmtrain as bmt
from bench.device import StepClock
from bench.models import SEED, Embeddings, Head, Size, TransformerBlock, fill
from bench.training import token_loss
from bmt_pipeline import PipelineModel, PipelineTransformerBlockList, train_step
from bmt_pipeline.layer_split import split_layers
from bmt_pipeline.schedules import Placement

TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
# A torch that lets callers do without the logits does not join those of all micro-batches.
_WITHOUT_OUTPUTS = (
    {"return_outputs": False}
    if "return_outputs" in inspect.signature(Schedule1F1B.step).parameters
    else {}
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all pipelines of a run have in common. Ranks are stages."""

    size: Size
    dtype: torch.dtype
    device: torch.device
    micro_batch: int
    recompute: bool
    level: int
    reduce_dtype: Any = "param"
    convert: Callable[[nn.Module], nn.Module] = lambda unit: unit
    """What is used in the place of a unit of ``models.py``, with its values."""

    def unit(self, make: type[nn.Module], number: int) -> nn.Module:
        """Return unit ``number`` of the model: embeddings, then blocks, then the head. It is whole,
        with its values.
        """
        with torch.device("meta"):
            unit = make(self.size, self.dtype)
        unit.to_empty(device=self.device)
        fill(unit, self.size, seed=SEED + number, rounded_to=self.dtype)
        return self.convert(unit)

    def embeddings(self) -> nn.Module:
        """Return the embeddings."""
        return self.unit(Embeddings, 0)

    def block(self, number: int) -> nn.Module:
        """Return block ``number``, counted from 0."""
        return self.unit(TransformerBlock, number + 1)

    def head(self) -> nn.Module:
        """Return the head."""
        return self.unit(Head, self.size.num_layers + 1)

    def part(self, part: int, parts: int) -> nn.Sequential:
        """Return one of the parts into which the model is cut, for torch."""
        blocks = [self.block(number) for number in split_layers(self.size.num_layers, parts)[part]]
        units = [checkpoint_wrapper(block) for block in blocks] if self.recompute else blocks
        first = [self.embeddings()] if part == 0 else []
        last = [self.head()] if part == parts - 1 else []
        return nn.Sequential(*first, *units, *last)

    def hidden(self, device: torch.device | str) -> torch.Tensor:
        """Return room for what goes from part to part, for one micro-batch."""
        shape = (self.micro_batch, self.size.sequence, self.size.dim_model)
        return torch.empty(shape, dtype=self.dtype, device=device).requires_grad_()


class Pipeline(ABC):
    """The model, divided over the ranks. Making one is collective, and so are all its methods."""

    gradients_are_sums = False
    """Whether gradients are those of the sum of all ranks' losses, where others have those of
    the mean.
    """

    def __init__(self, setting: Setting, schedule: str, chunks: int, placement: Placement) -> None:
        self.setting, self.schedule, self.chunks, self.placement = (
            setting,
            schedule,
            chunks,
            placement,
        )
        self.models = self._build()

    @abstractmethod
    def _build(self) -> Sequence[nn.Module]:
        """Return what holds this rank's parameters."""

    def prepare(self, micro_batches: int) -> None:
        """Be ready for steps of so many micro-batches."""
        self.micro_batches = micro_batches

    @abstractmethod
    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of all micro-batches, which every rank passes.

        The mean over ranks of what is returned is the loss.
        """

    def clear(self) -> None:
        """Clear the gradients."""
        for model in self.models:
            model.zero_grad(set_to_none=True)

    def squared_gradients(self) -> float:
        """Return the sum of squares of this rank's gradients of the mean loss."""
        gradients = [
            p.grad for model in self.models for p in model.parameters() if p.grad is not None
        ]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in gradients]
        factor = bmt.world_size() if self.gradients_are_sums else 1
        return float(torch.stack(norms).double().square().sum()) / factor**2

    def parts(self) -> list[int]:
        """Return which parts of the model this rank has, by chunk."""
        return [
            self.placement.part_of(bmt.rank(), chunk, bmt.world_size())
            for chunk in range(self.chunks)
        ]

    def close(self) -> None:
        """Let go of everything."""
        self.__dict__.clear()


class TorchPipeline(Pipeline):
    """``torch.distributed.pipelining``: plain modules, and a stage for each part of this rank."""

    def _build(self) -> Sequence[nn.Module]:
        return [self.setting.part(part, self._num_parts) for part in self.parts()]

    def prepare(self, micro_batches: int) -> None:
        """See :meth:`Pipeline.prepare`."""
        super().prepare(micro_batches)
        stages = [
            self._stage(part, module)
            for part, module in zip(self.parts(), self.models, strict=True)
        ]
        self._is_first = 0 in self.parts()
        self._is_last = self._num_parts - 1 in self.parts()
        make = TORCH_SCHEDULES[self.schedule]
        takes_several = issubclass(make, ScheduleInterleaved1F1B | ScheduleZBVZeroBubble)
        self._runner = make(
            stages if takes_several else stages[0], micro_batches, loss_fn=token_loss
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Pipeline.step`."""
        inputs = (tokens,) if self._is_first else ()
        if not self._is_last:
            self._runner.step(*inputs, **_WITHOUT_OUTPUTS)
            return torch.zeros((), device=self.setting.device)
        losses: list[torch.Tensor] = []
        self._runner.step(*inputs, target=targets, losses=losses, **_WITHOUT_OUTPUTS)
        return torch.stack([loss.detach() for loss in losses]).mean() * bmt.world_size()

    @property
    def _num_parts(self) -> int:
        return bmt.world_size() * self.chunks

    def _stage(self, part: int, module: nn.Module) -> PipelineStage:
        setting, size = self.setting, self.setting.size
        rows = (setting.micro_batch, size.sequence)
        tokens = torch.empty(rows, dtype=torch.long, device="meta")
        logits = torch.empty(
            (*rows, size.vocabulary), dtype=setting.dtype, device="meta"
        ).requires_grad_()
        return PipelineStage(
            module,
            part,
            self._num_parts,
            setting.device,
            input_args=tokens if part == 0 else setting.hidden("meta"),
            output_args=logits if part == self._num_parts - 1 else setting.hidden("meta"),
            group=dist.group.WORLD,
        )


class PipelinedGPT(PipelineModel):
    """The model under bmt: a Block of one stage for each layer; embeddings and head are sharded
    over all stages.
    """

    def __init__(self, setting: Setting, *, chunks: int, placement: Placement) -> None:
        super().__init__()
        self.embeddings = bmt.BMTrainModelWrapper(setting.embeddings())
        self.blocks = PipelineTransformerBlockList(
            [partial(self._block, setting, number) for number in range(setting.size.num_layers)],
            chunks=chunks,
            placement=placement,
        )
        self.head = bmt.BMTrainModelWrapper(setting.head())

    def before_layers(self, *inputs: Any) -> Any:
        """See :class:`PipelineModel`."""
        return self.embeddings(*inputs)

    def after_layers(self, *hidden: Any) -> Any:
        """See :class:`PipelineModel`."""
        return self.head(*hidden)

    @staticmethod
    def _block(setting: Setting, number: int) -> nn.Module:
        return bmt.Block(
            setting.block(number),
            use_checkpoint=setting.recompute,
            zero_level=setting.level,
            initialized=True,
            mode="PIPE",
            reduce_dtype=setting.reduce_dtype,
        )


class BmtPipeline(Pipeline):
    """``bmt_pipeline.train_step``."""

    gradients_are_sums = True

    def _build(self) -> Sequence[nn.Module]:
        self.model = PipelinedGPT(self.setting, chunks=self.chunks, placement=self.placement)
        return [self.model]

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Pipeline.step`."""
        return train_step(
            self.model, token_loss, (tokens, targets), self.schedule, self.micro_batches
        )


class BmtList(BmtPipeline):
    """The same model, called as usual: each rank passes its own part of the batch, and has the loss
    of it.
    """

    def prepare(self, micro_batches: int) -> None:
        """See :meth:`Pipeline.prepare`."""
        super().prepare(micro_batches)
        # Of init_distributed: another start for each number would not run in the same
        # process group.
        run = bmt.current()
        run.settings = dataclasses.replace(run.settings, num_micro_batches=micro_batches)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Pipeline.step`."""
        tokens, targets = (whole.chunk(bmt.world_size())[bmt.rank()] for whole in (tokens, targets))
        loss = token_loss(self.model(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class StageAlone(Pipeline):
    """This rank's stage on constant inputs, micro-batch after micro-batch: what a pipeline without
    bubbles would take.
    """

    def _build(self) -> Sequence[nn.Module]:
        self._clocks: list[StepClock] = []
        return [self.setting.part(bmt.rank(), bmt.world_size())]

    def prepare(self, micro_batches: int) -> None:
        """See :meth:`Pipeline.prepare`."""
        super().prepare(micro_batches)
        generator = torch.Generator(self.setting.device).manual_seed(SEED)
        self._hidden = (
            self.setting.hidden(self.setting.device).detach().normal_(generator=generator)
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Pipeline.step`. There is no loss."""
        clock = StepClock(self.setting.device)
        clock.mark()
        for part in zip(
            tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True
        ):
            made, gradient = self._forward(*part)
            clock.mark()
            torch.autograd.backward(made, gradient)
            clock.mark()
        self._clocks.append(clock)
        return torch.zeros((), device=self.setting.device)

    def seconds(self, steps: int) -> tuple[list[float], list[float]]:
        """Return how long forwards and backwards of single micro-batches took in the last
        ``steps``, when the device is done.
        """
        taken = [second for clock in self._clocks[-steps:] for second in clock.seconds()]
        return taken[0::2], taken[1::2]

    def _forward(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rank, (stage,) = bmt.rank(), self.models
        made: torch.Tensor = stage(tokens if rank == 0 else self._hidden.clone().requires_grad_())
        return (
            (token_loss(made, targets), None)
            if rank == bmt.world_size() - 1
            else (made, self._hidden)
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One pipeline by its name. ``planned`` is the name of the schedule in
    ``bmt_pipeline.schedules``.
    """

    kind: type[Pipeline]
    schedule: str = ""
    planned: str = ""
    chunks: int = 1
    placement: Placement = Placement.LOOP

    def make(self, setting: Setting) -> Pipeline:
        """Build the model. Collective."""
        return self.kind(setting, self.schedule, self.chunks, self.placement)


ALONE = "stage alone"
VARIANTS = {
    ALONE: Variant(kind=StageAlone),
    "torch gpipe": Variant(kind=TorchPipeline, schedule="gpipe", planned="gpipe"),
    "torch 1f1b": Variant(kind=TorchPipeline, schedule="1f1b", planned="1f1b"),
    "torch interleaved": Variant(
        kind=TorchPipeline, schedule="interleaved", planned="interleaved", chunks=2
    ),
    "torch zbv": Variant(
        kind=TorchPipeline, schedule="zbv", planned="zero-bubble", chunks=2, placement=Placement.V
    ),
    "bmt list": Variant(kind=BmtList, planned="gpipe"),
    "bmt gpipe": Variant(kind=BmtPipeline, schedule="gpipe", planned="gpipe"),
    "bmt 1f1b": Variant(kind=BmtPipeline, schedule="1f1b", planned="1f1b"),
    "bmt interleaved": Variant(
        kind=BmtPipeline, schedule="interleaved", planned="interleaved", chunks=2
    ),
    "bmt zero-bubble": Variant(kind=BmtPipeline, schedule="zero-bubble", planned="zero-bubble"),
    "bmt zbv": Variant(
        kind=BmtPipeline,
        schedule="zero-bubble",
        planned="zero-bubble",
        chunks=2,
        placement=Placement.V,
    ),
}
SCHEDULES = tuple(
    name.removeprefix("bmt ") for name, variant in VARIANTS.items() if variant.kind is BmtPipeline
)
