"""``first_derivatives_only``: a decorator for backward functions that have no
second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from bmt_core.errors import BmtError


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``backward(ctx, *grads)`` raise :class:`BmtError` if torch records a graph of it
    (``create_graph=True``).

    Torch's ``once_differentiable`` raises only if the incoming gradients require gradients
    themselves. If they are constants, the graph just ends there, and second derivatives silently
    lack a term. Without ``create_graph`` torch calls backward functions with grad mode off, so
    checking grad mode is enough.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise no_second_derivatives()
        return backward(ctx, *grads)

    return checked


def no_second_derivatives() -> BmtError:
    """Return the error for a backward function that torch records a graph of."""
    return BmtError(
        "create_graph=True reached a Block, a parallel layer, FusedCrossEntropy or"
        " linear_cross_entropy, and there are no second derivatives through them. Compute second"
        " derivatives with modules of plain torch, outside of Blocks."
    )
