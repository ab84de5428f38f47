"""Buffers of a block that is recomputed: forward may change them, and the recomputation must start
from their values before it.

[Note: changed buffers] Buffers of one dimension or none are copied before each forward: they are
statistics and counters, to which torch writes without counting a version, and they are small. Of
the others most are constant, such as masks and rotary tables. So the value before forward of a
buffer of two or more dimensions is copied only

- in the first forward, which shows what forward changes: in place, by other memory, or by a write
  that counts no version, which the values show. After a module of the block was switched between
  training and evaluation, the next forward is a first one again;
- if an earlier forward has changed the buffer;
- if ``written_buffers`` of its module declares it when the block is made.

If another one begins to change, torch's count of versions shows it; its earlier value is lost, and
the recomputation raises. A write that counts no version (through ``.data`` or NumPy, by a
collective of ``torch.distributed``, or by a kernel of the user's) and that the first forward of
this block did not make cannot be detected: such a buffer must be declared. Buffers that forward
replaces, adds or removes need no copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from bmt_core.errors import BmtError
from bmt_core.torch_internals import has_internal_overlap, storage_key, version_of
from bmt_zero.written_buffers import declared_buffers

Home = dict[str, torch.Tensor | None]
"""A module's ``_buffers``."""


class BlockBuffers:
    """The buffers of ``modules``, which are those of a block, with their names within the block.

    ``earlier`` are those that the block had, whose knowledge is kept: all if the modules are the
    same, else which buffers change.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]] = (),
        earlier: BlockBuffers | None = None,
    ) -> None:
        by_prefix = {f"{name}." if name else "": module for name, module in modules}
        self.homes: dict[str, Home] = {prefix: m._buffers for prefix, m in by_prefix.items()}
        """Those of each module, by what their names within the block begin with."""
        # Weakly: the block refers to this object.
        self._modules = [weakref.ref(module) for module in by_prefix.values()]
        self._modes: list[bool] = []
        self.changes = {
            prefix + name: True
            for prefix, module in by_prefix.items()
            for name in declared_buffers(module)
        }
        """By name, whether forward changes the buffer, for buffers that are declared or, of two or
        more dimensions, that a forward has had: see [Note: changed buffers].
        """
        self.changed_uncounted: set[str] = set()
        """Names of buffers that a forward has changed without counting a version."""
        if earlier is not None:
            self._learn_from(earlier)

    def _learn_from(self, earlier: BlockBuffers) -> None:
        # The copies of calls that are under way refer to the same set.
        self.changed_uncounted = earlier.changed_uncounted
        known = earlier.changes
        if [ref() for ref in self._modules] == [ref() for ref in earlier._modules]:
            self._modes = earlier._modes
        else:
            known = {name: True for name, is_changed in known.items() if is_changed}
        self.changes = {**known, **self.changes}

    def to(self, device: torch.device) -> None:
        """Move all buffers to ``device``."""
        for home in self.homes.values():
            for name, buffer in home.items():
                if buffer is not None:
                    home[name] = buffer.to(device)

    def unique(self) -> dict[str, torch.Tensor]:
        """Return the present buffers by their names within the block, each once: by a name under
        which it is known to change, if there is one.
        """
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, home in self.homes.items():
            for name, buffer in home.items():
                if buffer is not None and (
                    id(buffer) not in named or self.changes.get(prefix + name, False)
                ):
                    named[id(buffer)] = prefix + name, buffer
        return dict(named.values())

    def notice_modes(self) -> None:
        """Forget which buffers are constant if a module was switched between training and
        evaluation. Called before a forward.
        """
        modes = [(module := ref()) is not None and module.training for ref in self._modules]
        if modes != self._modes:
            self._modes = modes
            self.changes = {name: True for name, is_changed in self.changes.items() if is_changed}

    def may_change(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether forward must be expected to change ``buffer``, so that its value before must
        be copied.
        """
        may_change = self.changes.get(name, True) and not buffer.is_quantized
        return may_change and not _is_expanded(buffer)


class _Before(NamedTuple):
    """A buffer before forward. Without a ``value`` it must not change."""

    name: str
    buffer: torch.Tensor
    state: tuple[int, int]
    value: torch.Tensor | None

    @property
    def is_changed(self) -> bool:
        return _state_of(self.buffer) != self.state

    @property
    def may_have_other_values(self) -> bool:
        """Whether the values differ from the copy, if there is one, or cannot be compared."""
        return self.value is not None and not (
            _is_plain(self.buffer) and torch.equal(self.buffer, self.value)
        )


class BuffersBeforeForward:
    """The buffers before a forward. A recomputation starts from them, and leaves the present
    buffers unchanged.
    """

    def __init__(self, buffers: BlockBuffers) -> None:
        self._block = buffers
        self._homes = [(home, dict(home)) for home in buffers.homes.values()]
        unique = buffers.unique()
        if unique:
            buffers.notice_modes()
        self._before = [
            _Before(
                name,
                buffer,
                _state_of(buffer),
                buffer.detach().clone() if buffers.may_change(name, buffer) else None,
            )
            for name, buffer in unique.items()
        ]
        # Inside restored(): storages of buffers whose present values differ.
        self._rewritten: set[int] = set()
        self.are_rewritten = False
        """Whether some buffer has other values now than outside of :meth:`restored`."""

    def learn_changes(self) -> None:
        """Note which buffers the block's forward changes. Called after a forward that
        has succeeded.
        """
        block = self._block
        for before in self._before:
            if before.buffer.ndim > 1 and not block.changes.get(before.name, False):
                is_changed = before.is_changed
                if not is_changed and before.may_have_other_values:
                    block.changed_uncounted.add(before.name)
                    is_changed = True
                block.changes[before.name] = is_changed

    def forget_unchanged(self) -> None:
        """Free the copies of buffers that forward has not changed. Called after forward."""
        self._before = [
            before if before.value is None else self._after_forward(before)
            for before in self._before
        ]
        self._homes = [(home, before) for home, before in self._homes if home or before]

    def _after_forward(self, before: _Before) -> _Before:
        if before.is_changed or self._block.changes.get(before.name, True):
            return before._replace(state=_state_of(before.buffer))
        return before._replace(value=None)

    def check_unchanged(self) -> None:
        """Raise :class:`BmtError` if a buffer has changed whose value before forward was
        not kept.
        """
        uncounted = self._block.changed_uncounted
        lost = [
            before.name
            for before in self._before
            if before.value is None and (before.is_changed or before.name in uncounted)
        ]
        if lost:
            own_name = lost[0].rpartition(".")[2]
            raise BmtError(
                f"Buffer {lost[0]!r} of a block was modified in place, and the block would be"
                " recomputed from the new value. The earlier value is kept only if the block's"
                " first forward or a later one modified the buffer before. Declare in the buffer's"
                f" module that it is written to: written_buffers = ({own_name!r},). Or assign a new"
                " tensor to the module's attribute instead of writing into the present one, or set"
                " use_checkpoint=False."
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


def _state_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return the version of ``buffer`` and its memory, which assigning ``.data`` replaces."""
    return version_of(buffer), storage_key(buffer) if _is_plain(buffer) else 0


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
