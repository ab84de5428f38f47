"""``TensorLayout``: which elements of a whole tensor each rank of a team has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import current
from bmt_core.run.topology import REPLICA_AXIS
from bmt_params.locality import Locality
from bmt_params.parameter import DistributedParameter


@dataclass(frozen=True)
class Piece:
    """The elements ``start:end`` that a rank has of the flattened slice number ``slice``.

    Ranks that differ in ``copy`` alone have the same elements.
    """

    slice: int
    start: int
    end: int
    copy: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.start


class TensorLayout:
    """Says which elements of a whole tensor of ``shape`` each rank of a team has.

    The tensor is cut into slices of ``slice_shape``; ``pieces`` has what each rank has of them.
    There are ``num_slices`` slices, without tensor parallelism one. The layout follows from the
    grid, and is the same on every rank.
    """

    def __init__(self, p: torch.Tensor, team: Group) -> None:
        if isinstance(p, DistributedParameter):
            self.shape, self.slice_shape, self.cuts = p.whole_shape, p.full_shape, p.cuts
            self.pieces = _pieces(p, team)
        else:
            self.shape, self.slice_shape, self.cuts = p.shape, p.shape, []
            self.pieces = [Piece(0, 0, p.numel(), (i,)) for i in range(team.size)]
        self.num_slices = 1 + max(piece.slice for piece in self.pieces)

    def is_whole_on(self, index: int) -> bool:
        """Whether the rank at ``index`` of the team has all elements."""
        return self.num_slices == 1 and self.pieces[index].numel == self.shape.numel()

    def sources(self, owner: int) -> list[int]:
        """Return the ranks that together have every element once; ``owner`` for those that
        it has.
        """
        chosen: dict[tuple[int, int, int], int] = {}
        own = self.pieces[owner]
        for i, piece in enumerate(self.pieces):
            key = piece.slice, piece.start, piece.end
            if piece.numel and (
                key not in chosen or i == owner or (piece.copy == own.copy and chosen[key] != owner)
            ):
                chosen[key] = i
        return sorted(chosen.values())

    def joined(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from its flattened ``slices``; a view if there is one."""
        parts = [part.view(self.slice_shape) for part in slices]
        for locality, size in reversed(self.cuts):
            parts = [locality.join(parts[i : i + size]) for i in range(0, len(parts), size)]
        return parts[0]

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the flattened slices of ``whole``, contiguous; views where that is possible."""
        parts = [whole]
        for locality, size in self.cuts:
            parts = [locality.cut(part, i, size) for part in parts for i in range(size)]
        # A slice of one column is a view, too, but its elements lie apart.
        return [part.reshape(-1).contiguous() for part in parts]


def _pieces(p: DistributedParameter, team: Group) -> list[Piece]:
    topology, shard = current().topology, p.shard
    is_on_grid = p.locality or shard.replicas is not None
    groups = (
        topology.shard_ranks(p.local_axes, over_replicas=shard.replicas is None)
        if is_on_grid
        else [p.shard_group.ranks]
    )
    position = {rank: ranks.index(rank) for ranks in groups for rank in ranks}
    copied = [locality.axis for locality in p.locality if locality.gradients == "whole"]
    if shard.replicas is not None:
        copied.append(REPLICA_AXIS.name)
    found = []
    for rank in team.ranks:
        start, end = (0, shard.numel) if shard.replicated else shard.ranges[position[rank]]
        copy = [topology.axis_rank(axis, rank) for axis in copied] + [
            position[rank]
        ] * shard.replicated
        found.append(Piece(_slice_of(rank, p.cuts), start, end, tuple(copy)))
    return found


def _slice_of(rank: int, cuts: Sequence[tuple[Locality, int]]) -> int:
    index = 0
    for locality, size in cuts:
        index = index * size + current().topology.axis_rank(locality.axis, rank)
    return index
