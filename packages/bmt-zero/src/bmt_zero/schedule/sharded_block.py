"""``ShardedBlock``: the parameters of one block, in groups, and the slots of its modules that hold them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from bmt_core.comm import Group
from bmt_core.errors import ConfigError
from bmt_core.params.owner import owner_of
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_zero.gradients.direct_linear import Location, RunningCall, direct_linears
from bmt_zero.schedule.recomputed_buffers import BlockBuffers
from bmt_zero.schedule.sharded_group import ShardedGroup
from bmt_zero.schedule.zero_run import ZeroRun, zero_run
from bmt_zero.sharding.parameter_group import ParameterGroup
from bmt_zero.sharding.parameter_slots import ParameterSlots, Slot, SlotValues

_numbers = itertools.count()


class ShardedBlock:
    """The parameters that a block shards. It refers to parameters and to slots of modules, never to the modules themselves.

    ``direct_gradients``: linear layers write their gradients directly into the tensor that is reduced.
    """

    def __init__(
        self, *, level: int, local_axes: Collection[str], reduce_dtype: ReduceDtype, direct_gradients: bool
    ) -> None:
        self.level = level
        self.local_axes = tuple(local_axes)
        self.reduce_dtype: ReduceDtype = reduce_dtype
        self.number = next(_numbers)
        self.following: int | None = None
        self.preceding: int | None = None
        self.run: ZeroRun = zero_run()
        self.groups: list[ShardedGroup] = []
        self.slots = ParameterSlots([], {}, [])
        self.buffers = BlockBuffers({})
        self.running = RunningCall()
        self._direct_gradients = direct_gradients
        self._changes_seen = -1
        self._ahead: list[ShardedGroup] = []  # gathered ahead and held for the expected next call
        self._between_calls: list[ShardedGroup] = []  # held between calls because a schedule says so
        self.awaited_calls: set[int] = set()
        """Numbers of the calls whose backward will use parameters that are kept from the backward of another call."""

    def __del__(self) -> None:
        for group in self.groups:
            group.buffer.discard()

    def parameters(self) -> list[DistributedParameter]:
        """The parameters that this block shards, in the order of its groups."""
        return [parameter for group in self.groups for parameter in group.group.parameters]

    @property
    def is_sharded(self) -> bool:
        """See :class:`bmt_zero.schedule.prefetch.Prefetched`."""
        return any(not group.group.is_replicated for group in self.groups)

    def set_level(self, level: int) -> None:
        """Change the level between steps."""
        if level != self.level and 0 in (level, self.level):
            raise ConfigError(
                f"zero_level cannot change from {self.level} to {level}: level 0 replicates what the others shard, and the"
                " optimizer's state would no longer fit. Choose it when the Block is made."
            )
        self.level = level
        for group in self.groups:
            group.level = level
            group.free_unless_held()

    def refresh(self, block: nn.Module) -> None:
        """Shard parameters that were added, replaced, or given other memory since the last call.

        Collective if there are any.
        """
        if self.slots.are_whole:
            self.slots.show_parameters()
            try:
                self._refresh(block)
            finally:
                self.slots.show_present()
        else:
            self._refresh(block)

    def whole_for_backward(
        self, leaves: Mapping[ShardedGroup, Sequence[torch.Tensor]], foreign: dict[int, torch.Tensor]
    ) -> SlotValues:
        """Return the whole parameters to put into the block's modules while the backward of a call runs.

        ``leaves``: the whole parameters of the groups that the call has gathered; the block may have other groups by now.
        ``foreign``: the whole parameters that forward used but the block does not shard. They are not gathered again, because
        forward may have used them on some ranks only.
        """
        own = [whole for group in self.groups for whole in leaves.get(group, group.group.parameters)]
        if not foreign:
            return SlotValues(own, foreign)
        with torch.enable_grad():
            others = [slot.parameter for slot in self.slots.foreign if id(slot.parameter) in foreign]
            return SlotValues(own, {id(p): p.gathered_as(foreign[id(p)]) for p in others})

    def may_free_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of a buffer of this block that may be freed while ``tensor`` lives."""
        return any(not g.group.is_replicated and g.buffer.holds_memory_of(tensor) for g in self.groups)

    def keep_gathered(self, groups: list[ShardedGroup], *, until_next: bool) -> None:
        """Hold ``groups``, which are gathered, until a later call says ``until_next=False``."""
        if until_next == bool(self._between_calls):
            return
        before, self._between_calls = self._between_calls, groups if until_next else []
        for group in self._between_calls:
            group.buffer.hold()
        for group in before:
            group.release()

    def bytes_to_gather(self, *, is_backward: bool) -> int:
        """See :class:`bmt_zero.schedule.prefetch.Prefetched`."""
        if is_backward and self.level < 3:
            return 0
        return sum([group.bytes_to_gather(group in self._ahead) for group in self.groups])

    def gather_ahead(self, *, is_backward: bool) -> bool:
        """See :class:`bmt_zero.schedule.prefetch.Prefetched`. Collective."""
        if not self.groups or True in [group.data.is_memory_replaced for group in self.groups]:
            return False
        if is_backward and self.level < 3:
            return True  # the parameters have stayed since forward
        for group in self.groups:
            if not group.buffer.is_available:
                group.look_for_changes()
                group.start_gather()
            if group not in self._ahead:
                group.buffer.hold()
                self._ahead.append(group)
        return True

    def release_ahead(self) -> None:
        """See :class:`bmt_zero.schedule.prefetch.Prefetched`."""
        ahead, self._ahead = self._ahead, []
        for group in ahead:
            group.release()

    def forget_gathered(self) -> None:
        """See :class:`bmt_zero.schedule.prefetch.Prefetched`."""
        self.awaited_calls.clear()
        self.keep_gathered([], until_next=False)
        for group in self.groups:
            group.buffer.mark_outdated()

    def _refresh(self, block: nn.Module) -> None:
        is_moved = True in [group.data.is_memory_replaced for group in self.groups]
        if is_moved or self._changes_seen != self.run.module_changes.count or not self.slots.are_untouched:
            # The first call of a copied block may be under inference_mode, and the block must be trainable later.
            with torch.inference_mode(False):
                self._take_over(block)

    def _take_over(self, block: nn.Module) -> None:
        self._changes_seen = self.run.module_changes.count
        slots = list(_slots_of(block))
        wanted = list({id(slot.parameter): slot.parameter for slot in slots}.values())
        wanted_ids = {id(parameter) for parameter in wanted}
        kept = [
            group
            for group in self.groups
            if not group.data.is_memory_replaced and not wanted_ids.isdisjoint(map(id, group.group.parameters))
        ]
        for group in self.groups:
            if group not in kept:
                group.buffer.discard()
        own = {id(parameter) for group in kept for parameter in group.group.parameters}
        new = [p for p in wanted if id(p) not in own and not getattr(p, "_shared", False)]
        self.groups = kept + self._lay_out(new, slots)
        self.run.prefetch.add(self)
        for name, parameter in block.named_parameters():
            if isinstance(parameter, DistributedParameter) and not parameter.label.endswith(name):
                parameter.label = name
        locations = {
            id(p): Location(number, position)
            for number, group in enumerate(self.groups)
            for position, p in enumerate(group.group.parameters)
        }
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters())}
        attributes = direct_linears(self.running, block, locations) if self._direct_gradients else []
        self.slots = ParameterSlots(slots, index_of, attributes)
        self.buffers = BlockBuffers({name: module._buffers for name, module in block.named_modules()})
        self.buffers.to(current().device)

    def _lay_out(self, parameters: Sequence[nn.Parameter], slots: list[Slot]) -> list[ShardedGroup]:
        kinds: dict[object, tuple[Group, list[nn.Parameter]]] = {}
        for parameter in parameters:
            ranks = self._ranks_of(parameter, slots)
            index = parameter._flat_index if isinstance(parameter, DistributedParameter) else None
            # A parameter stays in the group it had. New ones are grouped by requires_grad, once: freezing a parameter later must
            # not move memory that the optimizer holds.
            key = (index, parameter.dtype, parameter.requires_grad if index is None else None, ranks.ranks)
            kinds.setdefault(key, (ranks, []))[1].append(parameter)
        made = [
            ShardedGroup(
                ParameterGroup(members, ranks=ranks, replicated=self.level == 0, device=current().device),
                level=self.level,
                reduce_dtype=self.reduce_dtype,
                name=f"blocks.{self.number}",
                in_flight=self.run.in_flight,
            )
            for ranks, members in kinds.values()
        ]
        used = [p._flat_index for p in self.parameters() if p._flat_index is not None]
        for number, group in enumerate(made, start=max(used, default=-1) + 1):
            for parameter in group.group.parameters:
                parameter.make_local(self.local_axes)
                parameter._flat_index = number if parameter._flat_index is None else parameter._flat_index
        return made

    def _ranks_of(self, parameter: nn.Parameter, slots: list[Slot]) -> Group:
        topology = current().topology
        if not isinstance(parameter, DistributedParameter):
            return topology.shard_group(self.local_axes)
        owner = owner_of(parameter)
        if owner is not None and parameter._in_block and owner not in self.groups:
            name = next(slot.name for slot in slots if slot.parameter is parameter)
            raise ConfigError(
                f"Parameter {name!r} is shared with another Block, and a parameter can be sharded by one Block only."
                " Keep it outside of both, or tie it before BMTrainModelWrapper wraps the whole model."
            )
        if not self.local_axes:
            return parameter.shard_group
        shared = [place.axis for place in parameter.locality if place.is_sharded and place.axis in self.local_axes]
        if shared:
            name = next(slot.name for slot in slots if slot.parameter is parameter)
            raise ConfigError(
                f"Parameter {name!r} has a share of its gradient on each rank along {shared[0]!r}, but its Block is local along"
                " that axis, so the shares would not be summed. Declare gradients='whole', or leave the axis out of local_axes."
            )
        return topology.shard_group({*self.local_axes, *parameter.local_axes})


def _slots_of(block: nn.Module) -> Iterator[Slot]:
    """Yield every slot of a parameter in ``block``, except inside blocks that are nested in it."""
    pending = [block]
    seen: set[int] = set()
    while pending:
        module = pending.pop(0)
        if id(module) in seen or ("_bmt_block" in module.__dict__ and module is not block):
            continue
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                raise ConfigError(
                    f"Parameter {name!r} of a Block was replaced by a plain tensor (by functional_call?), which would not be"
                    " sharded. Assign an nn.Parameter, or call the module before it becomes a Block."
                )
            if parameter is not None:
                yield Slot(module._parameters, name, parameter)  # type: ignore[arg-type]
        pending += [child for child in module._modules.values() if child is not None]
