"""``HostShard``: the host's tensors for parameters that lie in one storage on the device.

Flat tensors, laid out like the parameters: gradients, weights (which are copied back), both
moments, and for half types the float32 master or its remainder. That is 16 bytes per bfloat16
parameter, 14 with remainders; the device keeps parameters and gradients only.

[Note: which weights count] The host updates its own copy of the weights. As with ``AdamOptimizer``,
a write to the parameter is kept: if the parameter's version has changed, the host reads the
parameter again and adjusts its master.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bmt_core.ops import read_master, write_master
from bmt_core.torch_internals import Seen
from bmt_optim.adam.parameter_state import MASTER, REMAINDER, State, followed_master
from bmt_optim.offload.host_memory import HostMemory
from bmt_params.owner import owner_of


class HostShard:
    """The host's side of ``params``: consecutive slices of one storage of the device, or a single
    parameter of any strides.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], *, is_compact: bool) -> None:
        self.params = sorted(params, key=lambda p: (int(p.storage_offset()), p.numel()))
        first = self.params[0]
        self.device, self.dtype = first.device, first.dtype
        self.is_contiguous = first.is_contiguous()  # on the device, too
        self.begin = int(first.storage_offset())
        self.starts = {p: int(p.storage_offset()) - self.begin for p in self.params}
        self.length = max(start + p.numel() for p, start in self.starts.items())
        wide = torch.promote_types(self.dtype, torch.float32)
        self._state_dtypes = {"exp_avg": wide, "exp_avg_sq": wide}
        if self.dtype != wide:
            self._state_dtypes |= {REMAINDER: torch.int16} if is_compact else {MASTER: wide}
        dtypes = {"gradient": self.dtype, "weight": self.dtype, **self._state_dtypes}
        self._memory = HostMemory([(self.length, dtype) for dtype in dtypes.values()], self.device)
        self.flat = dict(zip(dtypes, self._memory.tensors, strict=True))
        self.views = {
            p: {
                key: flat[start : start + p.numel()].view(p.shape)
                for key, flat in self.flat.items()
            }
            for p, start in self.starts.items()
        }
        self._addresses = self._current_addresses()
        self.seen = Seen()
        """The parameters whose values the host has, or will when the current update is done."""

    def has_moved(self) -> bool:
        """Whether a parameter has other memory on the device than when the shard was made."""
        return self._addresses != self._current_addresses()

    def release(self, p: torch.nn.Parameter) -> None:
        """Leave ``p`` out of later updates: its state is elsewhere now."""
        self.params = [q for q in self.params if q is not p]
        del self._addresses[p]

    def refresh(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Read from the device those of ``params`` that were written: see
        [Note: which weights count].
        """
        written = self.seen.written(params)
        for p in written:
            self._read_weight(p)
            self._follow_weight(self.views[p])
        self.seen.note(written)

    def adopt(self, p: torch.nn.Parameter, state: State) -> None:
        """Copy ``state`` of ``p`` (new, loaded, or of an earlier shard) into this memory, and make
        its tensors views of it.
        """
        views = self.views[p]
        if all(state.get(key) is views[key] for key in self._state_dtypes):
            return
        self._read_weight(p)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                views[key].zero_()
            elif state[key] is not views[key]:
                views[key].copy_(state[key])
        self._adopt_master(state, views)
        for key in (MASTER, REMAINDER):
            state.pop(key, None)
        state.setdefault("step", 0)
        state.update({key: views[key] for key in self._state_dtypes})
        self.seen.note([p])

    def _adopt_master(self, state: State, views: dict[str, torch.Tensor]) -> None:
        weight = views["weight"]
        master: torch.Tensor | None = None
        if MASTER in state:
            master = followed_master(state[MASTER].to("cpu"), weight)
        elif REMAINDER in state:
            # The parameter's dtype may have changed since.
            master = read_master(weight.to(torch.bfloat16), state[REMAINDER].to("cpu"))
        if MASTER in views:
            views[MASTER].copy_(weight if master is None else master)
        elif REMAINDER in views:
            views[REMAINDER].zero_()
            if master is not None:
                write_master(master, weight, views[REMAINDER])
        elif master is not None:  # the parameter has become float32
            weight.copy_(master)

    def _follow_weight(self, views: dict[str, torch.Tensor]) -> None:
        if MASTER in views:
            views[MASTER].copy_(followed_master(views[MASTER], views["weight"]))

    def _current_addresses(self) -> dict[torch.nn.Parameter, Any]:
        return {p: (p.data_ptr(), p.dtype, p.shape, p.stride()) for p in self.params}

    def _read_weight(self, p: torch.nn.Parameter) -> None:
        self.views[p]["weight"].copy_(p.detach())


def parameters_in_storage_of(
    p: torch.nn.Parameter, others: Iterable[torch.nn.Parameter]
) -> list[torch.nn.Parameter]:
    """Return ``p`` and those of ``others`` that are slices of the same storage, of the
    same owner.
    """
    if not _is_slice(p):
        return [p]
    storage, owner = p.untyped_storage().data_ptr(), owner_of(p)
    found = [
        q
        for q in others
        if _is_slice(q) and owner_of(q) is owner and q.untyped_storage().data_ptr() == storage
    ]
    return [p, *(q for q in found if q is not p and q.dtype == p.dtype)]


def _is_slice(p: torch.nn.Parameter) -> bool:
    return owner_of(p) is not None and p.dim() == 1 and p.is_contiguous()


def alias(
    tensor: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a view of the storage of ``tensor``. Writes to it do not change the version
    of ``tensor``.
    """
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, tuple(shape), tuple(stride))
