"""``TokenCounts``: by what gradients of summed losses are divided, to be those of the mean over the
tokens of all ranks.

[Note: two divisions] How many tokens a step has is known after its last micro-batch, and gradients
of half types must stay in range until then. So every loss of the step is divided by the number of
tokens that all ranks have in the first call, and the complete gradients are multiplied once by this
number / the number of tokens in all calls. In a step of one call the two are equal, and the
gradients are complete as they are. Nothing is read on the host.
"""

from __future__ import annotations

import torch

from bmt_core.comm.call_check import call_purpose
from bmt_core.run.rank_results import as_count
from bmt_optim.current_run import data_group


class TokenCounts:
    """The numbers of tokens of the losses since the last step."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A step has ended, or the gradients were cleared."""
        self.divisor: torch.Tensor | None = None
        """What the gradients that there are were divided by, the same on all ranks; None: there is
        no count. NaN if a count of any rank was negative, infinite or NaN.
        """
        self._own: torch.Tensor | None = None  # this rank's tokens
        self._is_complete = True  # whether the divisor is the number of all tokens

    def forget_own(self) -> None:
        """The gradients of all losses so far were cleared, and the divisor stays: other ranks may
        have no gradients, and cannot see that.
        """
        self._own = None

    def add(self, count: torch.Tensor | float, device: torch.device) -> torch.Tensor:
        """Note this rank's ``count`` of one call, and return the divisor of its loss. The first
        call is collective.
        """
        own = as_count(count, device)
        self._own = own if self._own is None else self._own + own
        if self.divisor is None:
            self.divisor = self._total()
        else:
            self._is_complete = False
        return self.divisor

    def correction(self) -> torch.Tensor | None:
        """Return by what all gradients must be multiplied now to be divided by the number of all
        tokens; None if they are. Collective.
        """
        if self.divisor is None or self._is_complete:
            return None
        before, self.divisor = self.divisor, self._total()
        self._is_complete = True
        return before / self.divisor

    def _total(self) -> torch.Tensor:
        """Return the number of tokens of all ranks; 1 if there are none, so that their gradients
        stay zero.
        """
        assert self._own is not None
        total = self._own.clone()
        with call_purpose("for the number of tokens"):
            data_group().all_reduce(total).wait()
        return total.masked_fill(total == 0, 1.0)
