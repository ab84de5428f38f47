"""``BMTrainModelWrapper``: make a whole plain torch model distributed, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import materialized
from bmt_core.comm.collective_section import collective_section
from bmt_core.errors import ConfigError
from bmt_core.keyword_arguments import explain_keywords
from bmt_core.run.bmtrain_names import how_to_declare_whole, how_to_split
from bmt_core.run.runtime import current
from bmt_core.torch_internals import counting_versions
from bmt_params.guards.equal_layouts import ParameterLayout
from bmt_params.guards.equal_values import DECLARE_LOCAL
from bmt_params.guards.shardable import check_can_be_sharded
from bmt_params.init.module_init import ModuleInit, initialize_modules, initialize_unsaved_buffers
from bmt_params.parameter import DistributedParameter
from bmt_params.uninitialized import (
    check_values_at_first_call,
    has_values,
    materialize_buffers,
    note_first_buffers,
)
from bmt_zero.adapters import check_adapters, see_whole_adapters, see_whole_model
from bmt_zero.block import Block
from bmt_zero.block_engine import keep_in_blocks
from bmt_zero.float8_gathers import unwrap_float8_weights
from bmt_zero.forward_state import without_cache_in_recomputation
from bmt_zero.host_inputs import host_bytes_of
from bmt_zero.keep import Choice, Keep, choice_of
from bmt_zero.model_layers import describe_blocks, layers_of
from bmt_zero.outside_modules import modules_outside, shard_alone, shard_outside
from bmt_zero.param_dtype import (
    CastsInputs,
    check_param_dtype,
    compute_dtype,
    is_cast,
    kept_by_hugging_face,
    note_compute_dtypes,
)
from bmt_zero.tiles import check_tile, token_wise_modules
from bmt_zero.zero_run import zero_run

ModuleT = TypeVar("ModuleT", bound=nn.Module)


_OF_BLOCKS = "Make the layers Blocks before you wrap the model: Block(layer, ...)."


@explain_keywords(
    device_ids="init_distributed(device=...) chooses the device.",
    use_checkpoint=_OF_BLOCKS,
    zero_level=f"init_distributed(zero_level=...) gives it to all layers. {_OF_BLOCKS}",
)
@counting_versions()
def BMTrainModelWrapper(
    model: ModuleT,
    *,
    init: ModuleInit | bool = True,
    sync: Literal["rank0"] | None = None,
    param_dtype: torch.dtype | None = None,
    keep: Keep | None = None,
    tile: int | None = None,
    offload_inputs: bool | int = False,
) -> ModuleT:
    """Make ``model`` distributed in place and return it; works on any model of plain torch modules.

    The children of each outermost ``nn.ModuleList`` become Blocks; lists nested in them (experts)
    are part of the Block. So do layers in children without a forward, and layers of like kind in an
    ``nn.Sequential`` or ``nn.ModuleDict``: see :func:`bmt_zero.model_layers.layers_of`. All other
    parameters become :class:`DistributedParameter`, read as whole tensors and are gathered
    together. Rank 0 prints how many Blocks there are, and how many bytes are in the largest and
    outside of all. A parameter that is tied across blocks, or to a module outside of them, stays
    one parameter. Buffers move to the run's device. Every rank must pass the same values, and keeps
    its part; values that differ are an error at the first call.

    - ``init``: a model that was built under ``torch.device("meta")`` is initialised, one whole
      block at a time: ``init(module)`` is called for every module, children first. The default is
      that of :func:`init_parameters`: ``_init_weights`` of Hugging Face models, or
      ``reset_parameters`` of modules. ``init=False`` draws nothing, for a model whose values come
      from a checkpoint; buffers that are in no checkpoint are computed anyway.
    - ``sync``: with ``"rank0"`` the values of rank 0 are sent to all ranks first, one tensor at a
      time.
    - ``param_dtype``: that of every :class:`Block`, and of the parameters outside of Blocks. What a
      model of Hugging Face names in ``_keep_in_fp32_modules`` or ``_keep_in_fp32_modules_strict``
      keeps its dtype. Floating tensors among the model's arguments are cast if parameters outside
      of Blocks are.
    - ``tile``: that of every :class:`Block` with a module that says ``token_wise = True``. Blocks
      that were made before keep what they were given.
    - ``keep``: what the Blocks do not compute again in backward, see :class:`Block`; a number of
      bytes is for all of them together: ``BMTrainModelWrapper(model, keep=24 * 2**30)``. Blocks
      that were made before keep what they were given.
    - ``offload_inputs``: whether inputs of the Blocks, those made before too, wait for backward in
      host memory, and in how many bytes of it: see :class:`Block`.

    Collective. Raises :class:`ConfigError` on all ranks if ranks along an axis see the same data
    and no parameter is split or declared along it: gradients would be summed over ranks that have
    each computed the whole.
    """
    # All of this may raise, so it comes before anything is sharded.
    with collective_section(current().world, "wrapping the model") as results:
        unwrap_float8_weights(model.modules())
        check_can_be_sharded(model)
        check_adapters(model.modules())
        _check_is_not_quantized(model)
        _check_sync(model, sync)
        if check_param_dtype(param_dtype) is not None:
            _check_blocks(model, param_dtype)
        choice = choice_of(keep)
        check_tile(tile, layers_of(model))
        host_bytes = _host_bytes(model, offload_inputs)
        layout = ParameterLayout(model.named_parameters())
        results.own = layout.summary, _declared_axes(model), _without_values(model)
    summaries, declared, without_values = zip(*results.of_ranks, strict=True)
    if difference := layout.difference(summaries):
        raise ConfigError(
            f"Ranks wrap models of different parameters. {difference} {DECLARE_LOCAL}"
        )
    _check_is_split(model, [axes for axes in declared if axes is not None])
    if sync is not None:
        _check_all_have_values(without_values)
        _send_values_of_rank_0(model)
    if param_dtype is not None:
        # Before the Blocks are made: only the model says which parameters keep their dtype.
        note_compute_dtypes(model, param_dtype)
    _make_blocks(model, param_dtype, choice, tile, host_bytes)
    _note_model(model, param_dtype)
    if init is False:
        initialize_unsaved_buffers(model)
        check_values_at_first_call(model)
    else:
        initialize_modules(model, None if init is True else init)
    if current().rank == 0:
        print(describe_blocks(model), flush=True)
    zero_run().say_what_adapters_cost(model)
    return model


def _make_blocks(
    model: nn.Module,
    param_dtype: torch.dtype | None,
    choice: Choice | None,
    tile: int | None,
    host_bytes: int,
) -> None:
    """Make the layers of ``model`` Blocks and shard the parameters outside of them."""
    zero_run()  # now, because it observes calls and gathers parameters outside of Blocks together
    # For all modules at once, so that a buffer which several modules share stays one tensor.
    materialize_buffers(model.modules(), current().device)
    blocks = layers_of(model)
    outside = _parameters_outside(model, blocks)
    for parameter in _shared(blocks, outside):
        # Before the Blocks are made, of which none may shard it with its own.
        shard_alone(parameter)._shared = True
    for block in blocks:
        if not isinstance(block, Block):
            is_tiled = any(True for _ in token_wise_modules(block))
            Block(block, param_dtype=param_dtype, tile=tile if is_tiled else None)
    engines = [m._bmt_block for m in model.modules() if isinstance(m, Block)]
    keep_in_blocks(engines, choice)
    for engine in engines:
        engine.host_bytes = engine.host_bytes or host_bytes
    shard_outside(model)
    if param_dtype is not None and any(map(is_cast, outside)):
        model.register_forward_pre_hook(CastsInputs(param_dtype), with_kwargs=True)


def _note_model(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Tell the run, its guards and the Blocks what ``model`` is and where they stand in it."""
    run = zero_run()
    run.dtypes[model] = param_dtype
    run.wrapped[model] = run.module_changes.count
    note_first_buffers(modules_outside(model))
    for module in modules_outside(model):
        without_cache_in_recomputation(module)
        see_whole_model(module)
    see_whole_adapters(list(modules_outside(model)))
    for name, module in model.named_modules():
        if isinstance(module, Block):
            path = f"layer {name}" if name.isdigit() else name or "the model"
            module._bmt_block.state.set_path(path)


