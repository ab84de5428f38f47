"""``BuffersBefore``: what a block is recomputed from when its forward changes buffers, and what forward made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

Home = dict[str, torch.Tensor | None]
"""Where a module keeps its buffers."""


class Buffers:
    """The buffers of a block, in ``homes``, and those that its forward changes without a trace, through their ``data``.

    A complete forward shows which these are, the first one: to compare values, the host waits for the device. It also shows
    which modules have none.
    """

    def __init__(self, homes: Sequence[Home]) -> None:
        self.homes = homes
        self.silent: set[tuple[int, str]] | None = None  # id of the home, and name


class BuffersBefore:
    """``buffers`` as a forward finds them: running statistics, counters, codebooks.

    Forward changes them once: :meth:`again` computes from the same values, and leaves what it finds.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._homes = [(home, dict(home)) for home in buffers.homes]
        unique = {id(buffer): buffer for home in buffers.homes for buffer in home.values() if buffer is not None}
        with torch.no_grad():
            self._values = [
                (buffer, version_of(buffer), buffer.clone()) for buffer in unique.values() if not _is_expanded(buffer)
            ]
        self.moved: set[int] = set()  # storages of buffers that were changed again after forward, inside of again()

    def learn(self) -> None:
        """Hear that forward is complete."""
        if self._buffers.silent is None:
            changed = {id(b) for b, _, value in self._values if b.ndim > 1 and not _is_equal(b, value)}
            places = [(id(home), name, b) for home, before in self._homes for name, b in before.items()]
            self._buffers.silent = {(home, name) for home, name, buffer in places if id(buffer) in changed}
            self._buffers.homes = [home for home in self._buffers.homes if home]

    def keep_changed(self) -> None:
        """Forget values that forward, which is over, has left as they were."""
        silent = self._buffers.silent or ()
        silent_ids = {id(b) for home, before in self._homes for name, b in before.items() if (id(home), name) in silent}
        # Batch norm changes its statistics, which are vectors, without a trace in their version counters.
        self._values = [
            (buffer, version_of(buffer), value)
            for buffer, version, value in self._values
            if buffer.ndim < 2 or version_of(buffer) != version or id(buffer) in silent_ids
        ]
        self._homes = [(home, before) for home, before in self._homes if home or before]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the buffers are those before forward."""
        present = [dict(home) for home, _ in self._homes]
        values = [buffer.detach().clone() for buffer, _, _ in self._values]
        for home, before in self._homes:
            _set_all(home, before)
        for buffer, version, value in self._values:
            _write(buffer, value)
            if version_of(buffer) != version and _is_plain(buffer):
                self.moved.add(buffer.untyped_storage()._cdata)
        try:
            yield
        finally:
            self.moved.clear()
            for (home, _), found in zip(self._homes, present, strict=True):
                _set_all(home, found)
            for (buffer, _, _), value in zip(self._values, values, strict=True):
                _write(buffer, value)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, which is saved inside of :meth:`again`, in memory that nobody puts another value in after it."""
        is_lent = _is_plain(tensor) and tensor.untyped_storage()._cdata in self.moved
        return tensor.clone() if is_lent else tensor


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was modified in place, as far as torch counts."""
    return 0 if tensor.is_inference() else tensor._version  # tensors of inference mode count no versions


def _set_all(home: Home, buffers: Home) -> None:
    home.clear()
    home.update(buffers)


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if buffer.shape == value.shape and buffer.layout is torch.strided:
        buffer.data.copy_(value)  # by .data: putting a value back is no modification
    else:
        buffer.data = value.clone()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has elements that lie in memory as torch says."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def _is_expanded(buffer: torch.Tensor) -> bool:
    """Whether elements share memory. Nothing writes to such a tensor, and its copy would be larger."""
    return _is_plain(buffer) and torch._debug_has_internal_overlap(buffer) == 1


def _is_equal(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether they are equal in every bit; not all dtypes compare, and NaN is not NaN."""
    return not _is_plain(buffer) or torch.equal(_bytes(buffer), _bytes(value))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8)
