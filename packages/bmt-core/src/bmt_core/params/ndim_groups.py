"""A warning for parameter groups that were chosen by ``p.ndim``, which is 1 for this rank's part of any parameter."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import rank


def warn_of_groups_by_ndim(groups: Iterable[Mapping[str, Any]], stacklevel: int) -> None:
    """Warn, on rank 0, if ``p.ndim >= 2`` has chosen ``groups``: one is empty, and another mixes sharded matrices and vectors."""
    found = [group["params"] for group in groups]
    if all(found) or rank() != 0:
        return
    for params in found:
        shards = [p for p in params if isinstance(p, DistributedParameter)]
        if len({len(p.whole_shape) >= 2 for p in shards}) == 2:
            warnings.warn(
                "One parameter group is empty, and another has sharded matrices and vectors together. Slices of both have one"
                " dimension, so p.ndim does not tell them apart. Use bmt.optim.param_groups(model, weight_decay=...).",
                UserWarning,
                stacklevel=stacklevel,
            )
            return
