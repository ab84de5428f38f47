"""``postpone_weight_gradients``: split a backward pass in two, gradients of inputs now and
gradients of weights later.

Zero-bubble pipeline schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2)
compute weight gradients, which no other stage needs, while a stage would otherwise wait. A schedule
opens the context, and Blocks add their postponed gradients to it; neither depends on the
other's package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch


class PostponedPart(Protocol):
    """The postponed gradients of one call of a Block, for parameters that are reduced together."""

    @property
    def reduced_as(self) -> object:
        """An object that identifies these parameters: the same for all calls."""

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the products to compute later; 0 if there is no product, only gradients
        that autograd has computed.
        """

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum that is needed if the gradients of several passes are
        computed separately.
        """

    def join(self, other: Self) -> None:
        """Take over the gradients of ``other``, which has the same parameters, to compute them
        together with this part's.
        """

    def check(self) -> None:
        """Raise if the gradients cannot be computed any more."""

    def compute(self) -> None:
        """Compute the gradients and start to reduce them. Collective."""

    def finish(self) -> None:
        """Complete ``.grad``."""

    def drop(self) -> None:
        """Free everything. Called after a backward pass that has failed."""


class PostponedGradients:
    """The weight gradients that backward passes have postponed: see
    :func:`postpone_weight_gradients`.
    """

    def __init__(self) -> None:
        self._parts: list[PostponedPart] = []

    def add(self, part: PostponedPart) -> None:
        """Keep ``part`` for :meth:`compute`."""
        self._parts.append(part)

    def compute(self) -> None:
        """Compute the gradients and add them to ``.grad``, reduced where the call's
        :class:`BlockUse` says ``last_backward``.

        Runs on the current stream, which must be that of the forward. What was kept is free
        afterwards, and a second call finds nothing to do. Collective as the backward of these
        Blocks is. Raises :class:`BmtError`, before anything is computed, if gradients were cleared
        since the backward pass, or if a tensor that is read was modified in place.
        """
        parts, self._parts = self._parts, []
        with torch.no_grad():
            for part in parts:
                part.check()
            for part in parts:
                part.compute()
            for part in parts:
                # At the end, so that reductions run beside the products of the parts that follow.
                part.finish()

    def number_to_join(self, passes: int) -> int:
        """Return how many passes like this one :meth:`joined` should join, of ``passes`` in a step.

        A product that is added to a sum reads and writes the whole sum; joining keeps and copies
        rows instead. So passes are joined as long as the rows kept for all but one of them take at
        most half as much memory as the sum. All passes are joined, which needs no sum, if these
        rows take at most one and a half times the memory of the sum.
        """
        kept = sum(part.kept_bytes for part in self._parts)
        half = sum(part.sum_bytes for part in self._parts) // 2
        # There are no products to join, only gradients that autograd has computed.
        if kept == 0:
            return 1
        return passes if (passes - 1) * kept <= 3 * half else 1 + half // kept

    @classmethod
    def joined(cls, several: Iterable[PostponedGradients]) -> PostponedGradients:
        """Return the postponed gradients of ``several`` passes as one. ``compute()`` then makes one
        product per layer, of all rows.

        So the sum of gradients is read and written once, not once per pass; if these are all passes
        of a step, there is no sum. ``several`` are empty afterwards. Ranks may join different
        numbers of passes.
        """
        by_parameters: dict[object, PostponedPart] = {}
        for postponed in several:
            parts, postponed._parts = postponed._parts, []
            for part in parts:
                first = by_parameters.setdefault(part.reduced_as, part)
                if first is not part:
                    first.join(part)
        made = cls()
        made._parts = list(by_parameters.values())
        return made

    def drop(self) -> None:
        """Let go of everything that was postponed."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.drop()


class Postponing:
    """The object that takes the weight gradients of backward passes now. Not thread-local: on GPUs
    autograd has its own threads.
    """

    gradients: PostponedGradients | None = None


postponing = Postponing()


@contextmanager
def postpone_weight_gradients() -> Iterator[PostponedGradients]:
    """Let backward passes inside compute the gradients of inputs only, as far as Blocks can; the
    rest waits for ``compute()``::

        with postpone_weight_gradients() as postponed:
            torch.autograd.backward(outputs, grads)
        ...
        postponed.compute()

    A Block keeps the input and the output's gradient of each linear layer, and the gradients of its
    other parameters, which autograd computes anyway: also of weights of fewer than 2**20 elements,
    unless it is called with the :class:`BlockUse` of one of several micro-batches, as in a
    pipeline, or has level 0 or 1. It frees its whole parameters as usual. Gradients of parameters
    outside of Blocks, of parameters with hooks, and those that ``torch.autograd.grad`` or
    ``backward(inputs=...)`` return are not postponed.

    The weight gradients of several micro-batches may be postponed at a time, and computed in any
    order. If the call with ``last_backward`` is not computed last, the gradients computed after it
    are reduced at the optimizer's step. An optimizer's step raises while gradients of its
    parameters are postponed. ``zero_grad`` drops what is not computed. After an exception inside,
    nothing is left to compute.
    """
    before, postponed = postponing.gradients, PostponedGradients()
    postponing.gradients = postponed
    try:
        yield postponed
    except BaseException:
        postponed.drop()
        raise
    finally:
        postponing.gradients = before
