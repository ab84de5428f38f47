"""Attributes of BMTrain's topology and parameters that bmt has under other names, or does not need:
the facade adds them.

With S = world size // pp, the number of ranks in a stage, the topology of rank r has::

    stages      pp                           number of pipeline stages
    pipe_idx    r % S                        which pipeline the rank is in
    stage_id    r // S                       which stage of its pipeline it is
    tp_idx      r // tp                      which tensor-parallel group it is in
    tp_id       r % tp                       its index in that group

For four more kinds of groups, ``…_idx`` is the number of the rank's group, and ``…_id`` the rank's
index in it: ``zero``, all ranks; ``tp_zero``, the ranks with the same tensor-parallel slices;
``pp_zero``, the ranks of one stage; ``pp_tp_zero``, the ranks of one stage with the same slices.
"""

from __future__ import annotations

from typing import Any

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError, unknown_name
from bmt_core.run.topology import Topology
from bmt_params.parameter import DistributedParameter


def add_old_names() -> None:
    """Give ``Topology`` and ``DistributedParameter`` the attributes of BMTrain's."""
    for kind, names in ((Topology, _OldTopologyNames), (DistributedParameter, _OldParameterNames)):
        for name, value in vars(names).items():
            if not name.startswith("__"):
                setattr(kind, name, value)


class _OldTopologyNames:
    zero_idx = 0

    @property
    def stages(self: Any) -> int:
        return int(self.axis_size("pp"))

    @property
    def pipe_idx(self: Any) -> int:
        return int(self.rank % (self.world_size // self.stages))

    @property
    def stage_id(self: Any) -> int:
        return int(self.rank // (self.world_size // self.stages))

    @property
    def tp_idx(self: Any) -> int:
        return int(self.rank // self.axis_size("tp"))

    @property
    def tp_id(self: Any) -> int:
        return int(self.rank % self.axis_size("tp"))

    @property
    def zero_id(self: Any) -> int:
        return int(self.rank)

    @property
    def pp_tp_zero_idx(self: Any) -> int:
        return int(self.stage_id * self.axis_size("tp") + self.tp_id)

    @property
    def pp_tp_zero_id(self: Any) -> int:
        return int(self.pipe_idx // self.axis_size("tp"))

    tp_zero_idx, tp_zero_id = tp_id, tp_idx
    pp_zero_idx, pp_zero_id = stage_id, pipe_idx

    def get_group_id(self, name: str) -> int:
        """The number of this rank's group of kind ``name`` (``pipe zero tp_zero tp``), as BMTrain
        numbers them.
        """
        return _attribute(self, name, 0)

    def get_group_rank(self, name: str) -> int:
        """The rank's index in its group of kind ``name`` (``pipe zero tp_zero tp``)."""
        return _attribute(self, name, 1)


# Name of a group -> the attributes with the group's number, and with the rank's index in it.
_GROUPS = {
    "pipe": ("pipe_idx", "stage_id"),
    "zero": ("zero_idx", "zero_id"),
    "tp_zero": ("tp_zero_idx", "tp_zero_id"),
    "tp": ("tp_idx", "tp_id"),
}


def _attribute(topology: object, group: str, which: int) -> int:
    if group not in _GROUPS:
        raise ConfigError(unknown_name("group", group, _GROUPS))
    value: int = getattr(topology, _GROUPS[group][which])
    return value


class _OldParameterNames:
    def _copy_data(self: Any, data: torch.Tensor) -> None:
        """Copy this rank's part of ``data``, a tensor of ``full_shape``, to the parameter.
        Communicates nothing.
        """
        self.data.copy_(self.local_part(data.detach().view(self._original_shape)))

    def tp_gather(self: Any) -> torch.Tensor:
        """BMTrain's other name of :meth:`gather_all`."""
        whole: torch.Tensor = self.gather_all()
        return whole

    @property
    def _original_shape(self: Any) -> torch.Size:
        shape: torch.Size = self._shard.shape
        return shape

    @property
    def _start_partition(self: Any) -> int:
        return int(self._shard.start)

    @property
    def _end_partition(self: Any) -> int:
        return int(self._shard.end)

    @property
    def _zero_comm(self: Any) -> Group:
        group: Group = self._shard.group
        return group

    @property
    def _tp_mode(self: Any) -> bool:
        return any(place.axis == "tp" for place in self.locality)

    @property
    def _tp_split_dim(self: Any) -> int:
        found = [place.split_dim for place in self.locality if place.axis == "tp"]
        return -1 if not found or found[0] is None else found[0]

    @property
    def _tp_original_shape(self: Any) -> torch.Size:
        shape: torch.Size = self.whole_shape
        return shape
