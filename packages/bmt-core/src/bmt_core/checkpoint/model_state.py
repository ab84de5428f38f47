"""A model as whole tensors by name, one at a time: gathered for a checkpoint, and cut again for this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from bmt_core.checkpoint.format import EXTRA_STATE, Index, TensorEntry
from bmt_core.checkpoint.torch_file import packed, unpacked
from bmt_core.checkpoint.torch_format import memory_of
from bmt_core.comm.objects import all_gather_object, together
from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import CheckpointError
from bmt_core.params.own_parameters import first_holders, group_of_owners, own_axes
from bmt_core.params.parameter import DistributedParameter
from bmt_core.params.uninitialized import has_values
from bmt_core.run.runtime import current, is_initialized


class LocalState:
    """What this rank has of the state dict of a model. Nothing is communicated; CheckpointError if it cannot be stored."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict(keep_vars=True)  # bmt's modules put the parameters themselves there
        first_names: dict[Any, str] = {}
        self.entries: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                self.entries[name] = value
                continue
            _check_storable(name, value)
            source = first_names.setdefault(_identity(value), name)
            self.entries[name] = TensorEntry(shape=whole_shape(value), dtype=value.dtype, source=source)
        self.metadata: dict[str, Any] = getattr(state, "_metadata", {})
        self.values = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    def report(self) -> Report:
        """Return what other ranks need to know."""
        extra = {name: entry for name, entry in self.entries.items() if not isinstance(entry, TensorEntry)}
        tensors = {name: entry if isinstance(entry, TensorEntry) else None for name, entry in self.entries.items()}
        own = {name: own_axes([v]) for name, v in self.values.items() if isinstance(v, DistributedParameter)}
        return Report(tensors, packed(extra), self.metadata, own)


class Report(NamedTuple):
    """What a rank tells others of its part of the state dict."""

    entries: dict[str, TensorEntry | None]  # None: in ``extra``
    extra: bytes  # values that are no tensors, packed
    metadata: dict[str, Any]
    own_axes: dict[str, frozenset[str]]  # of the distributed parameters


class ModelState:
    """The state dict of a model before anything is gathered: ``index`` tells what it holds, :meth:`tensors` streams it.

    Ranks may hold different parts of it, as pipeline stages do; ``index`` is that of the whole model.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        """Find out what ``model`` holds, on all ranks. Collective; an error while doing ``what`` is raised by all ranks."""
        world = world_group()
        with together(world, what):
            local = LocalState(model)
        self._values = local.values
        self._group = group_of_owners(local.values.values())
        reports = all_gather_object(local.report(), self._group)
        with together(world, what):
            names, axes = [list(report.entries) for report in reports], [report.own_axes for report in reports]
            self._holders = first_holders(self._group.ranks, names, axes)
            entries = {
                name: _entry(name, holder, reports, local, self._group) for name, holder in self._holders.items()
            }
        metadata = {prefix: value for report in reversed(reports) for prefix, value in report.metadata.items()}
        self.index = Index(entries=entries, metadata=metadata)

    def tensors(self, *, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the distinct tensors, whole, as host copies. Collective: every rank iterates to the end.

        Only ranks with ``keep`` make copies and get something; rank 0 gets all. When a copy fails, the rank still takes part
        in what follows, and raises at the end.
        """
        failure: Exception | None = None
        for name, entry in self.index.entries.items():
            if not isinstance(entry, TensorEntry) or entry.source != name:
                continue
            whole = self._whole(name, entry)
            copy = None
            if keep and failure is None and whole is not None:
                try:
                    copy = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
                except Exception as error:
                    failure = error
            del whole  # before the next one is made
            if copy is not None:
                yield name, copy
        if failure is not None:
            raise failure

    def _whole(self, name: str, entry: TensorEntry) -> torch.Tensor | None:
        """Return the whole tensor where this rank has it, and on rank 0, which may need to be sent it."""
        whole = whole_tensor(self._values[name]) if name in self._values else None
        holder = self._holders[name]
        if holder == 0 or 0 not in self._group.ranks:
            return whole
        device = current().device
        if self._group.rank == holder:
            assert whole is not None
            sent = whole.to(device).contiguous()
        else:
            sent = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        if sent.numel():
            self._group.broadcast(sent, holder).wait()
        return sent


def _entry(name: str, holder: int, reports: Sequence[Report], local: LocalState, group: Group) -> Any:
    if holder == group.rank:
        return local.entries[name]
    entry = reports[holder].entries[name]
    return unpacked(reports[holder].extra)[name] if entry is None else entry


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the whole of a parameter or buffer, detached. Collective for a distributed parameter."""
    if not isinstance(value, DistributedParameter):
        return value.detach()
    with torch.no_grad():
        return value.gather_all()


def whole_shape(value: torch.Tensor) -> torch.Size:
    """Return the shape of :func:`whole_tensor` without making it."""
    return value.whole_shape if isinstance(value, DistributedParameter) else value.shape


def write_whole(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Write into ``target`` what this rank keeps of ``whole``, in the dtype of ``target``. Nothing is communicated."""
    with torch.no_grad():
        if not isinstance(target, DistributedParameter):
            target.copy_(whole)
            return
        target.copy_(target.local_part(target.own_slice(whole)))


def named_targets(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor | None]]:
    """Yield what ``load_state_dict`` looks for: (name, module, tensor), tied ones under every name, None for extra state."""
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
    """Return the group of all ranks; before ``init_distributed()``, of this process."""
    return current().world if is_initialized() else SingleGroup(0)


def _check_storable(name: str, value: torch.Tensor) -> None:
    if value.layout != torch.strided:
        raise CheckpointError(f"{name} is a sparse tensor, which a checkpoint cannot hold. Keep it as a dense one.")
    if not has_values(value):
        verb = "is" if value.is_meta else "was made"
        raise CheckpointError(
            f"{name} {verb} on the meta device and has no values. Call init_parameters(model), or load a checkpoint, first."
        )


def _identity(value: torch.Tensor) -> Any:
    # A part of a distributed parameter may start where an empty part of another one does: those are told apart as objects.
    if isinstance(value, DistributedParameter) or value.numel() == 0:
        return id(value)
    return memory_of(value)
