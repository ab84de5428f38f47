"""``BlockState``: the parameters of one block, in groups, and the slots of its modules that
hold them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.settings import ReduceDtype
from bmt_core.torch_internals import storage_key
from bmt_params.modules.outermost_call import UserAttributes
from bmt_params.parameter import DistributedParameter
from bmt_zero.block_layout import BlockLayout
from bmt_zero.direct_linear import ParameterIndex, RunningCall, direct_linears
from bmt_zero.float8_gathers import Float8Parameters, float8_weights
from bmt_zero.forward_state import BlockBuffers
from bmt_zero.param_dtype import is_cast, note_compute_dtypes
from bmt_zero.parameter_group import Lease, ParameterGroup
from bmt_zero.tiles import tiled_modules
from bmt_zero.zero_run import ZeroRun, zero_run

_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """How a block is sharded and computed, as it was made: see :class:`BlockLayout`,
    [Note: compute dtypes] and :mod:`bmt_zero.tiles`.
    """

    level: int
    local_axes: tuple[str, ...]
    over_replicas: bool
    reduce_dtype: ReduceDtype
    param_dtype: torch.dtype | None
    tile: int | None
    compile: bool


class BlockState:
    """The parameters that a block shards. It refers to parameters and to slots of modules, never to
    the modules themselves.
    """

    def __init__(self, settings: BlockSettings) -> None:
        # Set here, and by set_path() and set_level().
        self.settings = settings
        self.level = settings.level
        self.param_dtype = settings.param_dtype
        self.tile = settings.tile
        self.number = next(_numbers)
        self._path = ""
        self.name = f"block {self.number}"
        """The block's path in the model, if that is known; else the names of its parameters."""
        self.following: int | None = None
        self.run: ZeroRun = zero_run()
        self.layout = BlockLayout(
            settings.local_axes,
            settings.over_replicas,
            settings.reduce_dtype,
            f"blocks.{self.number}",
            self.run.in_flight,
        )
        self._ahead: Lease = "ahead", self.number
        self._schedule: Lease = "schedule", self.number
        # Changed when the block's parameters or modules have changed.
        self.groups: list[ParameterGroup] = []
        self.slots = ParameterSlots([], {}, [])
        self.buffers = BlockBuffers()
        self.classes: tuple[type[nn.Module], ...] = ()
        """Those of the block's modules; another object after they have changed."""
        self.input_dtype: torch.dtype | None = None
        """To which floating arguments of the block are cast; None: to none."""
        self.is_sharded = False
        self._freed_storages: frozenset[int] = frozenset()
        self._has_float8 = False
        self._changes_seen = -1
        # Changed by each call.
        self.running = RunningCall()
        self.preceding: int | None = None

    def __del__(self) -> None:
        for group in self.groups:
            group.buffer.discard()

    def parameters(self) -> list[DistributedParameter]:
        """The parameters that this block shards, in the order of its groups."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def set_path(self, path: str) -> None:
        """Note the ``path`` of the block in the model."""
        self.name = self._path = path
        self.run.prefetch.add(self)

    def set_level(self, level: int) -> None:
        """Change the level between steps."""
        if level != self.level and 0 in (level, self.level):
            raise ConfigError(
                f"zero_level cannot change from {self.level} to {level}: level 0 replicates what"
                " the others shard, and the optimizer's state would no longer fit. Choose it when"
                " the Block is made."
            )
        self.level = level
        for group in self.groups:
            group.set_level(level)

    def refresh(self, block: nn.Module) -> None:
        """Shard parameters that were added, replaced, or given other memory since the last call.

        Collective if there are any.
        """
        # Another call of the block is under way, and its whole parameters are not to be sharded.
        if self.slots.inside:
            self.slots.show_parameters()
            try:
                self._refresh(block)
            finally:
                self.slots.show_present()
        else:
            self._refresh(block)

    def whole_for_backward(
        self,
        leaves: Mapping[ParameterGroup, Sequence[torch.Tensor]],
        foreign: dict[int, torch.Tensor],
    ) -> SlotValues:
        """Return the whole parameters to put into the block's modules while the backward of a
        call runs.

        ``leaves``: the whole parameters of the groups that the call has gathered; the block may
        have other groups by now.
        ``foreign``: the whole parameters that forward used but the block does not shard. They are
        not gathered again, because forward may have used them on some ranks only.
        """
        own = [whole for group in self.groups for whole in leaves.get(group, group.parameters)]
        if not foreign:
            return SlotValues(own, foreign)
        # Backward runs without grad mode, and what it calls again records a graph.
        with torch.enable_grad():
            others = [
                slot.parameter for slot in self.slots.foreign if id(slot.parameter) in foreign
            ]
            return SlotValues(own, {id(p): p.gathered_as(foreign[id(p)]) for p in others})

    def may_free_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a view of a buffer of this block that may be freed while
        ``tensor`` lives.
        """
        if storage_key(tensor) in self._freed_storages:
            return True
        if not self._has_float8 or not hasattr(tensor, "__tensor_flatten__"):
            return False
        # Its memory is that of the tensors it is made of.
        names, _ = tensor.__tensor_flatten__()
        return True in [self.may_free_memory_of(getattr(tensor, name)) for name in names]

    def keep_gathered(self, groups: list[ParameterGroup], *, until_next: bool) -> None:
        """Keep ``groups``, which are gathered, until a later call says ``until_next=False``."""
        for group in groups:
            if until_next:
                group.buffer.take(self._schedule)
            elif self._schedule in group.buffer.leases:
                group.buffer.give_back(self._schedule)

    def bytes_to_gather(self, *, is_backward: bool) -> int:
        if is_backward and self.level < 3:  # gathered since forward
            return 0
        return sum([group.bytes_to_gather(self._ahead) for group in self.groups])

    def gather_ahead(self, *, is_backward: bool) -> bool:
        if not self.groups or True in [group.data.is_memory_replaced for group in self.groups]:
            return False
        if is_backward and self.level < 3:
            return True  # the parameters have stayed since forward
        for group in self.groups:
            if not group.buffer.is_gathered_for(self._ahead):
                group.look_for_changes()
                group.start_gather(self._ahead)
            elif self._ahead not in group.buffer.leases:
                group.buffer.take(self._ahead)
        return True

    def release_ahead(self) -> None:
        for group in self.groups:
            group.buffer.give_back(self._ahead)

    def reset(self) -> None:
        for group in self.groups:
            for lease in (self._ahead, self._schedule, *group.buffer.at_rest):
                group.buffer.give_back(lease)
            group.flat.version += 1  # on all ranks: some may have freed what others still hold

    def _refresh(self, block: nn.Module) -> None:
        is_moved = True in [group.data.is_memory_replaced for group in self.groups]
        if (
            is_moved
            or self._changes_seen != self.run.module_changes.count
            or not self.slots.are_untouched
        ):
            # The first call of a copied block may be under inference_mode, and the block must be
            # trainable later.
            with torch.inference_mode(False):
                self._take_over(block)

    def _take_over(self, block: nn.Module) -> None:
        self._changes_seen = self.run.module_changes.count
        classes = tuple(map(type, block.modules()))
        if classes != self.classes:
            self.classes = classes
        slots = list(_slots_of(block))
        wanted = list({id(slot.parameter): slot.parameter for slot in slots}.values())
        wanted_ids = {id(parameter) for parameter in wanted}
        if self.param_dtype is not None:
            note_compute_dtypes(block, self.param_dtype)
            self.input_dtype = self.param_dtype if any(map(is_cast, wanted)) else None
        float8 = float8_weights(block)
        # A group stays while the block has one of its parameters, because optimizers hold views of
        # its shard. Weights in float8 do not stay if a layer that was not converted reads one now.
        kept = [
            group
            for group in self.groups
            if not group.data.is_memory_replaced
            and not wanted_ids.isdisjoint(map(id, group.parameters))
            and (
                not isinstance(group.flat, Float8Parameters)
                or all(id(parameter) in float8 for parameter in group.parameters)
            )
        ]
        for group in self.groups:
            # Its parameters, those that are still in the block, get another group below.
            if group not in kept:
                group.buffer.discard()
        own = {id(parameter) for group in kept for parameter in group.parameters}
        # Shared parameters are gathered outside of Blocks: none may shard one with its own.
        new = [p for p in wanted if id(p) not in own and not getattr(p, "_shared", False)]
        self.groups = kept + self.layout.groups_of(
            new,
            # Reversed, so that of a tied parameter's names the first one counts.
            {id(slot.parameter): slot.name for slot in reversed(slots)},
            float8,
            level=self.level,
            present=self.groups,
        )
        self._has_float8 = True in [isinstance(g.flat, Float8Parameters) for g in self.groups]
        self._freed_storages = frozenset(
            group.buffer.storage for group in self.groups if group.is_gathered
        )
        self.is_sharded = bool(self._freed_storages)
        for name, parameter in block.named_parameters():
            # A label by the path in the whole model ends with this name, and says more.
            if isinstance(parameter, DistributedParameter) and not parameter.label.endswith(name):
                parameter.label = name
        indices = {
            id(p): ParameterIndex(number, index)
            for number, group in enumerate(self.groups)
            for index, p in enumerate(group.parameters)
        }
        if not self._path and self.groups:
            self.name = " and ".join(group.flat.labels for group in self.groups)
        self.run.prefetch.add(self)
        index_of = {id(parameter): index for index, parameter in enumerate(self.parameters())}
        attributes: list[tuple[dict[str, Any], str, Any]] = []
        if self.tile is not None:  # first: a tiled layer calls its own forward
            attributes += tiled_modules(self.running, block, self.tile, indices)
        if not self.settings.compile:  # compiled code must find plain linear layers
            attributes += direct_linears(self.running, block, indices)
        self.slots = ParameterSlots(slots, index_of, attributes)
        self.buffers = BlockBuffers(block.named_modules(), self.buffers)
        # The program may have added a buffer on another device.
        self.buffers.to(current().device)


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
                    f"Parameter {name!r} of a Block was replaced by a plain tensor (by"
                    " functional_call?), which would not be sharded. Assign an nn.Parameter, or"
                    " call the module before it becomes a Block."
                )
            if parameter is not None:
                yield Slot(module._parameters, name, parameter)  # type: ignore[arg-type]
        pending += [child for child in module._modules.values() if child is not None]