def _declared_axes(model: nn.Module) -> set[str] | None:
    """Return the axes along which a parameter is split or declared; None if none is trained."""
    parameters = list(model.parameters())
    declared = {
        locality.axis
        for p in parameters
        if isinstance(p, DistributedParameter)
        for locality in p.locality
    }
    return declared if any(p.requires_grad for p in parameters) else None


def _check_is_split(model: nn.Module, declared: Sequence[set[str]]) -> None:
    """Raise unless a parameter is declared along each axis whose ranks see the same data.

    ``declared`` has the axes of all ranks, because of the stages of a pipeline one alone may have
    parameters that are split.
    """
    topology = current().topology
    for axis in topology.same_loss_axes:
        size = topology.axis_size(axis)
        if size > 1 and declared and not any(axis in of_rank for of_rank in declared):
            raise ConfigError(
                f"The {size} ranks along {axis!r} see the same data, and no parameter of"
                f" {type(model).__name__} is split or declared along that axis: each rank would"
                f" compute the whole model, and gradients, which are summed, would be {size} times"
                f" too large. Split the model before it is wrapped: {how_to_split(axis)}. Or, if"
                " each of these ranks is to compute all of it, declare that:"
                f" {how_to_declare_whole(axis)}. A model that is only evaluated is left alone if it"
                " is frozen: model.requires_grad_(False)."
            )


