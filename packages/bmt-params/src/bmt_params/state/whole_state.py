"""``WholeState``: a model's or an optimizer's tensors over all ranks: gives this rank's parts, or
whole tensors one by one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current, is_initialized, world_group
from bmt_core.torch_internals import state_dict_hooks
from bmt_params.guards.equal_layouts import LayoutSummary, ParameterLayout, all_own_axes
from bmt_params.guards.equal_values import DECLARE_LOCAL
from bmt_params.parameter import DistributedParameter
from bmt_params.parameter_holders import first_holders, own_axes
from bmt_params.state.index import Index, TensorEntry
from bmt_params.state.model_tensors import memory_key, whole_shape
from bmt_params.state.serialization import from_bytes, to_bytes
from bmt_params.state.state_tensors import StateOwner, TensorPart
from bmt_params.uninitialized import has_values

Value = torch.Tensor | TensorPart


class OwnPart(NamedTuple):
    """The elements of a tensor that this rank writes.

    ``ranges``: [start, end) offsets of the elements in the flattened whole tensor, ascending.
    ``read()`` returns the elements on the parameter's device: 1-D for a part of a tensor, otherwise
    in the tensor's shape. It may be the parameter's own memory.
    """

    name: str
    dtype: torch.dtype
    ranges: Sequence[tuple[int, int]]
    read: Callable[[], torch.Tensor]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum([end - start for start, end in self.ranges])

    def with_elements(self, elements: torch.Tensor) -> OwnPart:
        """Return the same part with ``elements`` as its values."""
        return OwnPart(self.name, self.dtype, self.ranges, lambda: elements)

    def on_host(self) -> torch.Tensor:
        """Return the elements, 1-D, in host memory. Do not write to them: they may be the
        parameter's own memory.
        """
        return self.read().detach().as_subclass(torch.Tensor).to("cpu").contiguous().view(-1)


class LocalState:
    """This rank's part of a model's state dict, or of the tensors in a manager's state.
    Communicates nothing.
    """

    def __init__(
        self, entries: dict[str, Any], metadata: Mapping[str, Any], values: Mapping[str, Value]
    ) -> None:
        self.entries = entries
        self.metadata = dict(metadata)
        self.values = values

    @classmethod
    def of_model(cls, model: nn.Module, *, is_snapshot: bool = False) -> LocalState:
        """Return this rank's part of the state dict of ``model``; :class:`CheckpointError` if it
        cannot be stored.

        With ``is_snapshot``, values that are not tensors are copied, because the program may change
        them before they are written.
        """
        state = _state_with_parameters(model)
        first_names: dict[Any, str] = {}
        entries: dict[str, Any] = {}
        values: dict[str, Value] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                entries[name] = copy.deepcopy(value) if is_snapshot else value
                continue
            _check_storable(name, value)
            source = first_names.setdefault(_tie_key(value), name)
            entries[name] = TensorEntry(shape=whole_shape(value), dtype=value.dtype, source=source)
            values[name] = value
        return cls(entries, getattr(state, "_metadata", {}), values)

    @classmethod
    def of_parts(cls, parts: Iterable[TensorPart]) -> LocalState:
        """Return this rank's part of the tensors in a manager's state."""
        values = {part.name: part for part in parts}
        entries = {
            name: TensorEntry(shape=v.shape, dtype=v.dtype, source=name)
            for name, v in values.items()
        }
        return cls(entries, {}, values)

    @cached_property
    def layout(self) -> ParameterLayout:
        """The parameters that are the values, or that tell how each value is distributed
        over ranks.
        """
        return ParameterLayout((name, _like(value)) for name, value in self.values.items())

    def report(self) -> Report:
        """Return what the other ranks need to know of this part, without values of tensors."""
        extra = {
            name: entry
            for name, entry in self.entries.items()
            if not isinstance(entry, TensorEntry)
        }
        tensors = {
            name: entry if isinstance(entry, TensorEntry) else None
            for name, entry in self.entries.items()
        }
        like = {name: _like(value) for name, value in self.values.items()}
        own = {
            name: own_axes([p]) for name, p in like.items() if isinstance(p, DistributedParameter)
        }
        return Report(tensors, to_bytes(extra), self.metadata, own)


def _state_with_parameters(model: nn.Module) -> dict[str, Any]:
    """Return the result of ``nn.Module.state_dict(keep_vars=True)``: the parameters themselves,
    not gathered.

    A module's own ``state_dict`` is not called: libraries override it to call ``save`` or
    BMTrain's ``_save_to_rank0``.
    """
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    result: dict[str, Any] = _with_module(state, model, "")
    return result


def _with_module(state: Any, module: nn.Module, prefix: str) -> Any:
    """Add the entries of ``module`` and its children to ``state``; return ``state``, or what a hook
    returns in its place.
    """
    metadata = state._metadata[prefix[:-1]] = {"version": module._version}
    # A Block has this method: its modules may hold whole parameters at present.
    with getattr(module, "_bmt_parameters_shown", nullcontext)():
        before_reading, after_reading = state_dict_hooks(module)
        for before in before_reading:
            before(module, prefix, True)
        module._save_to_state_dict(state, prefix, True)
        for name, child in module._modules.items():
            if child is not None:
                _with_module(state, child, f"{prefix}{name}.")
        for after in after_reading:
            replaced = after(module, state, prefix, metadata)
            state = state if replaced is None else replaced
    return state


class Report(NamedTuple):
    """What a rank tells the others about its :class:`LocalState`."""

    entries: dict[str, TensorEntry | None]  # None for a value in ``extra``
    extra: bytes  # values that are not tensors, by name, serialised
    metadata: dict[str, Any]
    own_axes: dict[str, frozenset[str]]  # of the distributed parameters


class WholeState:
    """The state of all ranks together: ``index`` lists its entries, and :meth:`tensors` gathers
    its tensors.

    Ranks may hold different tensors, as pipeline stages do.
    """

    def __init__(self, local: LocalState, what: str, summaries: Sequence[LayoutSummary]) -> None:
        """Make the index. ``summaries`` are the ``local.layout.summary`` of all ranks.

        Collective. If that fails on one rank, all ranks raise an error that names ``what``.
        """
        self._values = local.values
        # ``_holders[name]``: the index in ``_group`` of the first holder. ``_writers[index]``: the
        # rank of the world with this index in the group of rank 0. It alone writes what is
        # not sharded.
        self._group, self._writers = _owners(local, what, summaries)
        # On every rank, because each has all tensors; there is nothing to compare.
        if self._group.size == 1:
            self._holders = dict.fromkeys(local.entries, 0)
            self.index = Index(entries=local.entries, metadata=local.metadata)
            return
        reports = all_gather_object(local.report(), self._group)
        with collective_section(world_group(), what):
            names, axes = (
                [list(report.entries) for report in reports],
                [report.own_axes for report in reports],
            )
            self._holders = first_holders(self._group.ranks, names, axes)
            entries = {
                name: _entry(name, holder, reports, local, self._group)
                for name, holder in self._holders.items()
            }
        # Reversed, so that of modules which several ranks have, the first rank's entry stays.
        metadata = {
            prefix: value
            for report in reversed(reports)
            for prefix, value in report.metadata.items()
        }
        self.index = Index(entries=entries, metadata=metadata)

    def tensors(self, *, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and a whole host copy of each tensor, tied ones once. Collective: every
        rank iterates to the end.

        A rank with ``keep`` False yields nothing. Rank 0 has every tensor of the model, other ranks
        those of their part. If a copy fails, the rank takes part in the remaining gathers and
        raises at the end.
        """
        failure: Exception | None = None
        for name, entry in self.index.own_tensors.items():
            whole = self._sent_to_rank_0(name, entry)
            if keep and failure is None and whole is not None:
                try:
                    copied = self._on_host(name, whole)
                except Exception as error:
                    failure = error
                    continue
                del whole  # before the next one is made
                yield name, copied
                del copied
        if failure is not None:
            raise failure

    def batches(self) -> Iterator[Sequence[OwnPart]]:
        """Yield all of :meth:`own_parts` at once, for a save by all ranks."""
        yield self.own_parts()

    def gathered_on(self, rank: int, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
        """Return whole host copies of the tensors ``names`` on ``rank`` of the world, None on
        others. Collective.

        If ranks hold different parts of the model, it is not ``rank`` but a rank that has
        these tensors.
        """
        if self._group.size > 1:
            holders = {self._holders[name] for name in names}
            if len(holders) > 1:  # the same on every rank
                raise CheckpointError(
                    f"{', '.join(names)} become one tensor in files of the hub, and lie on"
                    " different stages. Save to a file (.pt, .safetensors), which keeps the"
                    " model's names."
                )
            rank = self._writers[holders.pop()]
        found: dict[str, torch.Tensor] = {}
        for name in names:
            whole = self._gathered_on(rank, name)
            if whole is not None and world_group().rank == rank:
                found[name] = self._on_host(name, whole)
            del whole  # before the next one is made
        return found or None

    def own_parts(self) -> list[OwnPart]:
        """Return this rank's parts for a save by all ranks, which together have every element once.
        Communicates nothing.
        """
        parts = []
        rank = world_group().rank
        for name, entry in self.index.own_tensors.items():
            value = self._values.get(name)
            if value is None:
                continue
            parameter = _like(value)
            owner = _owner_of(value)
            own: slice | None = None
            if owner is not None:
                if owner.rank != rank:
                    continue
                ranges = [(0, entry.shape.numel())]
            elif isinstance(parameter, DistributedParameter):
                if parameter.numel() == 0:  # with many ranks, most parts are empty
                    continue
                own, ranges = parameter.saved_elements()
                if own.start >= own.stop:
                    continue
                if own.stop - own.start == parameter.numel():
                    own = None
            elif self._writers[self._holders[name]] == rank:
                ranges = [(0, entry.shape.numel())]
            else:
                continue
            parts.append(OwnPart(name, entry.dtype, ranges, partial(_elements, value, own)))
        return parts

    def _on_host(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return ``whole`` in host memory, copied if anything else uses its memory."""
        value = self._values.get(name)
        like = None if value is None else _like(value)  # None: received from another rank
        is_part = (
            isinstance(like, DistributedParameter) and like.is_sharded and _owner_of(value) is None
        )
        was_made = like is None or is_part
        is_alone = (
            was_made and whole.is_contiguous() and whole.untyped_storage().nbytes() == whole.nbytes
        )
        if is_alone and whole.device.type == "cpu":
            return whole.detach()
        return whole.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _gathered_on(self, rank: int, name: str) -> torch.Tensor | None:
        """Return the tensor, gathered on ``rank`` of the world, None on others; if it is not
        distributed, this rank's value.
        """
        value = self._values.get(name)
        if isinstance(value, TensorPart) and value.owner is not None:
            return _sent_by_owner(value, value.owner)
        if isinstance(value, TensorPart):
            part, parameter, shape = value.value(), value.parameter, value.shape
            if not isinstance(parameter, DistributedParameter):
                return part
            # States may live on the host.
            whole = parameter.gather_on(rank, part.to(parameter.device))
            return None if whole is None else whole.reshape(shape)
        return value.gather_on(rank) if isinstance(value, DistributedParameter) else value

    def _sent_to_rank_0(self, name: str, entry: TensorEntry) -> torch.Tensor | None:
        """Gather the tensor on rank 0. If rank 0 has no part of it, another rank gathers it and
        broadcasts it.
        """
        holder = self._holders[name]
        whole = self._gathered_on(self._writers[holder], name)
        return (
            whole if holder == 0 or 0 not in self._group.ranks else self._sent(holder, whole, entry)
        )

    def _sent(self, holder: int, whole: torch.Tensor | None, entry: TensorEntry) -> torch.Tensor:
        """Broadcast ``whole`` from ``holder`` and return it on every rank of the group.
        Collective.
        """
        device = current().device
        if self._group.rank == holder:
            assert whole is not None
            sent = whole.detach().to(device).contiguous()
        else:
            sent = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if sent.numel():
            self._group.broadcast(sent, holder).wait()
        return sent


def _elements(value: Value, own: slice | None) -> torch.Tensor:
    """Return the elements of ``value``, or only those of the slice ``own``, with all
    updates done.
    """
    parameter = _like(value)
    if isinstance(parameter, DistributedParameter):
        parameter.wait_for_updates()
    if isinstance(value, TensorPart):
        value = value.value()
    elif isinstance(value, DistributedParameter):
        value = value.detach()
    return value if own is None else value[own]


def _sent_by_owner(part: TensorPart, owner: StateOwner) -> torch.Tensor:
    """Return the tensor, which ``owner`` alone has, on every rank of its group. Collective over
    the group.
    """
    if world_group().rank == owner.rank:
        sent = part.value().detach().to(part.parameter.device).contiguous()
    else:
        sent = torch.empty(part.shape, dtype=part.dtype, device=part.parameter.device)
    if sent.numel():
        owner.group.broadcast(sent, owner.group.ranks.index(owner.rank)).wait()
    return sent


def _owner_of(value: Value | None) -> StateOwner | None:
    return value.owner if isinstance(value, TensorPart) else None


def _like(value: Value) -> torch.Tensor:
    return value.parameter if isinstance(value, TensorPart) else value


def _owners(
    local: LocalState, what: str, summaries: Sequence[LayoutSummary]
) -> tuple[Group, Sequence[int]]:
    """Return the ranks that together hold the whole model, this rank among them, and the ranks of
    that group that has rank 0.

    Collective if the layouts of ranks differ. Raises :class:`CheckpointError`, which names
    ``what``, if ranks that should have the same parameters have not.
    """
    if difference := local.layout.difference(summaries):
        raise CheckpointError(f"{what}: {difference} {DECLARE_LOCAL}")
    if not is_initialized():
        return SingleGroup(0), (0,)
    axes, topology = all_own_axes(summaries), current().topology
    return topology.group(axes), topology.ranks(axes)[0]


def _entry(
    name: str, holder: int, reports: Sequence[Report], local: LocalState, group: Group
) -> Any:
    if holder == group.rank:
        return local.entries[name]
    entry = reports[holder].entries[name]
    return from_bytes(reports[holder].extra)[name] if entry is None else entry


def _check_storable(name: str, value: torch.Tensor) -> None:
    if value.layout != torch.strided:
        raise CheckpointError(
            f"{name} is a sparse tensor, which a checkpoint cannot hold. Keep it as a dense one."
        )
    if value.is_quantized:
        raise CheckpointError(
            f"{name} is a quantized tensor ({value.dtype}), which a checkpoint cannot hold."
            " Register it with persistent=False and compute it from other values, or keep"
            " value.int_repr() and its scale as buffers."
        )
    if not has_values(value):
        verb = "is" if value.is_meta else "was made"
        raise CheckpointError(
            f"{name} {verb} on the meta device and has no values. Call init_parameters(model), or"
            " load a checkpoint, first."
        )


def _tie_key(value: torch.Tensor) -> Any:
    # Parts of different distributed parameters may have the same address and shape if they
    # are empty.
    if isinstance(value, DistributedParameter) or value.numel() == 0:
        return id(value)
    return memory_key(value)
