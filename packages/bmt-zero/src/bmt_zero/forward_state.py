"""What a forward begins with, besides its parameters, so that it can be computed again from the
same: random numbers, autocast, buffers, and key-value caches among its arguments.

[Note: changed buffers] Copied before each forward are buffers of one dimension or none (statistics
and counters, to which torch writes without counting a version, and which are small), those of
norms, and those that ``written_buffers`` of their module declares. Others, such as masks and rotary
tables, are constant. Torch's count of versions shows a write to one of them, and the first forward
is compared with the values before it, too; both are errors. A later write that counts no version
(through ``.data`` or NumPy, by a collective of ``torch.distributed``, or by a kernel of the user's)
cannot be detected. Buffers that forward replaces, adds or removes need no copy.

[Note: caches] A cache that Hugging Face's models pass from layer to layer is an object with
``get_seq_length()`` or, for linear attention, ``update_conv_state()``. A block appends its keys and
values to it. If the block were recomputed with the same object, it would find its own entries
there. So recomputation gets a copy of the cache as it was before forward. The copy shares the
tensors, unless the cache writes into them, which its ``is_compileable`` says; then they are copied
too.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from bmt_core.errors import BmtError, ConfigError
from bmt_core.torch_internals import has_internal_overlap, storage_key, version_of
from bmt_zero.written_buffers import written_names


class RandomNumbers:
    """The generators' states before forward; kept only if forward drew random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._states = [generator.get_state() for generator in self._generators]

    def forget_unless_drawn(self) -> None:
        """Forget the states if nothing was drawn since."""
        # The host has the state of CUDA's generator, so nothing waits for the device.
        pairs = zip(self._generators, self._states, strict=True)
        if all(torch.equal(generator.get_state(), state) for generator, state in pairs):
            self._generators, self._states = [], []

    def present(self) -> list[torch.Tensor]:
        """Return the generators' present states."""
        return [generator.get_state() for generator in self._generators]

    def skip_to(self, states: Sequence[torch.Tensor]) -> None:
        """Set the generators to states that forward has had. Nothing if forward drew nothing."""
        if self._states:
            _set_states(self._generators, states)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Inside, the generators draw what they drew in forward."""
        present = [generator.get_state() for generator in self._generators]
        _set_states(self._generators, self._states)
        try:
            yield
        finally:
            _set_states(self._generators, present)


class Modes:
    """Autocast and the default device of forward, to be restored for the recomputation."""

    def __init__(self, device: torch.device) -> None:
        self._types = dict.fromkeys(("cpu", device.type))
        self._autocast = self._present_autocast()
        self._device = torch.get_default_device()

    def restored(self) -> AbstractContextManager[object]:
        """Inside, autocast and the default device are those of forward.

        Autocast keeps no casts. Those that it kept of a weight in an earlier step of the same
        autocast region are old; in forward it keeps none of a Block's weights, which are not
        leaves of the graph there.
        """
        is_other_device = self._device != torch.get_default_device()
        is_other_autocast = self._autocast != self._present_autocast()
        casts = True in [enabled for _, _, enabled in self._autocast]  # one call less than any()
        if not (is_other_device or is_other_autocast or casts):
            return nullcontext()
        stack = ExitStack()
        if is_other_device:
            stack.enter_context(self._device)
        for kind, dtype, enabled in self._autocast:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
            )
        return stack

    def _present_autocast(self) -> list[tuple[str, torch.dtype, bool]]:
        return [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in self._types
        ]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


Home = dict[str, torch.Tensor | None]
"""A module's ``_buffers``."""


