"""``BuffersBefore``: what a block is recomputed from when its forward changes buffers, and what forward made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

Homes = Sequence[dict[str, torch.Tensor | None]]
"""Where modules keep their buffers."""


class BuffersBefore:
    """The buffers in ``homes`` as a forward finds them: running statistics, counters, codebooks.

    Forward changes them once: :meth:`again` computes from the same values, and leaves what it finds.
    """

    def __init__(self, homes: Homes) -> None:
        self._homes = [(home, dict(home)) for home in homes]
        unique = {id(buffer): buffer for home in homes for buffer in home.values() if buffer is not None}
        with torch.no_grad():
            self._values = [(buffer, version_of(buffer), buffer.clone()) for buffer in unique.values()]

    def keep_changed(self) -> None:
        """Forget values that forward, which is over, has left as they were."""
        # Batch norm changes its statistics, which are vectors, without a trace in their version counters.
        self._values = [kept for kept in self._values if kept[0].ndim < 2 or version_of(kept[0]) != kept[1]]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the buffers are those before forward."""
        present = [dict(home) for home, _ in self._homes]
        values = [buffer.clone() for buffer, _, _ in self._values]
        for home, before in self._homes:
            _set_all(home, before)
        for buffer, _, value in self._values:
            buffer.data.copy_(value)  # by .data: putting a value back is no modification
        try:
            yield
        finally:
            for (home, _), found in zip(self._homes, present, strict=True):
                _set_all(home, found)
            for (buffer, _, _), value in zip(self._values, values, strict=True):
                buffer.data.copy_(value)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was modified in place, as far as torch counts."""
    return 0 if tensor.is_inference() else tensor._version  # tensors of inference mode count no versions


def _set_all(home: dict[str, torch.Tensor | None], buffers: dict[str, torch.Tensor | None]) -> None:
    home.clear()
    home.update(buffers)
