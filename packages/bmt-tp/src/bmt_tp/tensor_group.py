"""The tensor-parallel group of this rank: the ranks that compute the layers of one model together."""

from __future__ import annotations

from typing import NamedTuple

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.lanes import Lane
from bmt_core.run.runtime import current
from bmt_core.run.same_data import Occasions

AXIS = "tp"


class TensorRanks(NamedTuple):
    """The tensor-parallel ``group`` with its ``size`` and this rank's place in it.

    ``sequence_dim`` is the dim of activations of which each rank has a part: that of :func:`init_distributed`, or 0.
    ``lane`` transfers rows during products; ``in_lane`` is the same group with the lane's own communicator. ``row_occasions`` says
    when rows are compared, and ``refuses_equal_rows`` is False after ``allow_equal_rows()``: see :mod:`bmt_tp.row_comparison`.
    """

    group: Group
    lane: Lane
    in_lane: Group
    size: int
    rank: int
    sequence_dim: int
    row_occasions: Occasions
    refuses_equal_rows: bool = True


# Calls of functions and of compiled code are counted together. Each of the first ones is compared, so that all layers are. The
# period is a prime number: a multiple of the calls in a step would meet the same layer each time.
_AT_FIRST, _PERIOD = 512, 100_003


def tensor_ranks() -> TensorRanks:
    """Return the tensor-parallel ranks of the current run. The result is cached, because every product calls this several times."""
    return _ranks if _ranks is not None else _looked_up()


_ranks: TensorRanks | None = None


def _looked_up() -> TensorRanks:
    global _ranks
    runtime, group = current(), tensor_group()
    lane = runtime.lanes.named(AXIS)
    sequence_dim, occasions = runtime.settings.sequence_dim or 0, Occasions(_PERIOD, at_first=_AT_FIRST)
    _ranks = TensorRanks(group, lane, lane.group(group), group.size, group.rank, sequence_dim, occasions)
    runtime.at_shutdown.append(_forget)
    return _ranks


def allow_equal_rows() -> None:
    """Let ranks along ``tp`` pass equal rows to layers that gather rows, until the run ends.

    Such layers expect rows of its own from each rank, and refuse rows that are the same on all of them, because mostly the whole
    batch was passed on each. Rows may rightly be the same where a sequence repeats itself, as in a task of copying. Call it on
    every rank, after ``init_distributed()``. With ``tp_size=1`` nothing changes.
    """
    global _ranks
    _ranks = tensor_ranks()._replace(refuses_equal_rows=False)


def _forget() -> None:
    global _ranks
    _ranks = None


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
            f"{what} is {total}, which tp_size={size} does not divide. Choose a multiple of {size}, or another tp_size."
        )
    return total // size
