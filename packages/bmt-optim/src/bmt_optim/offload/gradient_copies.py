"""``GradientCopies``: copies of reduced gradients to host memory, started during backward and
checked at the step.

Once the last reduction of a Block's gradients is queued, their copy to the host is queued behind
it. The step uses the copy if the gradients still have the memory and the version that was copied.
Clipping writes to the gradients, but ``OptimManager`` passes its factor to
:meth:`GradientCopies.scaling`, and the host multiplies its copy. After any other change the
gradients are copied again, and from then on this shard's gradients are copied at the step only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bmt_core.run.lanes import Mark
from bmt_optim.offload.chunks import ShardChunks
from bmt_optim.offload.copies import Copied, Copies, HostNumber


@dataclass
class GradientCopy:
    """A copy of the gradients of one shard: the end of each chunk's copy, and the factor by which
    the host must multiply it.
    """

    chunks: ShardChunks
    copied: list[Copied]
    factor: HostNumber | None = None


@dataclass
class _EarlyCopy:
    """A copy that was started during backward, from ``flat`` in ``version``; gradients were
    multiplied by ``factors`` since.
    """

    chunks: ShardChunks
    copied: list[Copied]
    flat: weakref.ref[torch.Tensor]
    version: int
    factors: list[torch.Tensor] = field(default_factory=list)

    def is_current(self) -> bool:
        flat = self.flat()
        return (
            flat is not None
            and flat._version == self.version
            and self.chunks.gradients_lie_in(flat)
        )


class GradientCopies:
    """The copies since the last step, by shard."""

    def __init__(self) -> None:
        self._early: dict[ShardChunks, _EarlyCopy] = {}
        self._only_at_step: set[ShardChunks] = set()

    def start(self, chunks: ShardChunks, flat: torch.Tensor, done: Mark, copies: Copies) -> None:
        """Start copying the gradients that are in ``flat`` after ``done``, laid out like the
        parameters' storage.
        """
        shard = chunks.shard
        if (
            chunks in self._only_at_step
            or flat.dtype != shard.dtype
            or flat.numel() < shard.begin + shard.length
        ):
            return
        copied = chunks.copy_reduced(flat, done, copies)
        self._early[chunks] = _EarlyCopy(chunks, copied, weakref.ref(flat), flat._version)

    def take(self, chunks: ShardChunks, copies: Copies) -> GradientCopy:
        """Return the copy that was started during backward if it is up to date, otherwise one that
        starts now.
        """
        early = self._early.pop(chunks, None)
        if early is not None and early.is_current():
            factor = None
            if early.factors:
                factor = HostNumber(
                    torch.stack([factor.reshape(()).double() for factor in early.factors]).prod()
                )
            return GradientCopy(chunks, early.copied, factor)
        if early is not None:
            self._only_at_step.add(chunks)
        return GradientCopy(chunks, chunks.copy_gradients(copies))

    @contextmanager
    def scaling(
        self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | None
    ) -> Iterator[None]:
        """Inside, the gradients of ``parameters`` are multiplied by ``factor``; None: by 1, or by 0
        if the step is skipped.
        """
        scaled = set(parameters)
        touched = [
            e
            for e in self._early.values()
            if e.is_current() and not scaled.isdisjoint(e.chunks.params)
        ]
        for early in touched:
            if factor is not None and early.copied:
                early.copied[-1].wait()  # a gradient must not change while it is copied
        yield
        for early in touched:
            if scaled.issuperset(early.chunks.params):
                flat = early.flat()
                early.version = -1 if flat is None else flat._version
                early.factors += [] if factor is None else [factor]

    def clear(self) -> None:
        """Forget all copies, at the end of a step."""
        self._early.clear()
