"""``WholeState``: the tensors that ranks hold parts of, of a model or of its optimizer, gathered one at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from bmt_core.checkpoint.format import EXTRA_STATE, Index, TensorEntry
from bmt_core.checkpoint.state_tensors import TensorPart
from bmt_core.checkpoint.torch_file import from_bytes, to_bytes
from bmt_core.checkpoint.torch_format import memory_key
from bmt_core.comm.call_check import BESIDE_THE_PROGRAM
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import CheckpointError
from bmt_core.params.own_parameters import axes_of_owners, first_holders, own_axes
from bmt_core.params.parameter import DistributedParameter
from bmt_core.params.uninitialized import has_values
from bmt_core.run.runtime import current, is_initialized

Value = torch.Tensor | TensorPart
Gathering = Callable[[], torch.Tensor | None]
"""Waits for a gather that was started, and returns the whole tensor on the rank on which it is gathered."""


class LocalState:
    """What this rank holds of a model's state dict, or of the tensors in a manager's state. Communicates nothing."""

    def __init__(self, entries: dict[str, Any], metadata: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        self.entries = entries
        self.metadata = dict(metadata)
        self.values = values

    @classmethod
    def of_model(cls, model: nn.Module) -> LocalState:
        """Return this rank's part of the state dict of ``model``; :class:`CheckpointError` if it cannot be stored."""
        state = _state_with_parameters(model)
        first_names: dict[Any, str] = {}
        entries: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                entries[name] = value
                continue
            _check_storable(name, value)
            source = first_names.setdefault(_tie_key(value), name)
            entries[name] = TensorEntry(shape=whole_shape(value), dtype=value.dtype, source=source)
        values = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        return cls(entries, getattr(state, "_metadata", {}), values)

    @classmethod
    def of_parts(cls, parts: Iterable[TensorPart]) -> LocalState:
        """Return this rank's part of the tensors in a manager's state."""
        values = {part.name: part for part in parts}
        entries = {name: TensorEntry(shape=v.shape, dtype=v.dtype, source=name) for name, v in values.items()}
        return cls(entries, {}, values)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What the values lie over the ranks like."""
        return [_like(value) for value in self.values.values()]

    def report(self) -> Report:
        extra = {name: entry for name, entry in self.entries.items() if not isinstance(entry, TensorEntry)}
        tensors = {name: entry if isinstance(entry, TensorEntry) else None for name, entry in self.entries.items()}
        like = {name: _like(value) for name, value in self.values.items()}
        own = {name: own_axes([p]) for name, p in like.items() if isinstance(p, DistributedParameter)}
        return Report(tensors, to_bytes(extra), self.metadata, own)


def _state_with_parameters(model: nn.Module) -> dict[str, Any]:
    """Return what ``nn.Module.state_dict(keep_vars=True)`` returns: with the parameters themselves, which are not gathered.

    A module's own ``state_dict`` is not called: libraries override it to call ``save`` or BMTrain's ``_save_to_rank0``.
    """
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    result: dict[str, Any] = _with_module(state, model, "")
    return result


def _with_module(state: Any, module: nn.Module, prefix: str) -> Any:
    """Add what ``module`` and all below it save to ``state``; return it, or what a hook returns in its place."""
    metadata = state._metadata[prefix[:-1]] = {"version": module._version}
    with getattr(module, "_bmt_parameters_shown", nullcontext)():
        for before in module._state_dict_pre_hooks.values():
            before(module, prefix, True)
        module._save_to_state_dict(state, prefix, True)
        for name, child in module._modules.items():
            if child is not None:
                _with_module(state, child, f"{prefix}{name}.")
        for after in module._state_dict_hooks.values():
            replaced = after(module, state, prefix, metadata)
            state = state if replaced is None else replaced
    return state


class Report(NamedTuple):
    """What a rank tells the others about what it holds."""

    entries: dict[str, TensorEntry | None]  # None for a value in ``extra``
    extra: bytes  # values that are not tensors, by name, serialised
    metadata: dict[str, Any]
    own_axes: dict[str, frozenset[str]]  # of the distributed parameters


class WholeState:
    """What all ranks together hold: ``index`` says what that is, and :meth:`tensors` gathers its tensors.

    Ranks may hold different tensors, as pipeline stages do.
    """

    def __init__(self, local_state: Callable[[], LocalState], what: str) -> None:
        """Make the index. Collective. If ``local_state`` fails on a rank, all raise an error that says it happened in ``what``."""
        world = world_group()
        with collective_section(world, what):
            local = local_state()
        self._values = local.values
        self._group, self._beside = _groups(local)
        reports = all_gather_object(local.report(), self._group)
        with collective_section(world, what):
            names, axes = [list(report.entries) for report in reports], [report.own_axes for report in reports]
            self._holders = first_holders(self._group.ranks, names, axes)
            entries = {
                name: _entry(name, holder, reports, local, self._group) for name, holder in self._holders.items()
            }
        own_shares = all_gather_object(self.own_share, world)
        self._rank_of_share = dict(zip(own_shares, world.ranks, strict=True))
        self._distributed = {name for name, holder in self._holders.items() if name in axes[holder]}
        metadata = {prefix: value for report in reversed(reports) for prefix, value in report.metadata.items()}
        self.index = Index(entries=entries, metadata=metadata)

    def tensors(self, *, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and a whole host copy of each tensor, tied ones once. Collective: every rank iterates to the end.

        A rank with ``keep`` False yields nothing. Rank 0 has every tensor of the model, other ranks those of their part. If a
        copy fails, the rank takes part in the remaining gathers and raises at the end.
        """
        return self._copies([[name] for name in self._names()], self._names() if keep else (), self._sent_to_rank_0)

    def shares(self) -> list[list[str]]:
        """Divide the tensors among the ranks, so that each gets about as many bytes. The same on every rank.

        The index of a share is not that of a rank: see :attr:`own_share`. A tensor that is not distributed is in the share of
        the first rank that has it.
        """
        count = self._beside.size
        loads = [0] * (self._group.size * count)
        shares: list[list[str]] = [[] for _ in loads]
        sizes = {name: _bytes(self.index.entries[name]) for name in self._names()}
        for name in sorted(sizes, key=lambda name: (name in self._distributed, -sizes[name])):
            first = self._holders[name] * count
            candidates = range(first, first + (count if name in self._distributed else 1))
            chosen = min(candidates, key=lambda i: loads[i])
            loads[chosen] += sizes[name] or 1
            shares[chosen].append(name)
        position = {name: i for i, name in enumerate(self.index.entries)}
        return [sorted(share, key=position.__getitem__) for share in shares]

    @property
    def own_share(self) -> int:
        """The index in :meth:`shares` of this rank's share."""
        return self._group.rank * self._beside.size + self._beside.rank

    def tensors_of_share(self, shares: Sequence[Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and a whole host copy of each tensor in this rank's share. Collective: every rank iterates to the end.

        One tensor of each share is gathered, all at the same time, then all ranks yield theirs, so that they can write at the same
        time.
        """
        return self._copies(*self._rounds(shares))

    def snapshot_of_share(self, shares: Sequence[Sequence[str]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return what :meth:`tensors_of_share` yields, of this moment. Collective; so is the iteration, on any thread.

        On the CPU every rank copies its parts, and the iteration gathers them beside the program. A GPU gathers faster than it
        copies to the host: there wholes are copied, to pinned memory.
        """
        if is_initialized() and current().device.type == "cuda":
            copies = list(self._copies(*self._rounds(shares), to_host=_snapshot))
            torch.cuda.current_stream(current().device).synchronize()
            return copies
        rounds, own, _ = self._rounds(shares)
        beside: dict[int, Group] = {}
        gatherer = {name: self._rank_of_share[i] for i, share in enumerate(shares) for name in share}
        starts = {name: self._copied_part(name, gatherer[name], beside) for row in rounds for name in row}
        return self._copies(rounds, own, lambda name, _: starts[name]())

    def _rounds(self, shares: Sequence[Sequence[str]]) -> tuple[Any, Sequence[str], Any]:
        rounds = [[name for name in row if name is not None] for row in zip_longest(*shares)]
        gatherer = {name: self._rank_of_share[i] for i, share in enumerate(shares) for name in share}
        return rounds, shares[self.own_share], lambda name, _: self._gathered_on(gatherer[name], name)

    def _copied_part(self, name: str, gatherer: int, beside: dict[int, Group]) -> Callable[[], Gathering]:
        """Copy this rank's part of a tensor, and return the function that starts to gather the copies on ``gatherer``. Collective.

        What is not just sharded is whole on some ranks, or gathered over other groups: it is gathered now. ``beside`` collects the
        groups over which the copies will be gathered, by the identity of those in whose place they are.
        """
        value = self._values.get(name)
        parameter = None if value is None else _like(value)
        group = _group_beside(parameter, beside)
        if group is None or not isinstance(parameter, DistributedParameter):
            whole = self._gathered_on(gatherer, name)()
            kept = whole.detach().clone() if whole is not None and gatherer == world_group().rank else None
            return lambda: lambda: kept
        if gatherer not in group.ranks:  # of ranks that hold the same: one group sends
            return lambda: lambda: None
        part = value.value() if isinstance(value, TensorPart) else parameter.data
        copied = part.detach().to(parameter.device).as_subclass(torch.Tensor).clone()
        shape = self.index.entries[name].shape

        def start() -> Gathering:
            gathering = parameter.start_gather_on(gatherer, copied, group)
            return lambda: None if (found := gathering()) is None else found.reshape(shape)

        return start

    def _names(self) -> list[str]:
        entries = self.index.entries.items()
        return [name for name, entry in entries if isinstance(entry, TensorEntry) and entry.source == name]

    def _copies(
        self,
        rounds: Iterable[Sequence[str]],
        wanted: Collection[str],
        start_gather: Callable[[str, TensorEntry], Gathering],
        to_host: Callable[[torch.Tensor, bool], torch.Tensor] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the tensors of each round, and yield copies of the ``wanted`` ones at its end."""
        to_host = to_host or _on_host
        failure: Exception | None = None
        kept = set(wanted)
        for names in rounds:
            copies = []
            gatherings = [(name, start_gather(name, self.index.entries[name])) for name in names]
            while gatherings:
                name, gathering = gatherings.pop(0)
                whole = gathering()
                del gathering  # which keeps it
                if name in kept and failure is None and whole is not None:
                    try:
                        copies.append((name, to_host(whole, self._is_alone(name, whole))))
                    except Exception as error:
                        failure = error
                del whole  # before the next one is made
            while copies:
                yield copies.pop()
        if failure is not None:
            raise failure

    def _is_alone(self, name: str, whole: torch.Tensor) -> bool:
        """Whether ``whole`` was made for this save, and has memory that nothing else uses."""
        value = self._values.get(name)
        like = None if value is None else _like(value)  # None: received from another rank
        if like is not None and not (isinstance(like, DistributedParameter) and like.is_sharded):
            return False
        return whole.is_contiguous() and whole.untyped_storage().nbytes() == whole.nbytes

    def _gathered_on(self, rank: int, name: str) -> Gathering:
        """Start to gather the tensor on ``rank`` of the world. Others get None, or their value of one that is not distributed."""
        value = self._values.get(name)
        if isinstance(value, TensorPart):
            part, parameter, shape = value.value(), value.parameter, value.shape
            if not isinstance(parameter, DistributedParameter):
                return lambda: part
            gathering = parameter.start_gather_on(rank, part.to(parameter.device))  # states may live on the host
            return lambda: None if (whole := gathering()) is None else whole.reshape(shape)
        return value.start_gather_on(rank) if isinstance(value, DistributedParameter) else lambda: value

    def _sent_to_rank_0(self, name: str, entry: TensorEntry) -> Gathering:
        """Start to gather the tensor on rank 0, which is sent those of which it has no part."""
        holder = self._holders[name]
        gathering = self._gathered_on(self._rank_of_share[holder * self._beside.size], name)
        if holder == 0 or 0 not in self._group.ranks:
            return gathering
        return lambda: self._sent(holder, gathering(), entry)

    def _sent(self, holder: int, whole: torch.Tensor | None, entry: TensorEntry) -> torch.Tensor:
        """Return ``whole``, which ``holder`` has, on every rank of the group. Collective."""
        device = current().device
        if self._group.rank == holder:
            assert whole is not None
            sent = whole.detach().to(device).contiguous()
        else:
            sent = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if sent.numel():
            self._group.broadcast(sent, holder).wait()
        return sent


def _on_host(whole: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """Return ``whole`` in host memory that nothing else uses."""
    if is_alone and whole.device.type == "cpu":
        return whole.detach()
    return whole.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _snapshot(whole: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """Do the same; from a GPU to pinned memory, where the copy goes on while the next tensor is gathered."""
    if whole.device.type != "cuda":
        return _on_host(whole, is_alone)
    copied = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
    return copied.copy_(whole.detach(), non_blocking=True)


def _like(value: Value) -> torch.Tensor:
    return value.parameter if isinstance(value, TensorPart) else value


def _group_beside(parameter: torch.Tensor | None, known: dict[int, Group]) -> Group | None:
    """Return a group over which copies of the parameter's parts can be gathered on a thread; None: there is none. Collective."""
    if not isinstance(parameter, DistributedParameter) or not parameter.is_sharded:
        return None
    group = parameter.shard_group
    if id(group) not in known:
        known[id(group)] = current().topology.twin(group, BESIDE_THE_PROGRAM)
        all_gather_object(None, known[id(group)])  # connects it here, in the program's order
    is_cut = parameter.whole_shape != parameter.full_shape  # along other groups
    return None if is_cut or known[id(group)] is group else known[id(group)]


def _groups(local: LocalState) -> tuple[Group, Group]:
    """Return the ranks that together hold the whole model, and those that hold what this rank holds. Collective."""
    if not is_initialized():
        return SingleGroup(0), SingleGroup(0)
    axes, topology = axes_of_owners(local.parameters), current().topology
    return topology.group(axes), topology.shard_group(axes)


def _bytes(entry: TensorEntry) -> int:
    return entry.shape.numel() * entry.dtype.itemsize


def _entry(name: str, holder: int, reports: Sequence[Report], local: LocalState, group: Group) -> Any:
    if holder == group.rank:
        return local.entries[name]
    entry = reports[holder].entries[name]
    return from_bytes(reports[holder].extra)[name] if entry is None else entry


def whole_shape(value: torch.Tensor) -> torch.Size:
    """Return the shape of the whole of a parameter or buffer. Communicates nothing."""
    return value.whole_shape if isinstance(value, DistributedParameter) else value.shape


def write_whole(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of ``whole`` to ``target``, in its dtype. Communicates nothing."""
    with torch.no_grad():
        if not isinstance(target, DistributedParameter):
            target.copy_(whole)
            return
        target.copy_(target.local_part(target.own_slice(whole)))


def named_targets(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor | None]]:
    """Yield (name, module, tensor) for all that ``load_state_dict`` sets: tied tensors under every name, None for extra state."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        persistent = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        buffers = ((name, module._buffers[name]) for name in persistent)
        for name, tensor in chain(module._parameters.items(), buffers):
            if tensor is not None:
                yield prefix + name, module, tensor
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            yield prefix + EXTRA_STATE, module, None


def world_group() -> Group:
    """Return the group of all ranks; before ``init_distributed()`` the group of this process alone."""
    return current().world if is_initialized() else SingleGroup(0)


def _check_storable(name: str, value: torch.Tensor) -> None:
    if value.layout != torch.strided:
        raise CheckpointError(f"{name} is a sparse tensor, which a checkpoint cannot hold. Keep it as a dense one.")
    if not has_values(value):
        verb = "is" if value.is_meta else "was made"
        raise CheckpointError(
            f"{name} {verb} on the meta device and has no values. Call init_parameters(model), or load a checkpoint, first."
        )


def _tie_key(value: torch.Tensor) -> Any:
    # Parts of different distributed parameters may have the same address and shape if they are empty.
    if isinstance(value, DistributedParameter) or value.numel() == 0:
        return id(value)
    return memory_key(value)
