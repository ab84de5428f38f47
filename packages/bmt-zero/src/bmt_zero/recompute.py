"""Activation checkpointing: non-reentrant, with the random numbers of forward, one gather for recomputation and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from bmt_core.scope import forward_scope
from bmt_zero.caches import with_own_caches
from bmt_zero.nested import tensors_in
from bmt_zero.use import Use


def recomputed(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    use: Use,
    buffers: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return ``call(args, kwargs)``; what it saves for backward is thrown away and made again there.

    ``buffers`` that forward changes in place (running statistics) are changed once, not again by the recomputation.

    The arguments travel as one tuple and one dict, so that no keyword of the inner module meets one of torch's.
    """
    changing: list[torch.Tensor] | None = None

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Any) -> Any:
        nonlocal changing
        if changing is None:
            versions = [buffer._version for buffer in buffers]
            try:
                return call(args, kwargs)
            finally:
                # Batch norm changes its statistics, which are vectors, without a trace in their version counters.
                pairs = zip(buffers, versions, strict=True)
                changing = [buffer for buffer, version in pairs if buffer.ndim < 2 or buffer._version != version]
        use.begin_backward()
        with forward_scope(), _kept(changing):
            return call(*with_own_caches(before))

    before = with_own_caches((args, kwargs))
    # The tensors are passed once more, flat: torch looks at them for the devices whose random state it keeps.
    return checkpoint(run, args, kwargs, tensors_in((args, kwargs)), use_reentrant=False)


@contextmanager
def _kept(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    values = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)  # by .data: putting a value back is no modification
