"""Activation checkpointing: non-reentrant, with the random numbers of forward, one gather for recomputation and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from bmt_core.scope import forward_scope
from bmt_zero.nested import tensors_in
from bmt_zero.use import Use


def recomputed(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    use: Use,
    buffers: Sequence[torch.Tensor | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return ``call(args, kwargs)``; what it saves for backward is thrown away and made again there.

    ``buffers`` that forward changes in place (running statistics) are changed once, not again by the recomputation.

    The arguments travel as one tuple and one dict, so that no keyword of the inner module meets one of torch's.
    """
    is_first = True

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return call(args, kwargs)
        use.begin_backward()
        with forward_scope(), _kept(buffers):
            return call(args, kwargs)

    # The tensors are passed once more, flat: torch looks at them for the devices whose random state it keeps.
    return checkpoint(run, args, kwargs, tensors_in((args, kwargs)), use_reentrant=False)


@contextmanager
def _kept(buffers: Sequence[torch.Tensor | None]) -> Iterator[None]:
    # All of them: batch norm changes its statistics without a trace in their version counters.
    values = [None if buffer is None else buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, values, strict=True):
            if buffer is not None and value is not None:
                buffer.data.copy_(value)  # by .data: putting a value back is no modification
