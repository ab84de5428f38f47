"""``BatchParts``: says which part of a model a schedule runs, and for which micro-batch, to what
records the model's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Section(NamedTuple):
    """A place in the model's order: how many :class:`BatchParts` had been made by then, and the
    number of the part.
    """

    call: int
    part: int


class Progress:
    """Which part runs now, and for which micro-batch; ``watchers`` are called with the section of
    each that begins.

    Shared by all threads: on GPUs torch runs backward, and the recomputation in it, in threads of
    its own.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.running: tuple[Section, int] | None = None
        self.watchers: list[Callable[[Section], object]] = []


PROGRESS = Progress()


class BatchParts:
    """One call of a model, or of a list of layers, that a schedule runs by parts and micro-batches.

    With it, recorded tensors are put together: micro-batches are joined, and parts are put in the
    model's order. Every rank makes one at the beginning of each such call, and surrounds the
    forward of each of its parts by :meth:`forward`, in the order of the micro-batches.
    """

    def __init__(self) -> None:
        PROGRESS.calls += 1
        self._call = PROGRESS.calls

    @contextmanager
    def forward(self, part: int, micro_batch: int) -> Iterator[None]:
        """Surround the forward of the model's ``part``, counted from 0 over all ranks,
        for ``micro_batch``.
        """
        before = PROGRESS.running
        section = Section(self._call, part)
        PROGRESS.running = section, micro_batch
        for watcher in PROGRESS.watchers:
            watcher(section)
        try:
            yield
        finally:
            PROGRESS.running = before