def _check_is_not_quantized(model: nn.Module) -> None:
    for module in model.modules():  # PEFT's model around it has not the attribute itself
        if method := module.__dict__.get("quantization_method"):
            raise ConfigError(
                f"{type(module).__name__} is quantized ({getattr(method, 'value', method)}), and"
                " parts of its storage are no parts of its parameters. Load it in bfloat16:"
                f" sharded over {current().world_size} ranks, each has"
                f" {2 / current().world_size:.2g} bytes of a parameter."
            )


def _check_blocks(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Raise unless Blocks that were made before fit a model with ``param_dtype``."""
    for name, module in model.named_modules():
        if isinstance(module, Block) and module._bmt_block.state.param_dtype != param_dtype:
            found = module._bmt_block.state.param_dtype
            raise ConfigError(
                f"{name or 'The model'} is a Block with param_dtype={found}, and the model is"
                f" wrapped with param_dtype={param_dtype}. Give the Block the same, or leave it to"
                " the wrapper to make it; a layer that keeps its dtype says so itself, before:"
                f" layer.param_dtype = {found or torch.float32}."
            )
    for parameter, name in kept_by_hugging_face(model):
        if is_cast(parameter):
            raise ConfigError(
                f"{name} stays {parameter.dtype} by _keep_in_fp32_modules of its model, and is in a"
                f" Block that was made before with param_dtype={compute_dtype(parameter)}. Let"
                " BMTrainModelWrapper make the Blocks, or set param_dtype of the module that has"
                " the parameter before its Block is made."
            )


def _host_bytes(model: nn.Module, value: bool | int) -> int:
    """Return what ``offload_inputs=value`` means for all Blocks of ``model``; those without
    recomputation have nothing to offload.
    """
    made = [m._bmt_block for m in model.modules() if isinstance(m, Block)]
    is_compiled = True in [engine.compile and engine.use_checkpoint for engine in made]
    return host_bytes_of(value, use_checkpoint=True, compile=is_compiled)


def _check_sync(model: nn.Module, sync: str | None) -> None:
    if sync not in (None, "rank0"):
        raise ConfigError(f"sync must be 'rank0' or None, not {sync!r}.")
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DistributedParameter)]
    if sync is not None and sharded:
        raise ConfigError(
            f"{sharded[0]} is sharded already, and sync='rank0' sends whole values. Wrap the plain"
            " model, without Blocks of your own, or give every rank the same values."
        )
    quantized = [name for name, buffer in model.named_buffers() if buffer.is_quantized]
    if sync is not None and quantized:
        raise ConfigError(
            f"{quantized[0]} is a quantized buffer, which sync='rank0' cannot send. Give every rank"
            " the same values."
        )


def _without_values(model: nn.Module) -> list[str]:
    return [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not has_values(tensor)
    ]


def _check_all_have_values(without_values: Sequence[list[str]]) -> None:
    for rank, names in enumerate(without_values):
        if names != without_values[0]:
            name = next(
                name
                for name in (*names, *without_values[0])
                if (name in names) != (name in without_values[0])
            )
            raise ConfigError(
                f"{name} has values on some ranks only (rank 0 and rank {rank} differ), and"
                " sync='rank0' sends values to all of them. Make the model alike on all ranks: with"
                " memory for its values, not under torch.device('meta')."
            )


@torch.no_grad()
def _send_values_of_rank_0(model: nn.Module) -> None:
    runtime = current()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if has_values(tensor):
            sent = materialized(tensor.detach().to(runtime.device))
            with annotate(f"to send the values of {name}"):
                runtime.world.broadcast(sent).wait()
            for dim, stride in enumerate(tensor.stride()):
                if stride == 0:  # of an expanded tensor, whose elements along this dim are one
                    tensor, sent = tensor.narrow(dim, 0, 1), sent.narrow(dim, 0, 1)
            tensor.copy_(sent)


def _parameters_outside(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Parameter]:
    inside = {id(module) for block in blocks for module in block.modules()}
    found: dict[int, nn.Parameter] = {}
    for module in modules_outside(model):
        if id(module) not in inside:
            found |= {id(p): p for p in module._parameters.values() if p is not None}
    return list(found.values())


def _shared(blocks: list[nn.Module], outside: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that live in several blocks, or in a block and outside."""
    owners: dict[int, int] = {id(parameter): 1 for parameter in outside}
    shared: dict[int, nn.Parameter] = {}
    for block in blocks:
        for parameter in block.parameters():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
            if owners[id(parameter)] > 1:
                shared[id(parameter)] = parameter
    return list(shared.values())
