"""The rank grid: named axes, row-major, and the groups of ranks along any set of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypedDict

from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.protocols import CommBackend, Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import ConfigError
from bmt_core.run.bmtrain_names import argument_for
from bmt_core.settings import MeshAxis

DATA_AXIS = MeshAxis("dp", 1, 50)  # its real size is whatever the other axes leave
REPLICA_AXIS = MeshAxis("replica", 1, 49)
"""The ranks along it see other data and have the same parts of all parameters (``shard_size``),
with ``optimizer_shards="all"`` other parts.
"""

BESIDE_THE_PROGRAM = "beside"
"""The name of twins whose collectives a background thread makes. These are not observed."""


def grid_sizes(
    axes: Iterable[MeshAxis], world_size: int, shard_size: int | None = None
) -> dict[str, int]:
    """Return axis name -> size, outermost first, with ``dp`` filling the world.

    With ``shard_size`` it has that size, and the axis ``replica`` around it fills the world.

    >>> grid_sizes([MeshAxis("expert", 2, 100), MeshAxis("stage", 2, 0)], 8)
    {'stage': 2, 'dp': 2, 'expert': 2}
    >>> grid_sizes([MeshAxis("stage", 2, 0)], 16, shard_size=4)
    {'stage': 2, 'replica': 2, 'dp': 4}
    """
    axes = list(axes)
    taken = math.prod(axis.size for axis in axes)
    if world_size % taken:
        arguments = " or ".join(argument_for(axis.name) for axis in axes)
        raise ConfigError(
            f"{world_size} ranks cannot be divided by {_product(axes)}. Change {arguments}, or"
            f" start a multiple of {taken} ranks."
        )
    data_size = world_size // taken
    sizes = {axis.name: axis.size for axis in axes} | {DATA_AXIS.name: data_size}
    if shard_size is not None and data_size % shard_size:
        raise ConfigError(
            f"shard_size={shard_size} does not divide the {data_size} ranks that see different"
            f" data. Give one of {', '.join(map(str, _divisors(data_size)))}, or leave it out to"
            " shard over all of them."
        )
    replicates = shard_size is not None and shard_size < data_size
    if replicates:
        assert shard_size is not None
        sizes |= {DATA_AXIS.name: shard_size, REPLICA_AXIS.name: data_size // shard_size}
    known = [*axes, DATA_AXIS, *([REPLICA_AXIS] if replicates else [])]
    ordered = sorted(known, key=lambda axis: (axis.order, axis.name))
    return {axis.name: sizes[axis.name] for axis in ordered}


class KindsOfAxes(TypedDict):
    """See :class:`Topology`."""

    same_data: list[str]
    same_loss: list[str]


def kinds_of_axes(axes: Iterable[MeshAxis]) -> KindsOfAxes:
    """Return the arguments of :class:`Topology` that say what ranks along ``axes`` share.

    >>> kinds_of_axes([MeshAxis("ring", 2, 75, shards_data=False, splits_sum=True)])
    {'same_data': ['ring'], 'same_loss': []}
    """
    axes = list(axes)
    return {
        "same_data": [axis.name for axis in axes if not axis.shards_data],
        "same_loss": [axis.name for axis in axes if not axis.splits_sum],
    }


def data_ranks_of_host(axes: Iterable[MeshAxis], world_size: int, host_size: int) -> int:
    """Return how many of the ``host_size`` ranks of one host see different data, but for those in
    other stages: what ``shard_size="host"`` means.

    >>> data_ranks_of_host([MeshAxis("tensor", 2, 100)], 16, 8)
    4
    >>> data_ranks_of_host([MeshAxis("stage", 4, 0)], 8, 8)
    2
    """
    axes = list(axes)
    inside = [axis for axis in axes if axis.order > DATA_AXIS.order]
    ranks_inside = math.prod(axis.size for axis in inside)
    if host_size % ranks_inside:
        raise ConfigError(
            f'shard_size="host": the {host_size} ranks of this host cannot be divided by'
            f" {_product(inside)}. Give shard_size as a number of ranks, or leave it out to shard"
            " over all."
        )
    return min(host_size // ranks_inside, grid_sizes(axes, world_size)[DATA_AXIS.name])


def _product(axes: Sequence[MeshAxis]) -> str:
    """Return the sizes of ``axes``, and what they come to.

    >>> stage, expert = MeshAxis("stage", 2, 0), MeshAxis("expert", 3, 100)
    >>> _product([stage]), _product([stage, expert])
    ('stage=2', '6 (stage=2 x expert=3)')
    """
    names = [argument_for(axis.name).removeprefix("the size of ").strip("'") for axis in axes]
    sizes = [f"{name}={axis.size}" for name, axis in zip(names, axes, strict=True)]
    taken = math.prod(axis.size for axis in axes)
    return sizes[0] if len(sizes) == 1 else f"{taken} ({' x '.join(sizes)})"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def check_axis_sizes(asked: Mapping[str, int], axes: Iterable[MeshAxis]) -> None:
    """Raise :class:`ConfigError` unless ``axes`` have the ``asked`` sizes, the argument
    ``axis_sizes`` of ``init_distributed``.

    Plugins may leave out an axis of size 1.
    """
    sizes = {axis.name: axis.size for axis in axes}
    for name, size in asked.items():
        if name == DATA_AXIS.name:
            raise ConfigError(
                f"The axis {name!r} takes the ranks that the others leave. Leave it out"
                " of axis_sizes."
            )
        if name not in sizes and size > 1:
            raise ConfigError(
                f"axis_sizes asks for the axis {name!r} of size {size}, which no active plugin"
                " provides. Install the package that provides it, or pass plugins=[...] whose hook"
                " bmt_mesh_axes does."
                f" The axes of this run: {', '.join([DATA_AXIS.name, *sizes])}."
            )
        if sizes.get(name, 1) != size:
            raise ConfigError(
                f"axis_sizes asks for the axis {name!r} of size {size}, and its plugin provides it"
                f" in size {sizes[name]}. Leave it out of axis_sizes, or let the plugin's"
                f" bmt_mesh_axes() read config.axis_sizes[{name!r}]."
            )


class Topology:
    """The grid of ranks, and this process's place in it.

    ``sizes`` maps axis names to sizes, outermost first; rank r has index ``r % size`` on the
    innermost axis. ``same_data`` names the axes whose ranks read the same batches, and
    ``same_loss`` those of them, by default all, whose ranks compute the same loss.
    ``over_replicas``: parameters are sharded along ``replica``, too (``optimizer_shards="all"``).
    Groups are made when first asked for, kept, and used as ``wrapped`` returns them, with their
    names. Making one communicates nothing: its members connect at their first operation on it. The
    group of all ranks is connected at once.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        rank: int = 0,
        backend: CommBackend | None = None,
        *,
        wrapped: Callable[[Group, str], Group] = lambda group, name: group,
        same_data: Collection[str] = (),
        same_loss: Collection[str] | None = None,
        over_replicas: bool = False,
    ) -> None:
        self.sizes = dict(sizes)
        self.rank = rank
        self.world_size = math.prod(self.sizes.values())
        self._backend = backend
        self._wrapped = wrapped
        self.same_data_axes = [name for name in self.sizes if name in same_data]
        """The axes whose ranks read the same batches."""
        self.same_loss_axes = [
            name for name in self.sizes if name in (same_data if same_loss is None else same_loss)
        ]
        """The axes whose ranks compute the same loss, not parts of one sum."""
        self.over_replicas = over_replicas and self.axis_size(REPLICA_AXIS.name) > 1
        """Whether parameters are sharded along the axis ``replica``, too."""
        self._groups: dict[frozenset[str], Group] = {}
        self._twins: dict[tuple[frozenset[str], str], Group] = {}

    def __repr__(self) -> str:
        return f"Topology({self.sizes}, rank={self.rank})"

    @property
    def grid(self) -> str:
        """The axes of several ranks with their sizes, such as ``"dp=2 x tp=2"``."""
        return " x ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1)

    def of_rank(self, rank: int) -> Topology:
        """Return this grid as ``rank`` sees it, without groups."""
        return Topology(
            self.sizes, rank, same_data=self.same_data_axes, same_loss=self.same_loss_axes
        )

    def axis_size(self, axis: str) -> int:
        """Size of ``axis``; 1 for an axis that this grid does not have."""
        return self.sizes.get(axis, 1)

    def axis_rank(self, axis: str, rank: int | None = None) -> int:
        """Index of ``rank`` (by default this process) along ``axis``.

        >>> Topology({"stage": 1, "dp": 2, "expert": 2}, rank=3).axis_rank("expert")
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

        >>> Topology({"stage": 1, "dp": 2, "expert": 2}).ranks({"expert"})
        [(0, 1), (2, 3)]
        """
        along = set(axes)
        fixed = [name for name in self.sizes if name not in along]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(tuple(self.axis_rank(name, rank) for name in fixed), []).append(rank)
        return [tuple(members) for members in groups.values()]

    def shard_ranks(
        self, local_axes: Iterable[str] = (), *, over_replicas: bool = False
    ) -> list[tuple[int, ...]]:
        """Return the rank groups over which a parameter local along ``local_axes`` is sharded; with
        ``over_replicas`` those of a Block with ``shard_size="all"``, which are those of every
        parameter with ``optimizer_shards="all"``.

        >>> Topology({"stage": 1, "dp": 2, "expert": 2}).shard_ranks({"expert"})
        [(0, 2), (1, 3)]
        """
        over_replicas = over_replicas or self.over_replicas
        local = {*local_axes} if over_replicas else {*local_axes, REPLICA_AXIS.name}
        return self.ranks(name for name in self.sizes if name not in local)

    def group(self, axes: Iterable[str]) -> Group:
        """Return this rank's group along ``axes``, always the same one."""
        key = frozenset(name for name in axes if self.axis_size(name) > 1)
        if key not in self._groups:
            self._groups[key] = self._make(key)
        return self._groups[key]

    def shard_group(self, local_axes: Collection[str] = ()) -> Group:
        """Return the group over which this rank's parameters local along ``local_axes``
        are sharded.
        """
        copied = () if self.over_replicas else (REPLICA_AXIS.name,)
        return self.sharing_group({*local_axes, *copied})

    def sharing_group(self, local_axes: Collection[str] = ()) -> Group:
        """Return the group whose ranks have parts or copies of the same parameters, local along
        ``local_axes``: :meth:`shard_group` and, with ``shard_size``, its replicas.
        """
        return self.group(name for name in self.sizes if name not in local_axes)

    def is_own_choice(self, group: Group, local_axes: Collection[str]) -> bool:
        """Whether a user chose ``group`` for a parameter local along ``local_axes``. Others have
        its :meth:`shard_group`, or with ``Block(shard_size="all")`` its :meth:`sharing_group`.
        """
        usual = self.shard_group(local_axes), self.sharing_group(local_axes)
        return group.ranks not in [each.ranks for each in usual]

    @property
    def replica_group(self) -> Group | None:
        """The ranks that have the same parts as this one and see other data; None if there
        are none.
        """
        replicates = self.axis_size(REPLICA_AXIS.name) > 1 and not self.over_replicas
        return self.group((REPLICA_AXIS.name,)) if replicates else None

    def two_stages(self, group: Group) -> tuple[Group, Group] | None:
        """Return the ranks of ``group`` that are of one ``shard_size``, and those at this rank's
        place among such ranks, if parameters sharded over ``group`` are gathered in two stages
        (``optimizer_shards="all"``); else None.
        """
        axes = next((axes for axes, made in self._groups.items() if made is group), frozenset())
        if not self.over_replicas or REPLICA_AXIS.name not in axes:
            return None
        return self.group(axes - {REPLICA_AXIS.name}), self.group((REPLICA_AXIS.name,))

    def twin(self, group: Group, name: str) -> Group:
        """Return a second group over the ranks of ``group``, with connections of its own, for
        collectives that run beside it.

        There is one for each ``name``. A group of one rank, or one that this topology did not make,
        is returned itself.
        """
        key = next((key for key, made in self._groups.items() if made is group), None)
        if key is None or group.size == 1:
            return group
        if (key, name) not in self._twins:
            self._twins[key, name] = self._make(key, name)
        return self._twins[key, name]

    def group_of(self, ranks: tuple[int, ...]) -> Group:
        """Return the group of this rank whose members are ``ranks``; :class:`ConfigError` if the
        grid has no such group.
        """
        for count in range(1 << len(self.sizes)):
            axes = [name for bit, name in enumerate(self.sizes) if count >> bit & 1]
            if ranks in self.ranks(axes) and self.rank in ranks:
                return self.group(axes)
        raise ConfigError(
            f"Ranks {ranks} are no group of rank {self.rank} in the grid {self.sizes}. Was this"
            " pickled in a run with another grid?"
        )

    @functools.cached_property
    def data_rank(self) -> int:
        """Index of this rank among the ranks that read different batches; ranks that read the same
        one have the same index.
        """
        return self._index_along(self._axes_without(self.same_data_axes))

    @functools.cached_property
    def data_size(self) -> int:
        """How many ranks read different batches: the product of the axes that shard the data."""
        return math.prod(self.sizes[name] for name in self._axes_without(self.same_data_axes))

    @property
    def data_group(self) -> Group:
        """This rank and those that differ from it only along axes whose ranks read different
        batches.
        """
        return self.group(self._axes_without(self.same_data_axes))

    @functools.cached_property
    def sum_rank(self) -> int:
        """Index of this rank in :attr:`sum_group`."""
        return self._index_along(self._axes_without(self.same_loss_axes))

    @functools.cached_property
    def sum_size(self) -> int:
        """Number of ranks in :attr:`sum_group`."""
        return math.prod(self.sizes[name] for name in self._axes_without(self.same_loss_axes))

    @property
    def sum_group(self) -> Group:
        """The ranks whose losses, gradients and numbers of tokens are parts of one sum over the
        whole batch: those of :attr:`data_group` and, for each, those that compute other tokens of
        its batch.
        """
        return self.group(self._axes_without(self.same_loss_axes))

    @functools.cached_property
    def parts_axes(self) -> list[str]:
        """The axes of several ranks that read the same batch and compute parts of one sum."""
        return [
            name
            for name in self.same_data_axes
            if name not in self.same_loss_axes and self.sizes[name] > 1
        ]

    @property
    def has_same_data(self) -> bool:
        """Whether there are ranks that see the same data as this one."""
        return any(self.sizes[name] > 1 for name in self.same_data_axes)

    @property
    def other_axes(self) -> dict[str, int]:
        """The axes of several ranks besides ``dp`` and ``replica``, with their sizes. Ranks along
        them may have layers of their own.
        """
        data = (DATA_AXIS.name, REPLICA_AXIS.name)
        return {name: size for name, size in self.sizes.items() if size > 1 and name not in data}

    def _axes_without(self, names: Collection[str]) -> list[str]:
        return [name for name in self.sizes if name not in names]

    def _index_along(self, axes: Iterable[str]) -> int:
        index = 0
        for name in axes:
            index = index * self.sizes[name] + self.axis_rank(name)
        return index

    def _make(self, axes: frozenset[str], purpose: str = "main") -> Group:
        own = next(ranks for ranks in self.ranks(axes) if self.rank in ranks)
        if len(own) == 1:
            return SingleGroup(self.rank)
        backend = self._backend
        if backend is None:
            raise ConfigError(
                "This Topology has no communication backend. Use the one of init_distributed()."
            )
        name = f"{'+'.join(axis for axis in self.sizes if axis in axes)}/{purpose}/{own[0]}"
        if len(own) == self.world_size and purpose == "main":
            return self._wrapped(backend.new_group(own, name), name)
        group = LazyGroup(own, own.index(self.rank), lambda: backend.new_group(own, name))
        return group if purpose == BESIDE_THE_PROGRAM else self._wrapped(group, name)
