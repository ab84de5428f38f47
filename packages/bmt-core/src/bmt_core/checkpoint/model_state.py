"""A model as whole tensors by name, one at a time: gathered for a checkpoint, and cut again for this rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from bmt_core.checkpoint.format import EXTRA_STATE, Index, TensorEntry
from bmt_core.checkpoint.torch_format import memory_of
from bmt_core.comm.protocols import Group
from bmt_core.comm.torch_backend import SingleGroup
from bmt_core.errors import CheckpointError
from bmt_core.params.parameter import DistributedParameter
from bmt_core.params.uninitialized import has_values
from bmt_core.run.runtime import current, is_initialized


class ModelState:
    """The state dict of a model before anything is gathered: ``index`` tells what it holds, :meth:`tensors` streams it."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict(keep_vars=True)  # bmt's modules put the parameters themselves there
        first_names: dict[Any, str] = {}
        entries: dict[str, Any] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                entries[name] = value
                continue
            _check_storable(name, value)
            source = first_names.setdefault(_identity(value), name)
            entries[name] = TensorEntry(shape=whole_shape(value), dtype=value.dtype, source=source)
        self.index = Index(entries=entries, metadata=getattr(state, "_metadata", {}))
        self._state = state

    def tensors(self, *, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the distinct tensors, whole, as host copies. Collective: every rank iterates to the end.

        Only ranks with ``keep`` make copies and get something. When a copy fails, the rank still takes part in what
        follows, and raises at the end.
        """
        failure: Exception | None = None
        for name, entry in self.index.entries.items():
            if not isinstance(entry, TensorEntry) or entry.source != name:
                continue
            whole = whole_tensor(self._state[name])
            copy = None
            if keep and failure is None:
                try:
                    copy = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
                except Exception as error:
                    failure = error
            del whole  # before the next one is made
            if copy is not None:
                yield name, copy
        if failure is not None:
            raise failure


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
