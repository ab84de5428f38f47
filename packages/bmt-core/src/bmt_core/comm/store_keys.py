"""``missing_of``: which of many keys a store lacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


def missing_of(keys: Sequence[str], store: dist.Store, first: int = 0) -> list[int]:
    """Return the indices, counted from ``first``, of the ``keys`` that ``store`` lacks.

    It asks for all keys at once, then for the halves of what is incomplete. So one missing rank, or
    one missing host, takes about 2 log2(len(keys)) requests.
    """
    if store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [first]
    half = len(keys) // 2
    return [
        *missing_of(keys[:half], store, first),
        *missing_of(keys[half:], store, first + half),
    ]
