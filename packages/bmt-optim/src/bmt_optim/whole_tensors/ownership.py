"""Which rank owns which tensor: the ranks that share a parameter, and a balanced choice of one of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_optim.current_run import world
from bmt_params.parameter import DistributedParameter

Cost = Callable[[torch.Size], float]
"""What a step of a tensor of this shape costs, in any unit; the ranks' sums are balanced."""


def whole_shape(p: torch.Tensor) -> torch.Size:
    """Return the shape of the whole tensor of which ``p`` is this rank's part."""
    return p.whole_shape if isinstance(p, DistributedParameter) else p.shape


def described(p: torch.Tensor) -> str:
    """Return the name and shape of ``p`` for errors."""
    return (
        p.description
        if isinstance(p, DistributedParameter)
        else f"a parameter of shape {tuple(p.shape)}"
    )


def team_of(p: torch.Tensor) -> Group:
    """Return the ranks that have ``p`` or parts of it: all but those with another parameter of
    their own, such as a stage.

    An ordinary parameter is on all ranks. Raises :class:`ConfigError` for a parameter that is cut
    and sharded over other ranks than the grid says.
    """
    if not isinstance(p, DistributedParameter):
        return world()
    topology = current().topology
    if topology.is_own_choice(p.shard_group, p.local_axes):
        if p.locality:
            raise ConfigError(
                f"{p.description} is sharded over the ranks {p.shard_group.ranks} that were given"
                f" as its group, and local along {', '.join(sorted(p.local_axes))}. Leave group out"
                " for an optimizer that needs whole tensors."
            )
        return p.shard_group
    return topology.sharing_group({locality.axis for locality in p.locality if locality.is_own})


class Ownership:
    """Gives each tensor to the rank of its team with the least cost so far, the costliest tensors
    first.

    The choice depends on shapes alone, and is the same on every rank. Nothing is communicated.
    """

    def __init__(self, cost: Cost | None) -> None:
        self._cost = cost
        self._costs: dict[tuple[int, ...], list[float]] = {}

    def cost_of(self, p: torch.Tensor) -> float:
        """Return the cost of a step of ``p``: by default its bytes."""
        shape = whole_shape(p)
        return shape.numel() * p.dtype.itemsize if self._cost is None else float(self._cost(shape))

    def owners(self, parameters: Sequence[torch.Tensor], teams: Sequence[Group]) -> list[int]:
        """Return the owner of each of ``parameters`` as an index in its team of ``teams``."""
        costs = [self.cost_of(p) for p in parameters]
        found = [0] * len(parameters)
        for i in sorted(range(len(parameters)), key=lambda i: -costs[i]):
            of_team = self._costs.setdefault(teams[i].ranks, [0.0] * teams[i].size)
            found[i] = min(range(teams[i].size), key=of_team.__getitem__)
            of_team[found[i]] += costs[i]
        return found


def distinct(teams: Iterable[Group]) -> list[Group]:
    """Return each team once, the largest first, which is the order in which every rank
    serves them.
    """
    found = {team.ranks: team for team in teams}
    return sorted(found.values(), key=lambda team: (-team.size, team.ranks))
