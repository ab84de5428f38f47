"""Buffers of a block that is recomputed: forward may change them, and the recomputation must start from their values before it.

Buffers that forward changes in place, replaces, adds or removes are detected. torch updates the running statistics of norms without
counting a version, so every 1-D buffer is treated as changed. A write to a larger buffer through ``.data`` or NumPy cannot be
detected: write to the buffer itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bmt_core.torch_internals import has_internal_overlap, storage_key

Home = dict[str, torch.Tensor | None]
"""A module's ``_buffers``."""


class BlockBuffers:
    """The buffers of a block, in ``homes``."""

    def __init__(self, homes: Sequence[Home]) -> None:
        self.homes = homes

    def to(self, device: torch.device) -> None:
        """Move all buffers to ``device``."""
        for home in self.homes:
            for name, buffer in home.items():
                if buffer is not None:
                    home[name] = buffer.to(device)


class BuffersBeforeForward:
    """The buffers before a forward. A recomputation starts from them, and leaves the present buffers unchanged."""

    def __init__(self, buffers: BlockBuffers) -> None:
        self._homes = [(home, dict(home)) for home in buffers.homes]
        unique = {id(buffer): buffer for _, found in self._homes for buffer in found.values() if buffer is not None}
        with torch.no_grad():
            self._values = [
                (buffer, version_of(buffer), buffer.clone()) for buffer in unique.values() if not _is_expanded(buffer)
            ]
        self._rewritten: set[int] = set()  # inside restored(): storages of buffers whose present values differ
        self.are_rewritten = False
        """Whether some buffer has other values now than outside of :meth:`restored`."""

    def forget_unchanged(self) -> None:
        """Free the copies of buffers that forward has not changed. Called after forward."""
        self._values = [
            (buffer, version_of(buffer), value)
            for buffer, version, value in self._values
            if buffer.ndim < 2 or version_of(buffer) != version
        ]
        self._homes = [(home, before) for home, before in self._homes if home or before]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the buffers have their values from before forward."""
        present = [dict(home) for home, _ in self._homes]
        values = [buffer.detach().clone() for buffer, _, _ in self._values]
        for home, before in self._homes:
            _set_all(home, before)
        for buffer, version, value in self._values:
            _write(buffer, value)
            if version_of(buffer) != version and _is_plain(buffer):
                self._rewritten.add(storage_key(buffer))
        self.are_rewritten = bool(self._rewritten)
        try:
            yield
        finally:
            self._rewritten.clear()
            self.are_rewritten = False
            for (home, _), found in zip(self._homes, present, strict=True):
                _set_all(home, found)
            for (buffer, _, _), value in zip(self._values, values, strict=True):
                _write(buffer, value)

    def with_own_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or a copy if it is a buffer whose values change at the end of :meth:`restored`."""
        is_rewritten = _is_plain(tensor) and storage_key(tensor) in self._rewritten
        return tensor.clone() if is_rewritten else tensor


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was modified in place, by torch's version counter."""
    return 0 if tensor.is_inference() else tensor._version  # tensors of inference mode count no versions


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
    """Whether elements share memory (``expand``). Nothing writes to such a tensor, and its copy would be larger."""
    return _is_plain(buffer) and has_internal_overlap(buffer)