class Slot(NamedTuple):
    """Where a module keeps ``parameter``: ``holder[name]``, where ``holder`` is the
    module's ``_parameters``.
    """

    holder: dict[str, Any]
    name: str
    parameter: DistributedParameter


class SlotValues(NamedTuple):
    """The whole parameters that are put into a block's slots while it computes.

    ``own``: those that the block shards, in the order of its groups. ``foreign``: those that others
    shard, by the parameters' ids.
    """

    own: Sequence[torch.Tensor]
    foreign: Mapping[int, torch.Tensor]


class ParameterSlots:
    """Puts whole parameters into a block's modules while its forward or backward runs, and the
    sharded ones otherwise.

    Calls of one block may overlap (the block is used twice; a backward pass runs inside a forward).
    Each call puts its own whole parameters in, and the modules hold those put in last. The sharded
    parameters are back when all calls have taken theirs out. A slot in which user code has put
    something else meanwhile stays as it is: the next call takes that over.

    ``index_of``: the index of each of the block's own parameters, by id. ``attributes``:
    ``(layer.__dict__, name, value)`` to set on layers while whole parameters are in.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        index_of: Mapping[int, int],
        attributes: Sequence[tuple[dict[str, Any], str, Any]],
    ) -> None:
        self._slots = slots
        self._parameters = [slot.parameter for slot in slots]
        self._index = [index_of.get(id(parameter), -1) for parameter in self._parameters]
        self.foreign = [slot for slot in slots if id(slot.parameter) not in index_of]
        self._attributes = attributes
        self._user_attributes = UserAttributes(self._parameters)
        # Changed by each call: the whole parameters of all calls that have put theirs in, and what
        # each slot was given last.
        self.inside: list[SlotValues] = []
        self._given: list[torch.Tensor] = list(self._parameters)

    def put(self, whole: SlotValues) -> None:
        """Put ``whole`` into the modules. Each tensor gets the attributes that the program has set
        on its parameter.
        """
        self.inside.append(whole)
        self._show(whole)
        self._user_attributes.copy_to(self._given)

    def take_out(self, whole: SlotValues) -> None:
        """Undo :meth:`put` of ``whole``. The modules then hold what is still put in, or the
        sharded parameters.
        """
        if self.inside[-1] is whole:  # the usual case; calls that overlap may end in any order
            del self.inside[-1]
        else:
            self.inside = [other for other in self.inside if other is not whole]
        self.show_present()

    def show_parameters(self) -> None:
        """Put the sharded parameters into the modules until :meth:`show_present`, to save or
        copy them.
        """
        given = self._given
        for number, (holder, name, parameter) in enumerate(self._slots):
            if name in holder and holder[name] is given[number]:  # else user code has replaced it
                holder[name] = parameter
            given[number] = parameter
        for attributes, name, value in self._attributes:
            if name in attributes and attributes[name] is value:
                del attributes[name]

    def show_present(self) -> None:
        """Put the whole parameters that were put in last back into the modules, or the sharded ones
        if there are none.
        """
        if self.inside:
            self._show(self.inside[-1])
        else:
            self.show_parameters()

    @property
    def are_untouched(self) -> bool:
        """Whether the modules hold exactly the parameters of the slots: nobody has replaced one."""
        # Compared by functions of C, because each call of the block asks this.
        found = [holder.get(name) for holder, name, _ in self._slots]
        return not any(map(operator.is_not, found, self._parameters))

    def _show(self, whole: SlotValues) -> None:
        own, foreign = whole
        given = self._given
        for number, (holder, name, parameter) in enumerate(self._slots):
            index = self._index[number]
            value = own[index] if index >= 0 else foreign.get(id(parameter), parameter)
            if name in holder and holder[name] is given[number]:
                holder[name] = value
            given[number] = value
        for attributes, name, value in self._attributes:
            if name not in attributes:
                attributes[name] = value
