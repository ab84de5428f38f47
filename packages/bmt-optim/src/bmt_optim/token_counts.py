"""``TokenCounts``: by what gradients of summed losses are divided, to be those of the mean over the
tokens of all ranks.

[Note: two divisions] How many tokens a step has is known after its last micro-batch, and gradients
of half types must stay in range until then. So every loss of the step is divided by the number of
tokens that all ranks have in the first call, and the complete gradients are multiplied once by this
number / the number of tokens in all calls. In a step of one call the two are equal, and the
gradients are complete as they are. Nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.run.rank_results import as_count
from bmt_optim.current_run import kernels_for, sum_group

Scaling = Callable[[Sequence[torch.nn.Parameter], torch.Tensor], AbstractContextManager[object]]


class TokenCounts:
    """The numbers of tokens of the losses since the last step."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A step has ended, or its gradients were cleared."""
        self.divisor: torch.Tensor | None = None
        """What the gradients that there are were divided by, the same on all ranks; None: there is
        no count. NaN if a count of any rank was negative, infinite or NaN.
        """
        self.own: torch.Tensor | None = None
        """This rank's tokens. May be set to what it was before the last call, if that failed."""
        self._is_complete = True  # whether the divisor is the number of all tokens
        self._has_means = False  # whether a loss came without a count
        # The parameters whose gradients were divided a second time.
        self._divided: set[torch.nn.Parameter] = set()

    def check_kind(self, *, is_counted: bool) -> None:
        """Note that a loss comes with a count or without; ``ValueError`` if others were of the
        other kind.
        """
        if self._has_means if is_counted else self.divisor is not None:
            raise ValueError(
                "This step has losses with a count and losses without one. Give the number of"
                " tokens to each call of backward (or train_step) of a step, or to none; step() and"
                " zero_grad() end it."
            )
        self._has_means = not is_counted

    def forget_own(self) -> None:
        """The gradients of all losses so far were cleared, and the divisor stays: other ranks may
        have no gradients, and cannot see that.
        """
        self.own = None

    def add(self, count: torch.Tensor | float, device: torch.device) -> torch.Tensor:
        """Note this rank's ``count`` of one call, and return the divisor of its loss. The first
        call is collective.
        """
        own = as_count(count, device)
        self.own = own if self.own is None else self.own + own
        if self.divisor is None:
            self.divisor = self._total()
        else:
            self._is_complete = False
        return self.divisor

    def divide(self, parameters: Sequence[torch.nn.Parameter], scaling: Scaling) -> None:
        """Multiply the gradients of ``parameters``, inside of ``scaling(parameters, factor)``, so
        that they are divided by the number of all tokens. Collective.
        """
        if self.divisor is None:
            return
        with_gradients = [p for p in parameters if p.grad is not None]
        if self._divided and not self._divided.issuperset(with_gradients):
            raise ValueError(
                f"{len(set(with_gradients) - self._divided)} parameters have gradients that were"
                " not divided by the counts of tokens, as the first call of clip_grad_norm,"
                " unscaled_gradients or step after backward did not have them. Pass them to that"
                " call, or add their optimizer to the manager."
            )
        if self._is_complete:
            return
        before, self.divisor = self.divisor, self._total()
        factor = before / self.divisor
        self._is_complete, self._divided = True, set(parameters)
        grads = [p.grad for p in with_gradients if p.grad is not None]
        if not any(grad.dtype == torch.float64 for grad in grads):
            factor = factor.float()
        with scaling(parameters, factor):
            kernels_for(grads, factor.device).scale_(grads, factor)

    def _total(self) -> torch.Tensor:
        """Return the number of tokens of all ranks; 1 if there are none, so that their gradients
        stay zero.
        """
        total = self.own
        if total is None:  # all passes of this rank have failed, or their gradients were cleared
            assert self.divisor is not None
            total = torch.zeros_like(self.divisor)
        total = total.clone()
        with annotate("for the number of tokens"):
            sum_group().all_reduce(total).wait()
        return total.masked_fill(total == 0, 1.0)


def check_number(tokens: torch.Tensor | None) -> None:
    """Raise ``ValueError``, on all ranks alike, if a wrong count has made the number of ``tokens``
    NaN, and with it the gradients.
    """
    if tokens is not None and bool(tokens.isnan()):
        raise ValueError(
            "A count that was given to backward, or to train_step, is negative, infinite or NaN on"
            " some rank. The step was not taken. Count the tokens whose losses are in the sum:"
            " (labels != -100).sum()."
        )
