"""``FlatLayout``: offsets of parameters in a flat tensor, and which elements each rank owns. Pure
integers, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Bytes; that of CUDA's allocator, so that every parameter is aligned as if it were allocated alone.
ALIGNMENT = 512


@dataclass(frozen=True)
class FlatLayout:
    """Parameters back to back, each aligned. The flat tensor is cut into ``ranks`` equal slices;
    rank i owns the i-th, or that of number ``places[i]``.

    ``offsets`` and ``numels`` count elements; ``total`` is a multiple of ``ranks`` and every slice
    starts aligned.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int
    ranks: int
    places: tuple[int, ...] = ()

    @property
    def slice_length(self) -> int:
        """Number of elements that each rank owns, padding included."""
        return self.total // self.ranks

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return, for each rank, which elements of parameter ``index`` it owns,
        as ``(start, end)``.

        >>> flat_layout([300, 3], itemsize=4, ranks=2).ranges(0)
        ((0, 256), (256, 300))
        """
        return tuple(self._owned(index, rank) for rank in range(self.ranks))

    def pieces(self, rank: int | None = None) -> tuple[list[int], list[int]]:
        """Cut the flat tensor, or the slice of ``rank``, into consecutive pieces, one of them for
        each parameter.

        Returns the lengths of all pieces, padding included, and for each parameter the index of
        its piece.

        >>> flat_layout([300, 3], itemsize=4, ranks=2).pieces(rank=1)
        ([44, 84, 3, 125], [0, 2])
        """
        base, end = (0, self.total) if rank is None else self._slice(rank)
        lengths: list[int] = []
        indices: list[int] = []
        position = base
        for index, offset in enumerate(self.offsets):
            start, stop = (0, self.numels[index]) if rank is None else self._owned(index, rank)
            begin = min(max(offset + start, position), end) if stop > start else position
            if begin > position:
                lengths.append(begin - position)
            indices.append(len(lengths))
            lengths.append(stop - start)
            position = begin + stop - start
        if position < end:
            lengths.append(end - position)
        return lengths, indices

    def _owned(self, index: int, rank: int) -> tuple[int, int]:
        offset, numel = self.offsets[index], self.numels[index]
        start, end = (min(max(bound - offset, 0), numel) for bound in self._slice(rank))
        return start, end

    def _slice(self, rank: int) -> tuple[int, int]:
        begin = (self.places[rank] if self.places else rank) * self.slice_length
        return begin, begin + self.slice_length


def flat_layout(
    numels: Sequence[int], itemsize: int, ranks: int, places: Sequence[int] = ()
) -> FlatLayout:
    """Lay out parameters of ``numels`` elements of ``itemsize`` bytes for ``ranks`` owners, the
    i-th of whom owns the slice number ``places[i]``, by default the i-th.

    >>> flat_layout([300, 3], itemsize=4, ranks=2)
    FlatLayout(numels=(300, 3), offsets=(0, 384), total=512, ranks=2, places=())
    """
    step = max(ALIGNMENT // itemsize, 1)
    offsets = []
    position = 0
    for numel in numels:
        offsets.append(position)
        position += _rounded_up(numel, step)
    total = _rounded_up(position, step * ranks)
    return FlatLayout(tuple(numels), tuple(offsets), total, ranks, tuple(places))


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
