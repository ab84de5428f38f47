"""``BlockLayout``: over which ranks a block's parameters are sharded, and in which groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from bmt_core.comm import Group
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_params.owner import owner_of
from bmt_params.parameter import DistributedParameter
from bmt_zero.flat_parameters import FlatParameters, SecondaryShard
from bmt_zero.float8_gathers import Float8Parameters, Float8Weight
from bmt_zero.gradient_ledger import ReductionsInFlight
from bmt_zero.param_dtype import compute_dtype
from bmt_zero.parameter_group import ParameterGroup


@dataclass(frozen=True)
class BlockLayout:
    """How the parameters of a block become groups.

    ``over_replicas``: they are sharded over all ranks that see different data, whatever the
    ``shard_size`` of the run. ``name`` shows in a profiler's trace.
    """

    local_axes: tuple[str, ...]
    over_replicas: bool
    reduce_dtype: ReduceDtype
    name: str
    in_flight: ReductionsInFlight

    def groups_of(
        self,
        parameters: Sequence[nn.Parameter],
        names: Mapping[int, str],
        float8: Mapping[int, Float8Weight],
        *,
        level: int,
        present: Sequence[ParameterGroup],
    ) -> list[ParameterGroup]:
        """Shard ``parameters``, those of the block that are new or to be moved, and return their
        groups. ``names`` of parameters, and how they are rounded to ``float8``, are by their ids.
        ``present``: the groups that the block has had so far. Collective.
        """
        kinds: dict[object, tuple[Group, Group | None, bool, list[nn.Parameter]]] = {}
        for parameter in parameters:
            process_group, replicas = self._ranks_for(parameter, names, present)
            is_sharded = level > 0 and process_group.size > 1
            weight = float8.get(id(parameter)) if is_sharded else None
            index = parameter._flat_index if isinstance(parameter, DistributedParameter) else None
            # A parameter stays in the group it had. New ones are grouped by requires_grad, once:
            # freezing a parameter later must not move memory that the optimizer holds.
            key = (
                index,
                parameter.dtype,
                compute_dtype(parameter),
                parameter.requires_grad if index is None else None,
                process_group.ranks,
                replicas,
                None if weight is None else (weight.dtype, weight.rounds_scale),
            )
            rounds = weight is not None
            kinds.setdefault(key, (process_group, replicas, rounds, []))[3].append(parameter)
        groups = [
            ParameterGroup(
                self._flat(
                    members,
                    process_group,
                    replicas,
                    [float8[id(p)] for p in members] if rounds else None,
                    level,
                ),
                level=level,
                reduce_dtype=self.reduce_dtype,
                name=self.name,
                in_flight=self.in_flight,
            )
            for process_group, replicas, rounds, members in kinds.values()
        ]
        # Numbers go on after those in use, so that a later layout finds every group again.
        known = [p._flat_index for group in present for p in group.parameters]
        used = [index for index in known if index is not None]
        for number, group in enumerate(groups, start=max(used, default=-1) + 1):
            for parameter in group.parameters:
                parameter.make_local(self.local_axes)
                parameter._flat_index = (
                    number if parameter._flat_index is None else parameter._flat_index
                )
        return groups

    def _flat(
        self,
        parameters: list[nn.Parameter],
        process_group: Group,
        replicas: Group | None,
        float8: list[Float8Weight] | None,
        level: int,
    ) -> FlatParameters:
        device = current().device
        is_sharded = level > 0 and not self.over_replicas
        secondary = SecondaryShard.of(process_group) if is_sharded else None
        if float8 is not None:
            return Float8Parameters(
                parameters,
                float8,
                process_group=process_group,
                replicas=replicas,
                device=device,
                secondary=secondary,
                compute_dtype=compute_dtype(parameters[0]),
            )
        return FlatParameters(
            parameters,
            process_group=process_group,
            replicas=replicas,
            replicated=level == 0,
            device=device,
            secondary=secondary,
            compute_dtype=compute_dtype(parameters[0]),
        )

    def _ranks_for(
        self, parameter: nn.Parameter, names: Mapping[int, str], present: Sequence[ParameterGroup]
    ) -> tuple[Group, Group | None]:
        """Return over which ranks ``parameter`` is to be sharded, and the ranks that will have the
        same part.
        """
        topology = current().topology
        shard_group = topology.sharing_group if self.over_replicas else topology.shard_group
        if not isinstance(parameter, DistributedParameter):
            replicas = None if self.over_replicas else topology.replica_group
            return shard_group(self.local_axes), replicas
        owner = owner_of(parameter)
        if owner is not None and parameter._in_block and owner not in present:
            name = names[id(parameter)]
            raise ConfigError(
                f"Parameter {name!r} is shared with another Block, and a parameter can be sharded"
                " by one Block only. Keep it outside of both, or tie it before BMTrainModelWrapper"
                " wraps the whole model."
            )
        replicas = parameter.shard.replicas
        # It stays where it is, perhaps on ranks that the program has chosen.
        if not self.local_axes and not (self.over_replicas and replicas is not None):
            return parameter.shard_group, replicas
        shared = [
            locality.axis
            for locality in parameter.locality
            if locality.is_sharded and locality.axis in self.local_axes
        ]
        if shared:
            name = names[id(parameter)]
            raise ConfigError(
                f"Parameter {name!r} has a share of its gradient on each rank along {shared[0]!r},"
                " but its Block is local along that axis, so the shares would not be summed."
                " Declare gradients='whole', or leave the axis out of local_axes."
            )
        group = shard_group({*self.local_axes, *parameter.local_axes})
        return group, None if self.over_replicas else topology.replica_group
