"""Buffers of a block that is recomputed: forward may change them, and the recomputation must start
from their values before it.

Buffers that forward changes in place, replaces, adds or removes are detected. torch updates the
running statistics of norms without counting a version, so every 1-D buffer is treated as changed.

[Note: large buffers] A copy of a causal mask may need a GiB. So only the first forward copies all
buffers, which shows which of them it changes. Later forwards copy the small ones, and of the large
ones those that an earlier forward changed. If another large one begins to change, torch's count of
versions shows it; its earlier value is lost, and the recomputation raises. A write through
``.data`` or NumPy that begins after the first forward cannot be detected: write to the
buffer itself. Small buffers are copied so that such writes are right, too: a copy takes less than
the operations that would read the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from bmt_core.errors import BmtError
from bmt_core.torch_internals import has_internal_overlap, storage_key

Home = dict[str, torch.Tensor | None]
"""A module's ``_buffers``."""

LARGE_BYTES = 2**20
"""A buffer of at least so many bytes is large: see [Note: large buffers]."""


class BlockBuffers:
    """The buffers of a block. ``homes`` has those of each module, by the module's name within
    the block.
    """

    def __init__(self, homes: Mapping[str, Home]) -> None:
        self.homes = homes
        self.changes: dict[str, bool] = {}
        """By name, whether a forward has changed the buffer, for buffers that a forward has had."""

    def to(self, device: torch.device) -> None:
        """Move all buffers to ``device``."""
        for home in self.homes.values():
            for name, buffer in home.items():
                if buffer is not None:
                    home[name] = buffer.to(device)

    def unique(self) -> dict[str, torch.Tensor]:
        """Return the present buffers by their names within the block, each once."""
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for module, home in self.homes.items():
            for name, buffer in home.items():
                if buffer is not None:
                    named.setdefault(id(buffer), (f"{module}.{name}" if module else name, buffer))
        return dict(named.values())

    def may_change(self, name: str, buffer: torch.Tensor) -> bool:
        """Whether forward must be expected to change ``buffer``, so that its value before must
        be copied.
        """
        is_large = _is_plain(buffer) and buffer.ndim > 1 and buffer.nbytes >= LARGE_BYTES
        return not _is_expanded(buffer) and (not is_large or self.changes.get(name, True))


class _Before(NamedTuple):
    """A buffer before forward. Without a ``value`` it must not change."""

    name: str
    buffer: torch.Tensor
    state: tuple[int, int]
    value: torch.Tensor | None

    @property
    def is_changed(self) -> bool:
        return _state_of(self.buffer) != self.state


class BuffersBeforeForward:
    """The buffers before a forward. A recomputation starts from them, and leaves the present
    buffers unchanged.
    """

    def __init__(self, buffers: BlockBuffers) -> None:
        self._block = buffers
        self._homes = [(home, dict(home)) for home in buffers.homes.values()]
        with torch.no_grad():
            self._before = [
                _Before(
                    name,
                    buffer,
                    _state_of(buffer),
                    buffer.clone() if buffers.may_change(name, buffer) else None,
                )
                for name, buffer in buffers.unique().items()
            ]
        # Inside restored(): storages of buffers whose present values differ.
        self._rewritten: set[int] = set()
        self.are_rewritten = False
        """Whether some buffer has other values now than outside of :meth:`restored`."""

    def learn_changes(self) -> None:
        """Note which buffers the block's forward changes. Called after a forward that
        has succeeded.
        """
        changes = self._block.changes
        for before in self._before:
            if before.buffer.ndim > 1 and not changes.get(before.name, False):
                value = None if before.name in changes else before.value
                # The values are compared in the first forward, because a write through .data counts
                # no version.
                is_written = value is not None and _has_other_values(before.buffer, value)
                changes[before.name] = before.is_changed or is_written

    def forget_unchanged(self) -> None:
        """Free the copies of buffers that forward has not changed. Called after forward."""
        self._before = [
            before._replace(state=_state_of(before.buffer))
            if self._keeps(before)
            else before._replace(value=None)
            for before in self._before
        ]
        self._homes = [(home, before) for home, before in self._homes if home or before]

    def _keeps(self, before: _Before) -> bool:
        may_change = before.buffer.ndim < 2 or self._block.changes.get(before.name, False)
        return before.value is not None and (may_change or before.is_changed)

    def check_unchanged(self) -> None:
        """Raise :class:`BmtError` if a buffer has changed whose value before forward was
        not kept.
        """
        lost = [
            before.name for before in self._before if before.value is None and before.is_changed
        ]
        if lost:
            raise BmtError(
                f"Buffer {lost[0]!r} of a block was modified in place, and the block would be"
                " recomputed from the new value. The earlier value is kept only if the block's"
                f" forward modified the buffer, and for a buffer of {LARGE_BYTES >> 20} MiB or more"
                " only if an earlier forward did so, too. Assign a new tensor to the module's"
                " attribute instead of writing into the present one, or set use_checkpoint=False."
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


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was modified in place, by torch's version counter."""
    # Tensors of inference mode count no versions.
    return 0 if tensor.is_inference() else tensor._version


def _state_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return the version of ``buffer`` and its memory, which assigning ``.data`` replaces."""
    return version_of(buffer), storage_key(buffer) if _is_plain(buffer) else 0


def _has_other_values(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    return _is_plain(buffer) and not torch.equal(buffer, before)


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
