"""``FullGradients``: the whole gradients of one group in one backward pass of one call, in the flat tensor that is reduced.

The flat tensor is laid out like the whole parameters. Linear layers write their gradients into it directly
(:mod:`bmt_zero.gradients.direct_linear`); all other gradients are copied into it by one multi-tensor copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_zero.gradients.direct_linear import LayerGradient
from bmt_zero.sharding.parameter_group import ParameterGroup


class FullGradients:
    """A flat tensor of ``dtype`` for the whole gradients of ``group``, uninitialised until :meth:`complete`.

    With ``total``, a flat tensor that already holds a sum, all gradients are added to it. ``takes_wide``: layers may write
    gradients directly even if ``dtype`` is wider than that of the parameters.
    """

    def __init__(
        self,
        group: ParameterGroup,
        dtype: torch.dtype,
        *,
        total: torch.Tensor | None = None,
        takes_wide: bool = False,
    ) -> None:
        self._adds = total is not None
        self._takes = takes_wide or dtype == group.dtype
        self._flat = torch.empty(group.total, dtype=dtype, device=group.device) if total is None else total
        self._views, self._gaps = group.views_and_gaps_of(self._flat)
        self._is_written = [self._adds] * len(self._views)
        self._lent: set[int] = set()

    def take(self, index: int, gradient: LayerGradient) -> bool:
        """Write or add the gradient of parameter ``index``. Return False if layers cannot write this dtype."""
        if not self._takes:
            return False
        if self._is_written[index]:
            gradient.added_to(self._views[index])
        else:
            gradient.into(self._views[index])
            self._is_written[index] = True
        return True

    def lend(self, index: int) -> torch.Tensor | None:
        """Return memory for the whole gradient of parameter ``index``; None if it was written or lent already."""
        if not self._takes or self._is_written[index] or index in self._lent:
            return None
        self._lent.add(index)
        return self._views[index]

    def complete(self, grads: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> torch.Tensor:
        """Add ``grads`` to what layers have written, and return the flat tensor.

        Where a gradient is not ``wanted`` it is zero; but a ``total`` keeps its values there.
        """
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        empty = list(self._gaps)
        for view, grad, want, written in zip(self._views, grads, wanted, self._is_written, strict=True):
            if not want or (grad is None and not written):
                empty.append(view)
            elif grad is not None and not (grad.data_ptr() == view.data_ptr() and self._lent):
                (added if written else copied).append((view, grad.to_dense() if grad.is_sparse else grad))
        if copied:
            torch._foreach_copy_([view for view, _ in copied], [grad for _, grad in copied])
        if added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])
        if empty and not self._adds:
            torch._foreach_zero_(empty)
        return self._flat
