"""The tensor-parallel group of this rank: the ranks that compute the layers of one
model together.
"""

from __future__ import annotations

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.lanes import Lane
from bmt_core.run.runtime import Runtime, current
from bmt_params.guards.same_data import Occasions

AXIS = "tp"


class TensorRanks:
    """The tensor-parallel ``group`` with its ``size`` and this rank's index in it.

    ``sequence_dim`` is the dim of activations of which each rank has a part: that of
    :func:`init_distributed`, or 0. ``lane`` transfers rows during products; ``in_lane`` is the same
    group with the lane's own communicator. ``row_occasions`` says when rows are compared, and
    ``refuses_equal_rows`` is False after ``allow_equal_rows()``: see :mod:`bmt_tp.row_comparison`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.group: Group = runtime.topology.group((AXIS,))
        self.lane: Lane = runtime.lanes.named(AXIS)
        self.in_lane = self.lane.group(self.group)
        self.size, self.rank = self.group.size, self.group.rank
        self.sequence_dim = runtime.settings.sequence_dim or 0
        self.row_occasions = Occasions(_PERIOD, at_first=_AT_FIRST)
        self.refuses_equal_rows = True


# Calls of functions and of compiled code are counted together. Each of the first ones is compared,
# so that all layers are. The period is a prime number: a multiple of the calls in a step would meet
# the same layer each time.
_AT_FIRST, _PERIOD = 512, 100_003


def tensor_ranks() -> TensorRanks:
    """Return the tensor-parallel ranks of the current run."""
    return current().state(TensorRanks)


def allow_equal_rows() -> None:
    """Let ranks along ``tp`` pass equal rows to layers that gather rows, until the run ends.

    Such layers expect rows of its own from each rank, and refuse rows that are the same on all of
    them, because mostly the whole batch was passed on each. Rows may rightly be the same where a
    sequence repeats itself, as in a task of copying. Call it on every rank, after
    ``init_distributed()``. With ``tp_size=1`` nothing changes.
    """
    tensor_ranks().refuses_equal_rows = False


def tensor_group() -> Group:
    """Return the group of ranks along ``tp``; of this rank alone with ``tp_size=1``."""
    return current().topology.group((AXIS,))


def tensor_size() -> int:
    """Number of ranks along ``tp``."""
    return current().topology.axis_size(AXIS)


def own_share(total: int, what: str) -> int:
    """Return ``total / tp_size``, or raise :class:`ConfigError` if it is not a whole number."""
    size = tensor_size()
    if total % size:
        raise ConfigError(
            f"{what} is {total}, which tp_size={size} does not divide. Choose a multiple of {size},"
            " or another tp_size."
        )
    return total // size
