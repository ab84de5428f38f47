"""``PipelineTransformerBlockList``: a list of layers that is divided over the stages of
a pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.keyword_arguments import explain_keywords
from bmt_core.run.runtime import current
from bmt_params.locality import local_along
from bmt_params.modules.block_use import Scheduled, is_in_scheduled_step, make_block
from bmt_params.modules.layer_list import LayerList
from bmt_params.modules.outermost_call import is_call_under_way
from bmt_params.parameter import DistributedParameter
from bmt_params.parameter_holders import own_axes
from bmt_pipeline.agreement import agreed_key
from bmt_pipeline.batch_options import check_batch_options
from bmt_pipeline.batch_rows import move_rows
from bmt_pipeline.empty_stages import note_layers_on_stages
from bmt_pipeline.layer_split import split_layers
from bmt_pipeline.payload import Layout
from bmt_pipeline.pipeline_ranks import AXIS, num_stages, own_pipeline, own_stage, pipeline_group
from bmt_pipeline.pipelined_call import LayersOfStage, PipelinedCall
from bmt_pipeline.schedules import Placement, Schedule
from bmt_pipeline.schedules.gpipe import gpipe
from bmt_pipeline.stage_runner import Layouts
from bmt_pipeline.transfers import Transfers
from bmt_pipeline.whole_batch import Arguments, BatchShape, WholeBatch

Layer = nn.Module | Callable[[], nn.Module]
"""A module, or a function without arguments that makes one."""

_STEPS_TO_CHECK = 3  # more than one, because many trainings begin with a step on zeros
# A bound for lists whose arguments differ at every call, so that memory does not grow.
_KEPT_LAYOUTS = 256


_OF_BLOCKS = 'Make each layer a Block, with mode="PIPE": Block(layer, mode="PIPE", ...).'


class PipelineTransformerBlockList(LayerList):
    """A ``TransformerBlockList`` whose layers are divided over the stages of the pipeline.

    It is called like that list: every rank passes its own batch and gets the outputs of its own
    batch. The ranks of a pipeline send their batches to the first stage. The joined batch passes
    the stages in ``num_micro_batches`` micro-batches (set by :func:`init_distributed`; default
    ``pipe_size``), and the last stage sends each rank its outputs. This is GPipe (Huang et al.
    2019): all forwards run in the call, all backwards in its backward. The code before and after
    the list stays data parallel.

    - ``modules``: raw modules, which become Blocks (of bmt-zero) local to the stage; Blocks made
      with ``mode="PIPE"`` (AssertionError otherwise); or functions without arguments that make a
      layer. A function is called only on the layer's stage, with random numbers of its own, so the
      layer's values are the same for any number of stages. A stage keeps only its own modules.
      Parameters are named by the layer's number in the whole list, so files fit any grid.
    - ``num_hidden``: the number of leading arguments that pass from layer to layer, see
      :class:`TransformerBlockList`.
    - ``batch_dim``: the dim of the batch in the hidden states (1 for sequence-first models), or a
      pair if it is another one in what the list returns. The default is 0, or for layers that
      ``bmt_tp.parallelize`` has split what their plan says.
    - ``batch_related``: that of all calls that do not give it, as those of a
      :class:`PipelineModel`; see :meth:`forward`.
    - ``costs``: one number per layer in any unit, divides the layers so that the most expensive
      part costs as little as possible; otherwise the first parts have one layer more.
    - ``chunks``, ``placement``: divide the list into ``pipe_size * chunks`` parts, for schedules
      with several parts per stage: see :func:`train_step`.

    Making it is collective if parameters of a module were sharded before. Raises
    :class:`ConfigError` for fewer layers than parts, and for layers on different stages that share
    parameters. With ``pipe_size`` 1 it is the ordinary list.
    """

    @explain_keywords(
        num_micro_batches="init_distributed(num_micro_batches=...) is for all pipelines.",
        use_checkpoint=_OF_BLOCKS,
        virtual_stages="chunks",
        zero_level=_OF_BLOCKS,
    )
    def __init__(
        self,
        modules: Iterable[Layer],
        num_hidden: int = 1,
        *,
        batch_dim: int | tuple[int, int] | None = None,
        batch_related: Sequence[int | str] | None = None,
        costs: Sequence[float] | None = None,
        chunks: int = 1,
        placement: str | Placement = Placement.LOOP,
    ) -> None:
        super().__init__(num_hidden)
        check_batch_options(batch_dim, batch_related)
        members = list(modules)
        self.batch_dims = _batch_dims(batch_dim, members)
        self.batch_related = batch_related
        self.chunks = chunks
        self.placement = Placement(placement)
        self.stages, self.stage_id, self.pipe_idx = num_stages(), own_stage(), own_pipeline()
        self._total = len(members)
        self.split = split_layers(len(members), self.stages * chunks, costs) if members else ()
        """The numbers of the layers of each part, on all stages."""
        self._layouts: dict[tuple[object, ...], Layouts] = {}
        self._steps = 0
        self._computes_loss = False
        self._transfers: dict[tuple[tuple[int, int], ...], Transfers] = {}
        note_layers_on_stages()
        stages = [self.get_stage_by_layer_id(layer) for layer in range(len(members))]
        for index, layer in _own_layers(members, stages, self.stage_id):
            self.add_module(str(index), layer)
            if self.stages > 1:
                layer.register_forward_pre_hook(_refuse_call_without_list)

    @property
    def layer_ids(self) -> list[int]:
        """The numbers of this stage's layers in the whole list."""
        return self.get_range_by_stage_id(self.stage_id)

    def __len__(self) -> int:
        """Return the number of layers of all stages; iteration goes over those of this stage."""
        return self._total

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers of this stage. :class:`ConfigError` where a model needs all: see
        :meth:`__getitem__`.
        """
        self._refuse_in_step()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Return layers by their number in the whole list; IndexError for one of another stage.

        Raises :class:`ConfigError` in the forward of a model of bmt and in a step, which need the
        layers of all stages.
        """
        self._refuse_in_step()
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._total))]
        number = range(self._total)[int(index)]
        if str(number) not in self._modules:
            raise IndexError(
                f"Layer {number} lies on stage {self.get_stage_by_layer_id(number)}, and this rank"
                f" has stage {self.stage_id}, with the layers {self.layer_ids}. Index only these."
            )
        return self._modules[str(number)]

    def layers(self) -> list[nn.Module]:
        """The layers of this stage, in order."""
        self._refuse_in_loss()
        return super().layers()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """See :meth:`nn.Module.named_modules`, which finds the layers of this stage; an error
        inside of the loss of a step.
        """
        self._refuse_in_loss()
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        self._refuse_in_loss()
        return super().named_children()

    @contextmanager
    def _computing_loss(self) -> Iterator[None]:
        """Inside, a search for modules or parameters is an error: in a loss it would find some of
        the layers only.
        """
        self._computes_loss = True
        try:
            yield
        finally:
            self._computes_loss = False

    def _refuse_in_loss(self) -> None:
        # In a forward a search is right where it looks for a device or a dtype.
        if self._computes_loss:
            self._refuse_in_step()

    def _refuse_in_step(self) -> None:
        if self.stages > 1 and is_call_under_way():
            raise ConfigError(
                f"This list has the layers of {self.stages} stages, and those of stage"
                f" {self.stage_id}, {self.layer_ids}, are not enough to compute a model or its"
                " loss. Call the list instead of looping over it, indexing or searching it. What"
                " layers compute besides, such as an auxiliary loss, must be among their hidden"
                " states: return it as an output of the layer, with num_hidden=2 and one value per"
                " row of the batch."
            )

    def get_range_by_stage_id(self, stage_id: int) -> list[int]:
        """Return the numbers of the layers of a stage."""
        parts = [
            self.placement.part_of(stage_id, chunk, self.stages) for chunk in range(self.chunks)
        ]
        return [layer for part in parts if self.split for layer in self.split[part]]

    def get_part_len_by_stage_id(self, stage_id: int) -> int:
        """Return the number of layers of a stage."""
        return len(self.get_range_by_stage_id(stage_id))

    def get_stage_by_layer_id(self, layer_id: int) -> int:
        """Return the stage of a layer."""
        return next(
            stage for stage in range(self.stages) if layer_id in self.get_range_by_stage_id(stage)
        )

    def layers_of_chunks(self) -> list[list[nn.Module]]:
        """Return this stage's layers, by chunk."""
        parts = [
            self.placement.part_of(self.stage_id, chunk, self.stages)
            for chunk in range(self.chunks)
        ]
        return [[self.get_submodule(str(layer)) for layer in self.split[part]] for part in parts]

    def transfers(self, schedule: Schedule) -> Transfers:
        """Return the :class:`Transfers` of ``schedule``. Collective over the pipeline at the first
        call with new edges.
        """
        edges = edges_of(schedule)
        if edges not in self._transfers:
            self._transfers[edges] = Transfers(edges)
        return self._transfers[edges]

    def _is_to_check(self, key: tuple[object, ...]) -> bool:
        """Whether a step with this ``key``, which is counted, is one of the first, or its layouts
        are new: alike on all stages.
        """
        self._steps += 1
        return self._steps <= _STEPS_TO_CHECK or key not in self._layouts

    @contextmanager
    def layouts(self, key: tuple[object, ...]) -> Iterator[Layouts]:
        """Yield the layouts of an earlier step with this ``key``, or an empty dict. They are kept
        unless the step fails.
        """
        layouts = self._layouts.pop(key, {})
        yield layouts
        self._layouts[key] = layouts
        if len(self._layouts) > _KEPT_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]

    def forward(
        self,
        *args: Any,
        batch_related: Sequence[int | str] | None = None,
        return_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run all layers on this rank's batch. Collective over the pipeline; all its ranks pass
        tensors of the same shapes.

        Returns what :meth:`TransformerBlockList.forward` returns. Further tensors whose dim 0 is
        the batch are divided into micro-batches too; any other tensor is passed whole with the rows
        of its rank. If sizes alone would mislead, ``batch_related`` says which arguments after the
        hidden states have the batch as dim 0, all others have not: positional ones by their number,
        counted from 0, keyword arguments by name. An empty list means none of them.

        Raises :class:`ConfigError` on all ranks if the batch cannot be divided into micro-batches
        or ranks pass different shapes. If a stage fails, it raises its error, and the others
        :class:`RemoteError` with its traceback.
        """
        if self.stages == 1 or not self._total:
            return super().forward(*args, return_hidden_states=return_hidden_states, **kwargs)
        group = pipeline_group()
        micro_batches = current().settings.num_micro_batches or self.stages
        problem: Exception | None = None
        text = ""
        try:
            check_batch_options(None, batch_related)
            arguments = Arguments(*self.split_arguments(args), kwargs)
            related = self.batch_related if batch_related is None else batch_related
            shape = BatchShape.of(
                arguments, self.stages, micro_batches, self.batch_dims[0], related
            )
            self._check_states(return_hidden_states)
            text = (
                f"{Layout(arguments, 'arguments').text}\n{shape}\n"
                f"return_hidden_states={return_hidden_states}, {grad_mode()}"
            )
        except Exception as error:
            problem = error
        key = agreed_key(group, text, what_needs_gradients(self), problem)
        schedule = gpipe(self.stages, micro_batches, self.chunks, placement=self.placement)
        last = schedule.parts - 1
        parts = [
            LayersOfStage(
                layers,
                batch_dims=self.batch_dims,
                is_first=schedule.part_of(self.stage_id, chunk) == 0,
                is_last=schedule.part_of(self.stage_id, chunk) == last,
                keeps_states=return_hidden_states,
            )
            for chunk, layers in enumerate(self.layers_of_chunks())
        ]
        batch = WholeBatch(arguments, shape, group)
        with self.layouts(key) as layouts:
            call = PipelinedCall(
                schedule,
                parts,
                batch,
                self.batch_dims[1],
                self.transfers(schedule),
                layouts,
                self.split,
            )
            made = call.run(torch.is_grad_enabled())
            layout = layouts[schedule.parts]
            assert layout is not None
        return self._own_results(made, layout, schedule, shape.rows)

    def _check_states(self, returns_states: bool) -> None:
        if returns_states and self.batch_dims[0] != self.batch_dims[1]:
            raise ConfigError(
                "return_hidden_states stacks the inputs of all layers, and here the batch is dim"
                f" {self.batch_dims[0]} of some and dim {self.batch_dims[1]} of others. Return what"
                " is needed of them from the layers, with num_hidden=2."
            )

    def _own_results(
        self, made: list[torch.Tensor], layout: Layout, schedule: Schedule, rows: int
    ) -> Any:
        """Return the results for this rank's batch, the hidden states in ``layout``. Before, each
        stage has some of the results for the batches of all ranks.
        """
        group, source = pipeline_group(), schedule.place_of(schedule.parts - 1)[0]
        sent = [rows if self.stage_id == source else 0] * self.stages
        received = [rows if stage == source else 0 for stage in range(self.stages)]
        count = len(layout.tensors())
        dim = self.batch_dims[1]
        own = [
            move_rows(x, sent, received, group).movedim(0, dim).contiguous() for x in made[:count]
        ]
        hidden = [*layout.filled(own)]
        lengths = [self.get_part_len_by_stage_id(stage) for stage in range(self.stages)]
        order = [
            layer for stage in range(self.stages) for layer in self.get_range_by_stage_id(stage)
        ]
        for x in made[count:]:
            sent = [lengths[self.stage_id] * rows] * self.stages
            moved = move_rows(x, sent, [length * rows for length in lengths], group)
            state = torch.unflatten(moved, 0, (self._total, rows))
            if order != sorted(order):
                state = state[torch.tensor(order, device=state.device).argsort()]
            hidden.append(state.movedim(1, dim + 1).contiguous())
        return hidden[0] if len(hidden) == 1 else tuple(hidden)


@functools.lru_cache
def edges_of(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return all (source, destination) pairs of stages between which the schedule sends."""
    stages = range(schedule.stages)
    return tuple(
        (source, other) for source in stages for other in stages if schedule.sends(source, other)
    )


def grad_mode() -> str:
    """Return a text that says whether a call records gradients."""
    return "with gradients" if torch.is_grad_enabled() else "without gradients"


def what_needs_gradients(module: nn.Module) -> str:
    """Return a text of the conditions, besides input shapes, that determine the layout of the
    outputs of ``module``.
    """
    device = current().device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    trained = [parameter.requires_grad for parameter in module.parameters()]
    return f"{cast} {trained} {[each.training for each in module.modules()]}"


def _batch_dims(
    declared: int | tuple[int, int] | None, members: Sequence[Layer]
) -> tuple[int, int]:
    """Return the dims of the batch in the hidden states that go into the list ``members`` and in
    those that come out.
    """
    if isinstance(declared, tuple):
        return declared
    if declared is not None:
        return declared, declared
    # A plan for tensor parallelism knows this of its layers.
    ends = [getattr(member, "_bmt_batch_dims", (0, 0)) for member in members]
    return (ends[0][0], ends[-1][1]) if ends else (0, 0)


def _refuse_call_without_list(layer: nn.Module, args: tuple[Any, ...]) -> None:
    if not is_in_scheduled_step():
        raise ConfigError(
            f"This {type(layer).__name__} is a layer of a PipelineTransformerBlockList on several"
            " stages, and was called without the list, whose other stages it would leave out. Call"
            " the list instead of looping over its layers."
        )


def _own_layers(
    members: Sequence[Layer], stages: Sequence[int], own: int
) -> Iterable[tuple[int, nn.Module]]:
    """Yield (number, layer) for the layers of the stage ``own``, as Blocks. ``stages`` is the stage
    of each layer.
    """
    blocks = [
        member
        for member in members
        if isinstance(member, nn.Module) and isinstance(member, Scheduled)
    ]
    assert len(blocks) == len({id(block) for block in blocks}), (
        "A Block stands twice in this list. Pass the raw module twice to share its parameters."
    )
    for block in blocks:
        _check_mode(block)
    _check_not_on_two_stages(members, stages)
    draw = (
        int(torch.randint(2**62, (), device="cpu"))
        if any(not isinstance(member, nn.Module) for member in members)
        else 0
    )
    for index, member in enumerate(members):
        if isinstance(member, nn.Module):
            layer = (
                _as_block(member)
                if stages[index] == own or _is_sharded_over_stages(member)
                else member
            )
        elif stages[index] == own:
            layer = _as_block(_made(member, draw + index))
            _check_mode(layer)
        if stages[index] == own:
            yield index, layer


def _check_mode(block: Any) -> None:
    assert block._mode == "PIPE", (
        'A Block in a PipelineTransformerBlockList must be made with mode="PIPE", because its'
        " parameters lie on one stage. So it is"
        " with pipe_size=1, too: a script must run alike on every grid."
    )


def _as_block(module: nn.Module) -> nn.Module:
    return module if isinstance(module, Scheduled) else make_block(module, local_axes=(AXIS,))


def _is_sharded_over_stages(module: nn.Module) -> bool:
    """Whether the parameters are sharded over stages, so that all ranks must take part when the
    layer's stage gathers them.
    """
    parameters = list(module.parameters())
    return any(isinstance(p, DistributedParameter) for p in parameters) and AXIS not in own_axes(
        parameters
    )


def _made(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    device = current().device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), local_along((AXIS,)):
        torch.manual_seed(seed)
        return factory()


def _check_not_on_two_stages(members: Sequence[Layer], stages: Sequence[int]) -> None:
    """Raise on all ranks if layers that share parameters lie on several of ``stages``, given
    by layer.
    """
    holders: dict[int, int] = {}
    for index, member in enumerate(members):
        for shared in (member, *member.parameters()) if isinstance(member, nn.Module) else ():
            first = holders.setdefault(id(shared), index)
            if stages[first] != stages[index]:
                raise ConfigError(
                    f"Layers {first} and {index} of the list, of {type(member).__name__}, share"
                    f" parameters but lie on the stages {stages[first]} and {stages[index]}. Put"
                    " them on one stage: change the number of stages, or give costs."
                )
