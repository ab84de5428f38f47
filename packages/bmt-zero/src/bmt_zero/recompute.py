"""Activation checkpointing: non-reentrant, with the random numbers of forward, one gather for recomputation and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from bmt_core.scope import forward_scope
from bmt_zero.nested import tensors_in
from bmt_zero.use import Use


def recomputed(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any], use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return ``call(args, kwargs)``; what it saves for backward is thrown away and made again there.

    The arguments travel as one tuple and one dict, so that no keyword of the inner module meets one of torch's.
    """
    is_first = True

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return call(args, kwargs)
        use.begin_backward()
        with forward_scope():
            return call(args, kwargs)

    # The tensors are passed once more, flat: torch looks at them for the devices whose random state it keeps.
    return checkpoint(run, args, kwargs, tensors_in((args, kwargs)), use_reentrant=False)