class BlockBuffers:
    """The buffers of ``modules``, which are those of a block, with their names within the block.
    ``earlier`` are those that the block had.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]] = (),
        earlier: BlockBuffers | None = None,
    ) -> None:
        by_prefix = {f"{name}." if name else "": module for name, module in modules}
        self.homes: dict[str, Home] = {prefix: m._buffers for prefix, m in by_prefix.items()}
        """Those of each module, by what their names within the block begin with."""
        are_same = earlier is not None and list(map(id, self.homes.values())) == list(
            map(id, earlier.homes.values())
        )
        self.is_first: bool = earlier is None or earlier.is_first or not are_same
        """Whether no forward with these modules has ended."""
        self._written = {
            prefix + name for prefix, m in by_prefix.items() for name in written_names(m)
        }

    def to(self, device: torch.device) -> None:
        """Move all buffers to ``device``."""
        for home in self.homes.values():
            for name, buffer in home.items():
                if buffer is not None:
                    home[name] = buffer.to(device)

    def unique(self) -> dict[str, torch.Tensor]:
        """Return the present buffers by their names within the block, each once: by a name that is
        declared, if there is one.
        """
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, home in self.homes.items():
            for name, buffer in home.items():
                if buffer is not None and (
                    id(buffer) not in named or prefix + name in self._written
                ):
                    named[id(buffer)] = prefix + name, buffer
        return dict(named.values())

    def is_constant(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether forward must not write to ``buffer``."""
        return buffer.ndim > 1 and name not in self._written


class _Before(NamedTuple):
    """A buffer before forward. One that ``is_constant`` must not change."""

    name: str
    buffer: torch.Tensor
    is_constant: bool
    state: tuple[int, int]
    value: torch.Tensor | None

    @property
    def is_changed(self) -> bool:
        return _state_of(self.buffer) != self.state

    @property
    def has_other_values(self) -> bool:
        """Whether the values differ from the copy, if there is one. NaN equals anything."""
        if self.value is None or type(self.buffer) is not torch.Tensor:
            return False
        now, copy = self.buffer.to_dense(), self.value.to_dense()
        return not torch.equal(now, copy) and not bool((now != now).any())


