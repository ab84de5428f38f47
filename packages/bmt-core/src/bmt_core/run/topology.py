"""The rank grid: named axes, row-major, and the groups of ranks along any set of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from bmt_core.comm.protocols import CommBackend, Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import ConfigError
from bmt_core.settings import MeshAxis

DATA_AXIS = MeshAxis("dp", 0, 50)  # size 0: whatever the other axes leave


def grid_sizes(axes: Iterable[MeshAxis], world_size: int) -> dict[str, int]:
    """Return axis name -> size, outermost first, with ``dp`` filling the world.

    >>> grid_sizes([MeshAxis("tp", 2, 100), MeshAxis("pp", 2, 0)], 8)
    {'pp': 2, 'dp': 2, 'tp': 2}
    """
    axes = list(axes)
    taken = math.prod(axis.size for axis in axes)
    if world_size % taken:
        product = " x ".join(f"{axis.name}={axis.size}" for axis in axes)
        raise ConfigError(
            f"World size {world_size} is not a multiple of {product} = {taken}."
            " Change pipe_size or tp_size, or start another number of ranks."
        )
    ordered = sorted([*axes, DATA_AXIS], key=lambda axis: (axis.order, axis.name))
    return {axis.name: world_size // taken if axis is DATA_AXIS else axis.size for axis in ordered}


class Topology:
    """The grid of ranks, and this process's place in it.

    ``sizes`` maps axis names to sizes, outermost first; rank r has index ``r % size`` on the innermost axis. Groups
    are made when first asked for, which is collective over the world, and kept.

    The attributes of BMTrain's topology are there under their old names, with S = world // pp:
    ``pipe_idx = r % S``, ``stage_id = r // S``, ``tp_id = r % tp``, ``tp_idx = r // tp`` and the rest.
    """

    def __init__(self, sizes: Mapping[str, int], rank: int = 0, backend: CommBackend | None = None) -> None:
        self.sizes = dict(sizes)
        self.rank = rank
        self.world_size = math.prod(self.sizes.values())
        self._backend = backend
        self._groups: dict[frozenset[str], Group] = {}
        self._twins: dict[tuple[frozenset[str], str], Group] = {}
        self._set_old_names()

    def __repr__(self) -> str:
        return f"Topology({self.sizes}, rank={self.rank})"

    def axis_size(self, axis: str) -> int:
        """Size of ``axis``; 1 for an axis that this grid does not have."""
        return self.sizes.get(axis, 1)

    def axis_rank(self, axis: str, rank: int | None = None) -> int:
        """Index of ``rank`` (by default this process) along ``axis``.

        >>> Topology({"pp": 1, "dp": 2, "tp": 2}, rank=3).axis_rank("tp")
        1
        """
        stride = 1
        for name, size in reversed(self.sizes.items()):
            if name == axis:
                return (self.rank if rank is None else rank) // stride % size
            stride *= size
        return 0

    def ranks(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Return the partition of the world into groups whose members differ only along ``axes``.

        >>> Topology({"pp": 1, "dp": 2, "tp": 2}).ranks({"tp"})
        [(0, 1), (2, 3)]
        """
        along = set(axes)
        fixed = [name for name in self.sizes if name not in along]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(tuple(self.axis_rank(name, rank) for name in fixed), []).append(rank)
        return [tuple(members) for members in groups.values()]

    def shard_ranks(self, local_axes: Iterable[str] = ()) -> list[tuple[int, ...]]:
        """Return the rank groups over which a parameter local along ``local_axes`` is sharded.

        >>> Topology({"pp": 1, "dp": 2, "tp": 2}).shard_ranks({"tp"})
        [(0, 2), (1, 3)]
        """
        local = set(local_axes)
        return self.ranks(name for name in self.sizes if name not in local)

    def group(self, axes: Iterable[str]) -> Group:
        """Return this rank's group along ``axes``. Collective over the world when asked for the first time."""
        key = frozenset(name for name in axes if self.axis_size(name) > 1)
        if key not in self._groups:
            self._groups[key] = self._make(self.ranks(key))
        return self._groups[key]

    def shard_group(self, local_axes: Collection[str] = ()) -> Group:
        """Return the group over which this rank's parameters local along ``local_axes`` are sharded."""
        return self.group(name for name in self.sizes if name not in local_axes)

    def twin(self, group: Group, name: str) -> Group:
        """Return a second communicator over the ranks of ``group``, for what runs beside it.

        One for each ``name``, kept. A group that this topology did not make, and a group of one rank, is returned
        itself. Collective over the world when asked for the first time.
        """
        key = next((key for key, made in self._groups.items() if made is group), None)
        if key is None or group.size == 1:
            return group
        if (key, name) not in self._twins:
            self._twins[key, name] = self._make(self.ranks(key))
        return self._twins[key, name]

    def group_of(self, ranks: tuple[int, ...]) -> Group:
        """Return the group of this rank whose members are ``ranks``; :class:`ConfigError` when the grid has none such."""
        for count in range(1 << len(self.sizes)):
            axes = [name for bit, name in enumerate(self.sizes) if count >> bit & 1]
            if ranks in self.ranks(axes) and self.rank in ranks:
                return self.group(axes)
        raise ConfigError(
            f"Ranks {ranks} are no group of rank {self.rank} in the grid {self.sizes}. Was this pickled in a run with another grid?"
        )

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks that hold different data: all axes but ``tp``."""
        return self._index(name for name in self.sizes if name != "tp")

    @property
    def data_size(self) -> int:
        """Number of ranks that hold different data: the world over ``tp``."""
        return self.world_size // self.axis_size("tp")

    def get_group_id(self, name: str) -> int:
        """Which of the groups called ``name`` (``pipe zero tp_zero tp``) this rank is in, under BMTrain's numbering."""
        return self._old(name, {"pipe": "pipe_idx", "zero": "zero_idx", "tp_zero": "tp_zero_idx", "tp": "tp_idx"})

    def get_group_rank(self, name: str) -> int:
        """The rank's index inside its group called ``name`` (``pipe zero tp_zero tp``)."""
        return self._old(name, {"pipe": "stage_id", "zero": "zero_id", "tp_zero": "tp_zero_id", "tp": "tp_id"})

    def _make(self, partition: list[tuple[int, ...]]) -> Group:
        if len(partition) == self.world_size:
            return SingleGroup(self.rank)
        if self._backend is None:
            raise ConfigError("This Topology has no communication backend. Use the one of init_distributed().")
        return self._backend.new_group(partition)

    def _index(self, axes: Iterable[str]) -> int:
        index = 0
        for name in axes:
            index = index * self.sizes[name] + self.axis_rank(name)
        return index

    def _set_old_names(self) -> None:
        rank, tp = self.rank, self.axis_size("tp")
        self.stages = self.axis_size("pp")
        stage_size = self.world_size // self.stages
        self.pipe_idx, self.stage_id = rank % stage_size, rank // stage_size
        self.tp_id, self.tp_idx = rank % tp, rank // tp
        self.pp_zero_idx, self.pp_zero_id = self.stage_id, self.pipe_idx
        self.tp_zero_idx, self.tp_zero_id = self.tp_id, self.tp_idx
        self.pp_tp_zero_idx, self.pp_tp_zero_id = self.stage_id * tp + self.tp_id, self.pipe_idx // tp
        self.zero_idx, self.zero_id = 0, rank

    def _old(self, name: str, attributes: dict[str, str]) -> int:
        if name not in attributes:
            raise ConfigError(f"No group is named {name!r}. Known: {', '.join(attributes)}.")
        value: int = getattr(self, attributes[name])
        return value
