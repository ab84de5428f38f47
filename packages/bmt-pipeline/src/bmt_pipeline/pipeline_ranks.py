"""The ranks of one pipeline: one of each stage, with the same place along all other axes of
the grid.
"""

from __future__ import annotations

from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import current

AXIS = "pp"


def pipeline_group() -> Group:
    """Return the group of this rank's pipeline; its rank s is stage s."""
    return current().topology.group((AXIS,))


def group_of_pipelines() -> Group:
    """Return the group of the ranks with this rank's stage in the pipelines whose losses are parts
    of one sum.
    """
    topology = current().topology
    return topology.group(
        name for name in topology.sizes if name not in (AXIS, *topology.same_loss_axes)
    )


def num_stages() -> int:
    """Number of stages; 1 without ``pipe_size``."""
    return current().topology.axis_size(AXIS)


def own_stage() -> int:
    """The stage that this rank computes."""
    return current().topology.axis_rank(AXIS)


def own_pipeline() -> int:
    """Which of the pipelines this rank is in: its number among the ranks of its stage."""
    topology = current().topology
    return topology.rank % (topology.world_size // num_stages())
