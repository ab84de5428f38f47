"""``RunningLoss``: the losses since the last log, summed on the device."""

from __future__ import annotations

import torch

from bmt_core import sum_loss


class RunningLoss:
    """Sums losses on the device, where nothing waits for them, until :meth:`mean` reads them.
    ``total`` has all that were read.

    With ``skip_non_finite``, in place of an infinite loss or NaN the mean of those before it is
    added, as ``logging_nan_inf_filter`` asks.
    """

    def __init__(self, device: torch.device, step: int, *, skip_non_finite: bool) -> None:
        self.total = 0.0
        self.last_step = step
        """The number of steps at the last log."""
        self._first_step = step
        self._sum = torch.zeros((), device=device)
        self._skip_non_finite = skip_non_finite

    def add(self, loss: torch.Tensor, step: int) -> None:
        """Add the ``loss`` of a micro-batch after ``step`` steps."""
        if self._skip_non_finite:
            loss = torch.where(loss.isfinite(), loss, self._sum / (1 + step - self.last_step))
        self._sum += loss

    def mean(self, step: int) -> float:
        """Return the mean of the steps since the last call, over all ranks. Collective."""
        found = self._read() / (step - self.last_step)
        self.last_step = step
        return found

    def mean_of_all(self, step: int) -> float:
        """Return the mean over all steps. Collective."""
        self._read()
        return self.total / max(step - self._first_step, 0.001)

    def _read(self) -> float:
        found = sum_loss(self._sum).item()  # the mean of the ranks
        self.total += found
        self._sum.zero_()
        return found
