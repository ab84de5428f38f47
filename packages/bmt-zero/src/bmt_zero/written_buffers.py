"""``WrittenBuffers``: buffers that forward computes from a rank's own data, kept equal on
all ranks.

[Note: rank 0's buffers] The statistics of batch norms, a codebook that is a moving average or the
range of an observer differ between ranks after a call that has written them. As in
``DistributedDataParallel``, those of rank 0 win: they are sent to the other ranks when the next
call of an outermost module begins, and before a save. So all ranks evaluate the same model, and a
training goes on after a load as it would have without. Buffers of norms are known by their names;
others must be declared in ``written_buffers`` of their module, as for a recomputation. A save warns
of undeclared ones that differ.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from bmt_core.comm.annotate import annotate
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import Runtime
from bmt_core.run.topology import DATA_AXIS, REPLICA_AXIS
from bmt_core.torch_internals import unsaved_buffers
from bmt_core.user_warnings import warn_user
from bmt_params.guards.equal_values import sum_of_bits

_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")


class WrittenBuffers:
    """Sends rank 0's buffers to the ranks that see other data: see [Note: rank 0's buffers]."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._group = runtime.topology.group((DATA_AXIS.name, REPLICA_AXIS.name))
        self._is_alone = self._group.size == 1
        self.without: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """Outermost modules in which there are no such buffers, each with the count of changes of
        modules when this was found. Their calls need not be told.
        """
        # For each outermost module, the modules in it that have such buffers, and the count of
        # changes of modules when this was found.
        self._owners: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )
        self._written: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # since they were sent
        self._named: set[str] = set()  # in a warning

    def call_begins(self, module: nn.Module, changes: int) -> None:
        """Send what earlier calls have written, and note what this call of the outermost
        ``module`` will write. Collective. ``changes`` counts the changes of all modules.
        """
        if self._is_alone:
            self.without[module] = changes
            return
        known, owners = self._owners.get(module, (-1, []))
        if known != changes:
            owners = [m for m in module.modules() if any(written_names(m))]
            self._owners[module] = changes, owners
        if not owners:
            self.without[module] = changes
        else:
            self._send([owner for owner in owners if owner in self._written])
            self._written.update(m for m in owners if m.training or declared_buffers(m))

    def before_save(self, model: nn.Module) -> None:
        """Send what calls have written, and warn of other buffers that differ between ranks.
        Collective.
        """
        if self._is_alone:
            return
        self._send([module for module in model.modules() if module in self._written])
        saved = {
            f"{prefix}.{name}".lstrip("."): buffer
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
            and buffer.layout is torch.strided
            and name not in unsaved_buffers(module)
        }
        if saved:
            sums = torch.stack([sum_of_bits(buffer) for buffer in saved.values()])
            extremes = torch.stack([sums, ~sums])
            with annotate("to compare buffers before a save"):
                self._group.all_reduce(extremes, "max").wait()
            differs = extremes[0] != ~extremes[1]
            pairs = zip(saved, differs.tolist(), strict=True)
            self._warn([name for name, is_other in pairs if is_other])

    @torch.no_grad()
    def _send(self, owners: Iterable[nn.Module]) -> None:
        owners = list(owners)
        by_kind: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
        for owner in owners:
            for name in written_names(owner):
                buffer = owner._buffers[name]
                if buffer is not None and buffer.layout is torch.strided:
                    of_kind = by_kind.setdefault((buffer.dtype, buffer.device), {})
                    of_kind[id(buffer)] = buffer
        for of_kind in by_kind.values():
            buffers = list(of_kind.values())
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            with annotate("to send rank 0's statistics of norms and declared buffers"):
                self._group.broadcast(flat, 0).wait()
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                # By .data, as torch's norms write them: a graph may hold the buffer.
                buffer.data.copy_(part.view_as(buffer))
        self._written.difference_update(owners)

    def _warn(self, names: list[str]) -> None:
        new = [name for name in names if name not in self._named]
        if new and self._runtime.rank == 0:
            warn_user(
                f"Buffers differ between ranks: {', '.join(new[:6])}"
                f"{f' and {len(new) - 6} more' if len(new) > 6 else ''}. The checkpoint has rank"
                " 0's, and a load gives these to all. If forward writes them, declare it in their"
                f" module, written_buffers = ({new[0].rpartition('.')[2]!r},): then rank 0's are"
                " sent to all ranks at each call."
            )
        self._named.update(new)


def written_names(module: nn.Module) -> list[str]:
    """Return the names of the module's own buffers that its forward computes from data."""
    if not module._buffers:
        return []
    declared = declared_buffers(module)
    return [name for name in module._buffers if name in _OF_NORMS or name in declared]


def declared_buffers(module: nn.Module) -> list[str]:
    """Return the names of the module's own buffers that its forward may change at any time."""
    # Not by getattr(), which a module that wraps another may pass on to that one.
    names = inspect.getattr_static(module, "written_buffers", ())
    if not isinstance(names, tuple) or not all(name in module._buffers for name in names):
        raise ConfigError(
            f"written_buffers of a {type(module).__name__} must be a tuple of names of the module's"
            f" own buffers, which are {', '.join(module._buffers) or 'none'}; it is {names!r}."
            " Register a buffer that is made later as None."
        )
    return list(names)
