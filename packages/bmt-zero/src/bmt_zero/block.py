"""``Block``: a module whose parameters are sharded, gathered when it runs, and reduced when its
gradients are complete.

[Note: added parameters] Parameters that are put into a Block, by an adapter or a new submodule, are
sharded by the Block's next call, because until then the program may give them values. An optimizer
is made of parameters that have their values, and may get states for their parts right away, from a
checkpoint, say; an average of the model is a copy of it, and is compared with the parts. So making
an optimizer, or adding a group to one, shards those of its parameters that wait for a call, and
copying a Block shards all of its own first. What saves or loads a model meets the others, and takes
them whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmt_core.errors import ConfigError
from bmt_core.keyword_arguments import check_keywords
from bmt_core.run.bmtrain_names import BlockMode, axes_of_mode, mode_of_axes
from bmt_core.run.runtime import current
from bmt_core.run.topology import DATA_AXIS, REPLICA_AXIS
from bmt_core.settings import ReduceDtype, check_reduce_dtype, check_zero_level
from bmt_core.torch_internals import (
    are_transforms_active,
    code_of,
    counting_versions,
    never_compiled,
    set_code,
)
from bmt_params.guards.shardable import check_can_be_sharded
from bmt_params.init.parameter_init import grouped_parameters, init_parameters
from bmt_params.modules.block_use import BlockUse
from bmt_params.modules.distributed_module import (
    extend,
    load_own_parts,
    reduce_extended,
    whole_value,
)
from bmt_params.modules.outermost_call import module_call, used_in_transform
from bmt_params.nested import tensors_in
from bmt_params.uninitialized import (
    UNINITIALIZED,
    check_values_at_first_call,
    materialize_buffers,
    note_first_buffers,
    require_values,
)
from bmt_zero.adapters import check_adapters, see_whole_adapters
from bmt_zero.block_engine import BlockEngine
from bmt_zero.block_state import BlockSettings
from bmt_zero.compiled_keep import Form, contexts_of
from bmt_zero.float8_gathers import unwrap_float8_weights
from bmt_zero.host_inputs import host_bytes_of
from bmt_zero.keep import BlockKeep, Keep, choice_of
from bmt_zero.param_dtype import check_param_dtype
from bmt_zero.tiles import check_tile

# Arguments of other libraries.
_INSTEAD = {
    "activation_checkpointing": "use_checkpoint",
    "gradient_checkpointing": "use_checkpoint",
    "stage": "zero_level",
    "zero_stage": "zero_level",
}


Arguments = ParamSpec("Arguments")


def _undone_on_error(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """If a Block cannot be made, its module is what it was before, for another try."""

    @functools.wraps(init)
    def init_or_undo(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            init(*args, **kwargs)
        except BaseException:
            block: Any = args[0]
            block.__class__ = _class_before(block.__class__)
            engine = block.__dict__.pop("_bmt_block", None)
            if engine is not None:
                engine.state.run.blocks.pop(engine.state.number, None)
            raise

    return init_or_undo


@functools.cache
def _class_before(kind: Any) -> Any:
    """Return the class of a module of class ``kind`` before it became a Block. What has extended it
    since then has no forward.
    """
    mixin, kind = kind.__dict__["_bmt_extends"]
    while not issubclass(mixin, Block):
        mixin, kind = kind.__dict__["_bmt_extends"]
    return kind


class Block(nn.Module):
    """Shard ``inner_module`` by ZeRO, as one unit, with activation checkpointing.

    The block *is* the inner module: the same object, with the block's behaviour added to its class,
    so names, attributes, hooks and ``isinstance`` stay as they were. Its parameters become
    :class:`DistributedParameter` in place; plain ``nn.Parameter`` are accepted. In forward they
    read as whole tensors.

    - ``use_checkpoint``: keep only the inputs and recompute the activations in backward, with the
      random numbers of forward; without it, parts of the module may use ``torch.utils.checkpoint``
      themselves.
    - ``keep``: what is not computed again, because forward keeps its results. ``"attention"`` (of
      torch's functions), ``"products"`` (of matrices, those of linear layers too), both in a tuple;
      a number of bytes, of all calls that wait for backward, which prefers what takes most
      operations per byte, and measures the first call; or a function ``(operation, args) -> bool``,
      called for each operation of torch. Losses and gradients are those of full recomputation.
      Products of tensor-parallel and float8 layers are not kept. A recomputation that calls other
      operations or shapes raises :class:`BmtError`.
    - ``tile``: of submodules that say ``token_wise = True``, so many tokens are computed at a time,
      so that their activations exist for one tile only, in forward and in backward. Losses and
      gradients stay the same up to rounding. Such a module computes each token by itself; it takes
      and returns one floating tensor (batch, tokens, ...) or (tokens, width). Declare it before the
      Block is made: ``layer.mlp.token_wise = True``.
    - ``offload_inputs``: large inputs that need a gradient (of 1 MiB and more) wait for backward in
      host memory, and come back while the next layer's backward runs. True, or how many bytes of
      host memory all that wait on this rank may take: further inputs stay on the GPU. Not for
      compiled blocks.
    - ``zero_level``: by default that of ``init_distributed``. 0 replicates parameters; 1 shards
      gradients and optimizer state, and gathers parameters once after each optimizer step; 2
      gathers in forward and keeps them until backward ends; 3 frees them after forward and gathers
      again in backward.
    - ``initialized``: the values are final, and :func:`init_parameters` does not change them.
    - ``reduce_dtype``: how gradients are summed over ranks, see :func:`init_distributed`.
    - ``compile``: run the inner module's forward through ``torch.compile``; blocks of one class
      share the compiled code.
    - ``local_axes``: axes of the rank grid along which ranks have different blocks, such as the
      axis of pipeline stages. Parameters are then sharded only over ranks that agree along these
      axes.
    - ``mode``: ``"PIPE"`` is BMTrain's spelling for a block inside one pipeline stage.
    - ``shard_size``: "all", or how many ranks see different data, shards this block over all of
      these, although ``init_distributed(shard_size=...)`` shards the others over fewer; it takes
      less memory, and its collectives reach over hosts. To shard one layer over 8 ranks and the
      others over all, start with ``init_distributed(shard_size=8)`` and give the others "all". A
      third size is not possible.
    - ``param_dtype``: gather parameters, compute and send gradients in this dtype, such as
      ``torch.bfloat16``, while shards, ``.grad`` and optimizer keep that of the parameters.
      Floating tensors among the arguments are cast to it if a parameter is; buffers are not. A
      module in the block with an attribute ``param_dtype`` says it for itself and what is in it:
      ``router.param_dtype = torch.float32``; its arguments are not cast.

    Forward may write to buffers of one dimension or none, to those of norms, and to those that
    ``written_buffers`` of their module names, a tuple, before the Block is made; the recomputation
    starts from the values before. A write to another one raises :class:`ConfigError`; but a later
    one than the first through ``.data`` or NumPy, by a collective of ``torch.distributed`` or by a
    kernel of your own is not noticed, and gives wrong gradients.

    ``inner_module`` may be on the meta device: it is sharded without values and gets them from
    :func:`init_parameters` or from a checkpoint. Calling it before that is an error.

    Making a block is collective if a parameter was sharded before. Calling it is collective, and so
    is its backward.
    """

    _bmt_block: BlockEngine
    # Initialisation gathers the whole block at once: see bmt_params.init.whole_on_read.
    _bmt_shards_as_one = True

    def __new__(cls, inner_module: nn.Module, *args: Any, **kwargs: Any) -> Block:
        if not isinstance(inner_module, nn.Module):
            raise TypeError(
                f"A Block is made of an nn.Module, not of {type(inner_module).__name__}. Pass the"
                " layer itself, not its class."
            )
        if isinstance(inner_module, Block):
            raise ConfigError(
                f"This {type(inner_module).__name__} is a Block already. Wrap a module once and"
                " share the Block."
            )
        check_keywords(cls.__init__, kwargs, _INSTEAD)
        # Raises outside of a run, before the module is changed.
        current()
        # Before the check, which refuses such wrappers as it does other classes of tensors.
        unwrap_float8_weights(inner_module.modules())
        check_can_be_sharded(inner_module)
        check_adapters(inner_module.modules())
        extend(inner_module, cls)
        assert isinstance(inner_module, Block)
        return inner_module

    @_undone_on_error
    @counting_versions()
    def __init__(
        self,
        inner_module: nn.Module,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: BlockMode = "BLOCK",
        *,
        local_axes: Iterable[str] = (),
        reduce_dtype: ReduceDtype | None = None,
        compile: bool = False,
        shard_size: int | Literal["all"] | None = None,
        param_dtype: torch.dtype | None = None,
        keep: Keep | None = None,
        tile: int | None = None,
        offload_inputs: bool | int = False,
    ) -> None:
        if keep is not None and not use_checkpoint:
            raise ConfigError(
                f"keep={keep!r} says what is not computed again in backward, and with"
                " use_checkpoint=False nothing is. Leave out one of the two."
            )
        choice = choice_of(keep)
        check_tile(tile, [self], is_compiled=compile)
        level = check_zero_level(
            current().settings.zero_level if zero_level is None else zero_level
        )
        if isinstance(local_axes, str):
            raise ConfigError(
                f"local_axes must be a collection of axes, such as ({local_axes!r},), not a text."
            )
        settings = BlockSettings(
            level=level,
            local_axes=tuple(dict.fromkeys([*local_axes, *axes_of_mode(mode)])),
            over_replicas=_is_over_replicas(shard_size),
            reduce_dtype=check_reduce_dtype(reduce_dtype or current().settings.reduce_dtype),
            param_dtype=check_param_dtype(param_dtype),
            tile=tile,
            compile=compile,
        )
        host_bytes = host_bytes_of(offload_inputs, use_checkpoint=use_checkpoint, compile=compile)
        kept = None if choice is None else BlockKeep(choice)
        self.__dict__["_bmt_block"] = BlockEngine(settings, use_checkpoint, kept, host_bytes)
        self._bmt_register()
        materialize_buffers(self.modules(), current().device)
        note_first_buffers(self.modules())
        see_whole_adapters(self.modules())
        self._bmt_block.state.refresh(self)
        check_values_at_first_call(self)
        for parameter in self._bmt_block.state.parameters():
            parameter._initialized = initialized

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._bmt_block
        if (
            engine.running.call is not None
        ):  # inside its own call, with the full parameters in place
            return super().__call__(*args, **kwargs)
        if torch.compiler.is_compiling():
            return _uncompiled(self, *args, **kwargs)
        # In inner calls, too: module_call() asks at the outermost call only.
        if are_transforms_active():
            raise used_in_transform(self)
        if UNINITIALIZED in self.__dict__:
            require_values(self)
        with module_call(self):
            return engine.run(self, super().__call__, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the inner module with whole parameters and the same arguments."""
        engine = self._bmt_block
        # A program may call forward() itself, and the parameters must be gathered there, too.
        if engine.running.call is None:
            return self(*args, **kwargs)
        # A call that is measured for a budget of kept results is recomputed uncompiled.
        if engine.compile and engine.running.recomputation is None:
            recomputes = engine.use_checkpoint and torch.is_grad_enabled()
            own_class: Any = type(self)
            compiled = compiled_forward(_class_before(own_class), recomputes, engine.form)
            return compiled(self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """See ``nn.Module``. ``parameters()`` and ``zero_grad()`` call it, also after a backward
        pass that failed.
        """
        if "_bmt_block" in self.__dict__:
            self._bmt_block.state.run.before_listing_parameters()
        yield from super().named_modules(*args, **kwargs)

    def set_use(self, use: BlockUse) -> None:
        """Set the :class:`BlockUse` of the following calls. For schedules and
        gradient accumulation.
        """
        self._bmt_block.use = use

    def init_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Initialise the block: see :func:`bmt_params.init_parameters`. If the inner module has
        this method, it is called instead.
        """
        own = getattr(super(), "init_parameters", functools.partial(init_parameters, self))
        return own(*args, **kwargs)

    def grouped_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """See :func:`bmt_params.grouped_parameters`. If the inner module has this method, it is
        called instead.
        """
        own = getattr(super(), "grouped_parameters", functools.partial(grouped_parameters, self))
        return own(*args, **kwargs)

    @property
    def _zero_level(self) -> int:
        """The block's ZeRO level; may be changed between steps among 1, 2 and 3."""
        return self._bmt_block.state.level

    @_zero_level.setter
    def _zero_level(self, level: int) -> None:
        self._bmt_block.state.set_level(check_zero_level(level))

    @property
    def _use_checkpoint(self) -> bool:
        """Whether activations are recomputed in backward; may be changed between steps."""
        return self._bmt_block.use_checkpoint

    @_use_checkpoint.setter
    def _use_checkpoint(self, value: bool) -> None:
        self._bmt_block.use_checkpoint = value

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the layer itself recomputes, for Hugging Face's models: False. Setting it
        switches the block's recomputation.
        """
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self._use_checkpoint = bool(value)

    @property
    def _module(self) -> nn.Module:
        return self  # BMTrain's name of the inner module

    @property
    def _mode(self) -> BlockMode:
        return mode_of_axes(self._bmt_block.state.layout.local_axes)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return whole tensors by the inner module's names. Collective."""
        with self._bmt_parameters_shown():
            # The parameters themselves: a detached part would not say of which whole it is.
            result = super().state_dict(
                *args, destination=destination, prefix=prefix, keep_vars=True
            )
            if not keep_vars:
                for key in [key for key in result if key.startswith(prefix)]:
                    if isinstance(result[key], torch.Tensor):
                        result[key] = whole_value(result[key])
            return result

    @contextmanager
    def _bmt_parameters_shown(self) -> Iterator[None]:
        """Inside, the modules hold the sharded parameters even while a backward pass runs; for
        state dicts.
        """
        # A failed pass may have left whole parameters, which would be put back at the end.
        self._bmt_block.state.run.end_failed_passes()
        slots = self._bmt_block.state.slots
        slots.show_parameters()
        try:
            yield
        finally:
            slots.show_present()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        extra: Any,
        errors: Any,
    ) -> None:
        load_own_parts(self.modules())
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, extra, errors)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is sharded as this block is: see [Note: added parameters].
        self._bmt_block.state.refresh(self)
        return reduce_extended(self, protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bmt_register()

    def _bmt_register(self) -> None:
        state = self._bmt_block.state
        state.run.blocks[state.number] = self


def _is_over_replicas(shard_size: int | str | None) -> bool:
    """Whether a Block with this ``shard_size`` is sharded over all ranks that see different data,
    and not over those of the run's ``shard_size``. Raises :class:`ConfigError` if it is neither of
    the two.
    """
    size, copies = map(current().topology.axis_size, (DATA_AXIS.name, REPLICA_AXIS.name))
    if shard_size is None or shard_size == size:
        return False
    if shard_size in ("all", size * copies):
        return True
    divides = type(shard_size) is int and shard_size > 0 and size * copies % shard_size == 0
    raise ConfigError(
        f"A Block of this run has shard_size={size}, that of init_distributed(), or"
        f" {size * copies}, all ranks that see different data, and not {shard_size!r}."
        + (
            " To shard only some layers over fewer ranks, start with"
            f" init_distributed(shard_size={shard_size!r}), leave it out here, and give all other"
            ' layers Block(..., shard_size="all"). A third size is not possible.'
            if divides or shard_size == "host"
            else f" No run can have it, because it does not divide {size * copies}."
        )
    )


CheckpointBlock = Block


@never_compiled
def _uncompiled(block: Block, *args: Any, **kwargs: Any) -> Any:
    """Call ``block`` in a model that is compiled as a whole. The compiled graph breaks before
    the block.
    """
    return block(*args, **kwargs)


@functools.cache
def compiled_forward(
    kind: type[nn.Module], recomputes: bool, form: Form = ""
) -> Callable[..., Any]:
    """Return the compiled ``forward`` of modules of class ``kind``.

    With ``recomputes`` the recomputation is compiled too, so that the compiler sees it and saves
    nothing else for backward than what ``form`` keeps.
    """
    options: dict[str, Any] = {"context_fn": contexts_of(form)} if form else {}

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not recomputes:
            return kind.forward(module, *args, **kwargs)

        def again(*tensors: torch.Tensor) -> Any:
            return kind.forward(module, *args, **kwargs)

        # When this runs uncompiled, torch saves the random state of the devices of the tensors
        # passed here.
        return checkpoint(again, *tensors_in((args, kwargs)), use_reentrant=False, **options)

    # torch limits how often one code object is compiled, and without a copy all forwards defined
    # here would share one.
    set_code(forward, code_of(forward).replace())
    compiled: Callable[..., Any] = torch.compile(forward)
    return compiled