class BuffersBeforeForward:
    """The buffers before a forward. A recomputation starts from them, and leaves the present
    buffers unchanged.
    """

    def __init__(self, buffers: BlockBuffers) -> None:
        self._block = buffers
        self._homes = [(home, dict(home)) for home in buffers.homes.values()]
        self._before = [
            _Before(
                name,
                buffer,
                is_constant := buffers.is_constant(name, buffer),
                _state_of(buffer),
                None if is_constant and not buffers.is_first else _copy_of(buffer),
            )
            for name, buffer in buffers.unique().items()
        ]
        # Inside restored(): storages of buffers whose present values differ.
        self._rewritten: set[int] = set()
        self.are_rewritten = False
        """Whether some buffer has other values now than outside of :meth:`restored`."""

    def end_forward(self) -> None:
        """Raise :class:`ConfigError` if forward has written to a constant buffer. Called after a
        forward that has succeeded.
        """
        self._block.is_first = False
        for before in self._before:
            if before.is_constant and (before.is_changed or before.has_other_values):
                raise ConfigError(
                    f"Forward wrote to buffer {before.name!r} of a block in place, and the block"
                    f" would be recomputed from the new values. {_remedy(before.name)}"
                )

    def forget_constants(self) -> None:
        """Free the copies of constant buffers. Called after forward."""
        # From here on a declared buffer has changed if it was written to after this forward.
        self._before = [
            before._replace(value=None)
            if before.is_constant
            else before._replace(state=_state_of(before.buffer))
            for before in self._before
        ]
        # Modules without buffers have nothing to restore.
        self._homes = [(home, before) for home, before in self._homes if home or before]

    def check_unchanged(self) -> None:
        """Raise :class:`BmtError` if a constant buffer has changed since forward."""
        for before in self._before:
            if before.value is None and before.is_changed:
                raise BmtError(
                    f"The program wrote to buffer {before.name!r} of a block in place after its"
                    " forward, and the block would be recomputed from the new values."
                    f" {_remedy(before.name)}"
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the buffers have their values from before forward."""
        present = [dict(home) for home, _ in self._homes]
        kept = [
            (before.buffer, before.value) for before in self._before if before.value is not None
        ]
        values = [buffer.detach().clone() for buffer, _ in kept]
        for home, found in self._homes:
            _set_all(home, found)
        for before in self._before:
            if before.value is not None:
                _write(before.buffer, before.value)
                if before.is_changed and _is_plain(before.buffer):
                    self._rewritten.add(storage_key(before.buffer))
        self.are_rewritten = bool(self._rewritten)
        try:
            yield
        finally:
            self._rewritten.clear()
            self.are_rewritten = False
            for (home, _), found in zip(self._homes, present, strict=True):
                _set_all(home, found)
            for (buffer, _), value in zip(kept, values, strict=True):
                _write(buffer, value)

    def with_own_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a copy if it is a buffer whose values change at the end
        of :meth:`restored`.
        """
        is_rewritten = _is_plain(tensor) and storage_key(tensor) in self._rewritten
        return tensor.clone() if is_rewritten else tensor


def _remedy(name: str) -> str:
    own_name = name.rpartition(".")[2]
    return (
        f"Declare it in its module before the block is made: written_buffers = ({own_name!r},). Or"
        " assign a new tensor to the module's attribute instead of writing into the present one, or"
        " set use_checkpoint=False."
    )


def _state_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return the version of ``buffer`` and its memory, which assigning ``.data`` replaces."""
    return version_of(buffer), storage_key(buffer) if _is_plain(buffer) else 0


def _copy_of(buffer: torch.Tensor) -> torch.Tensor | None:
    return None if buffer.is_quantized or _is_expanded(buffer) else buffer.detach().clone()


def _set_all(home: Home, buffers: Home) -> None:
    home.clear()
    home.update(buffers)


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.shape == value.shape and buffer.layout is torch.strided:
        buffer.data.copy_(value)  # by .data, so that torch counts no modification
    else:
        buffer.data = value.clone()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a plain strided tensor."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def _is_expanded(buffer: torch.Tensor) -> bool:
    """Whether elements share memory (``expand``). Nothing writes to such a tensor, and its copy
    would be larger.
    """
    return _is_plain(buffer) and has_internal_overlap(buffer)


def with_own_caches(arguments: Any) -> Any:
    """Return ``arguments`` with a copy in place of every cache: see [Note: caches]. Containers
    without a cache are returned themselves.
    """
    if isinstance(arguments, (tuple, list)) and not hasattr(arguments, "_fields"):
        items = [with_own_caches(item) for item in arguments]
        return arguments if all(map(operator.is_, items, arguments)) else type(arguments)(items)
    if type(arguments) is dict:
        changed = {key: with_own_caches(value) for key, value in arguments.items()}
        return (
            arguments if all(map(operator.is_, changed.values(), arguments.values())) else changed
        )
    return _copied(arguments) if _is_cache(arguments) else arguments


def without_cache_in_recomputation(module: nn.Module) -> None:
    """Make ``module`` build no cache in training with blocks that recompute, unless the call
    passes ``use_cache``.

    A cache would keep the keys and values of every layer until backward: memory that recomputation
    is meant to save.
    """
    names = list(inspect.signature(module.forward).parameters)
    if "use_cache" in names and getattr(getattr(module, "config", None), "use_cache", False):
        module.register_forward_pre_hook(
            functools.partial(_no_cache, names.index("use_cache")), with_kwargs=True
        )


def _no_cache(
    position: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    is_said = len(args) > position or kwargs.get("use_cache") is not None
    if is_said or not (module.training and torch.is_grad_enabled() and _recomputes(module)):
        return None
    return args, {**kwargs, "use_cache": False}


def _recomputes(module: nn.Module) -> bool:
    engines = (inner.__dict__.get("_bmt_block") for inner in module.modules())
    return any(engine is not None and engine.use_checkpoint for engine in engines)


def _is_cache(value: Any) -> bool:
    known = any(
        callable(getattr(value, name, None)) for name in ("get_seq_length", "update_conv_state")
    )
    return known and not isinstance(value, (torch.Tensor, nn.Module, type))


def _copied(value: Any, is_written: bool = False) -> Any:
    if _is_cache(value):
        copied = copy.copy(value)
        is_written = bool(getattr(value, "is_compileable", False))
        copied.__dict__.update(
            {name: _copied(held, is_written) for name, held in vars(value).items()}
        )
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(item, is_written) for item in value)
    if type(value) is dict:
        return {key: _copied(item, is_written) for key, item in value.items()}
    return value.clone() if is_written and isinstance(value, torch.Tensor) else value
