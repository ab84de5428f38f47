"""``first_derivatives_only``: for backward functions through which no second derivatives go."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from bmt_core.errors import BmtError


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``backward(ctx, *grads)`` raise :class:`BmtError` when a graph of itself is asked for (``create_graph=True``).

    Torch's ``once_differentiable`` raises only where the gradients that come in depend on something. Where they are constants the
    graph just ends, and second derivatives lack a term. Without ``create_graph`` torch calls backward functions in a mode in
    which no graph is made, so nothing else is needed.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise BmtError(
                "create_graph=True reached a Block, a parallel layer or FusedCrossEntropy, and there are no second derivatives"
                " through them. Compute what needs second derivatives with modules of plain torch, outside of Blocks."
            )
        return backward(ctx, *grads)

    return checked
