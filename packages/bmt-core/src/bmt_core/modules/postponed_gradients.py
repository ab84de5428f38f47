"""The seam through which a schedule splits a backward pass in two: gradients of inputs now, gradients of weights later.

Zero-bubble pipeline schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2) fill the time in which a stage would
wait for others with products for weight gradients, which nobody waits for. A schedule uses :func:`postpone_weight_gradients`,
Blocks leave their work there, and neither knows the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch


class PostponedPart(Protocol):
    """What one Block has left of one call: the gradients of parameters that are reduced together."""

    @property
    def reduced_as(self) -> object:
        """What stands for these parameters, always the same."""

    @property
    def kept_bytes(self) -> int:
        """The size of what is kept for later; 0 if that is no product, but only gradients that autograd has computed."""

    @property
    def sum_bytes(self) -> int:
        """The size of the sum to which the gradients are added, if those of other passes are computed apart from them."""

    def take_over(self, other: Self) -> None:
        """Compute from now on what ``other`` has left, of the same parameters, together with this."""

    def check(self) -> None:
        """Raise if the gradients cannot be computed any more."""

    def compute(self) -> None:
        """Compute the gradients and start to reduce them. Collective."""

    def finish(self) -> None:
        """Complete ``.grad``."""

    def drop(self) -> None:
        """Let go of everything: the backward pass has failed."""


class PostponedGradients:
    """The weight gradients that backward passes have left to be computed: see :func:`postpone_weight_gradients`."""

    def __init__(self) -> None:
        self._parts: list[PostponedPart] = []

    def add(self, part: PostponedPart) -> None:
        """Keep ``part`` for :meth:`compute`."""
        self._parts.append(part)

    def compute(self) -> None:
        """Compute the gradients and add them to ``.grad``, reduced where the call's :class:`BlockUse` says ``last_backward``.

        Runs on the current stream, which must be that of the forward. What was kept is free afterwards, and a second call finds
        nothing to do. Collective as the backward of these Blocks is. Raises :class:`BmtError`, before anything is computed, if
        gradients were cleared since the backward pass, or if a tensor that is read was modified in place.
        """
        parts, self._parts = self._parts, []
        with torch.no_grad():
            for part in parts:
                part.check()
            for part in parts:
                part.compute()
            for part in parts:
                part.finish()

    def number_to_join(self, passes: int) -> int:
        """Return for how many of a step's ``passes`` like this one :meth:`joined` saves time and takes little memory.

        A product that is added to a sum reads and writes all of it; rows that are joined are copied. So as many are joined as
        keep less than half as much as the sum takes. All are joined, and need no sum, if that takes no more than the sum and
        that half of it.
        """
        kept = sum(part.kept_bytes for part in self._parts)
        half = sum(part.sum_bytes for part in self._parts) // 2
        if kept == 0:
            return 1
        return passes if (passes - 1) * kept <= 3 * half else 1 + half // kept

    @classmethod
    def joined(cls, several: Iterable[PostponedGradients]) -> PostponedGradients:
        """Return what ``several`` passes have left. Its ``compute()`` makes one product for each layer, of all their rows.

        So a sum in memory is read and written once and not once for each; if these are all passes of a step, there is none. The
        others have nothing left. Ranks may join different numbers of passes.
        """
        by_parameters: dict[object, PostponedPart] = {}
        for postponed in several:
            parts, postponed._parts = postponed._parts, []
            for part in parts:
                first = by_parameters.setdefault(part.reduced_as, part)
                if first is not part:
                    first.take_over(part)
        made = cls()
        made._parts = list(by_parameters.values())
        return made

    def drop(self) -> None:
        """Let go of everything that was postponed."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.drop()


class Postponing:
    """Where the backward passes under way leave weight gradients. Not thread-local: on GPUs autograd runs in threads of its own."""

    gradients: PostponedGradients | None = None


postponing = Postponing()


@contextmanager
def postpone_weight_gradients() -> Iterator[PostponedGradients]:
    """Let backward passes inside compute the gradients of inputs only, as far as Blocks can; the rest waits for ``compute()``::

        with postpone_weight_gradients() as postponed:
            torch.autograd.backward(outputs, grads)
        ...
        postponed.compute()

    A Block keeps, for each linear layer, the input and the gradient of the output, and whatever else autograd has computed of
    its parameters' gradients. It frees its whole parameters as usual. Not postponed is what is outside of Blocks, what hooks on
    parameters are to see, and what ``torch.autograd.grad`` or ``backward(inputs=...)`` ask for.

    The backward passes of several micro-batches may be postponed at a time, and computed in any order; if the call with
    ``last_backward`` is not computed last, what is computed after it is reduced at the optimizer's step. An optimizer's step raises
    while gradients of its parameters are postponed. ``zero_grad`` drops what has not been computed. After an exception inside,
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
