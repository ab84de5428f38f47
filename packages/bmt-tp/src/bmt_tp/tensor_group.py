"""The ranks that compute the layers of one model together: the tensor-parallel group of this rank."""

from __future__ import annotations

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.lanes import Lane
from bmt_core.run.runtime import current

AXIS = "tp"


def tensor_group() -> Group:
    """Return the group of ranks along ``tp``; of this rank alone with ``tp_size=1``."""
    return current().topology.group((AXIS,))


def tensor_size() -> int:
    """Number of ranks along ``tp``."""
    return current().topology.axis_size(AXIS)


def tensor_lane() -> Lane:
    """Return the lane in which activations travel beside the products."""
    return current().lanes.named(AXIS)


def own_share(total: int, what: str) -> int:
    """Return ``total / tp_size``, or raise :class:`ConfigError` if it is no whole number."""
    size = tensor_size()
    if total % size:
        raise ConfigError(
            f"{what} is {total}, which tp_size={size} does not divide. Choose a multiple of {size}, or another tp_size."
        )
    return total // size
