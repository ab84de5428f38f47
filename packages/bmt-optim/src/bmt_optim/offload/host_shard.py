"""``HostShard``: what the host keeps of parameters that lie together on the device.

Flat tensors, laid out like the parameters: gradients as they arrive, the weights (what goes back to the device), both moments,
and for half types the float32 master, or its remainder: 16 bytes per bfloat16 parameter, 14 with remainders; on the device none.

[Note: which weights count] The host steps its own copy of the weights. Where that is all there is (float32 parameters, compact
masters) a write to the parameter counts, as it does for ``AdamOptimizer``: its version tells, and the copy is read again. A whole
master overwrites what was written, in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bmt_core.ops import read_master, write_master
from bmt_core.params.owner import owner_of
from bmt_optim.adam.update_plan import State
from bmt_optim.offload.host_memory import HostMemory

MASTER = "_param_fp32"
REMAINDER = "_param_remainder"


class HostShard:
    """The host's side of ``params``: slices of one storage of the device, or a single parameter of any strides."""

    def __init__(self, params: Sequence[torch.nn.Parameter], *, is_compact: bool) -> None:
        self.params = sorted(params, key=lambda p: (int(p.storage_offset()), p.numel()))
        first = self.params[0]
        self.device, self.dtype = first.device, first.dtype
        self.begin = int(first.storage_offset())
        self.starts = [int(p.storage_offset()) - self.begin for p in self.params]
        self.length = max(start + _span(p) for start, p in zip(self.starts, self.params, strict=True))
        wide = torch.promote_types(self.dtype, torch.float32)
        kinds = {"gradient": self.dtype, "weight": self.dtype, "exp_avg": wide, "exp_avg_sq": wide}
        if self.dtype != wide:
            kinds |= {REMAINDER: torch.int16} if is_compact else {MASTER: wide}
        self._memory = HostMemory([(self.length, dtype) for dtype in kinds.values()], self.device)
        self.flat = dict(zip(kinds, self._memory.tensors, strict=True))
        self._views = {p: self._views_of(p, start) for p, start in zip(self.params, self.starts, strict=True)}
        self._target: torch.Tensor | None = None
        self._addresses = self._addresses_now()
        self._versions: dict[torch.nn.Parameter, int] = {}  # those whose values the host has

    @property
    def master(self) -> torch.Tensor | None:
        """The flat masters or remainders, if the parameters are of a half type."""
        return self.flat.get(REMAINDER, self.flat.get(MASTER))

    @property
    def follows_writes(self) -> bool:
        """Whether a write to a parameter counts: see [Note: which weights count]."""
        return MASTER not in self.flat

    @property
    def target(self) -> torch.Tensor:
        """The parameters' memory on the device, flat, with a version counter of its own: who writes late changes no version."""
        if self._target is None:
            self._target = _flat_of(self.params[0], self.begin, self.length)
        return self._target

    def is_still_there(self) -> bool:
        """Whether the parameters are where they were."""
        return self._addresses == self._addresses_now()

    def refresh(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Read those of ``params`` that somebody wrote, if that counts, from the device; wait for them then."""
        if not self.follows_writes:
            return
        known = [self._versions.get(p) for p in params]
        found = [p._version for p in params]
        if known != found:
            for p, old, new in zip(params, known, found, strict=True):
                if old != new:
                    self._read_weight(p)
            self.note_versions(params)

    def note_versions(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Take ``params`` as they are, or will be by what was started, for what the host has."""
        self._versions.update(zip(params, [p._version for p in params], strict=True))

    def adopt(self, p: torch.nn.Parameter, state: State) -> None:
        """Move ``state`` of ``p``, new or loaded or of an earlier shard, into this memory; make its tensors views of it."""
        views = self._views[p]
        if all(state.get(key) is view for key, view in views.items() if key not in ("gradient", "weight")):
            return
        self._read_weight(p)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                views[key].zero_()
            elif state[key] is not views[key]:
                views[key].copy_(state[key])
        master = _given_master(state, views["weight"])
        if MASTER in views:
            views[MASTER].copy_(views["weight"] if master is None else master)
        elif REMAINDER in views:
            views[REMAINDER].zero_()
            if master is not None:
                write_master(master, views["weight"], views[REMAINDER])
        elif master is not None:  # the parameter was made float32
            views["weight"].copy_(master)
        for key in (MASTER, REMAINDER):
            state.pop(key, None)
        state.setdefault("step", 0)
        state.update({key: view for key, view in views.items() if key not in ("gradient", "weight")})
        # The master that was given says what the weight is, whatever the parameter is now: the step will write it.
        self.note_versions([p])

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this memory."""
        return tensor.untyped_storage()._cdata in [flat.untyped_storage()._cdata for flat in self.flat.values()]

    def weight_of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the host's copy of ``p``, read again if somebody wrote ``p`` and that counts."""
        self.refresh([p])
        return self._views[p]["weight"]

    def gradient_of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """Return where the gradient of ``p`` arrives, in the shape and strides of ``p``."""
        return self._views[p]["gradient"]

    def _views_of(self, p: torch.nn.Parameter, start: int) -> dict[str, torch.Tensor]:
        return {key: shaped_like(p, flat, start) for key, flat in self.flat.items()}

    def _addresses_now(self) -> list[Any]:
        return [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in self.params]

    def _read_weight(self, p: torch.nn.Parameter) -> None:
        self._views[p]["weight"].copy_(p.detach())


class HostShards:
    """The host shards of an optimizer's parameters, made as they are needed."""

    def __init__(self) -> None:
        self._of: dict[torch.nn.Parameter, HostShard] = {}

    def find(self, p: torch.nn.Parameter) -> HostShard | None:
        """Return the shard of ``p``, if there is one."""
        return self._of.get(p)

    def all(self) -> list[HostShard]:
        """Return all shards."""
        return list(dict.fromkeys(self._of.values()))

    def are_still_there(self) -> bool:
        """Whether all parameters are where they were when their shards were made."""
        return False not in [shard.is_still_there() for shard in self.all()]

    def make(self, p: torch.nn.Parameter, everyone: Sequence[torch.nn.Parameter], *, is_compact: bool) -> HostShard:
        """Return the shard of ``p``, a new one if need be: for all of ``everyone`` without one that lie together with it.

        Together: in one storage of one owner.
        """
        if p not in self._of:
            companions = [p]
            if _is_slice(p):  # what has a shard has its state there
                companions = [other for other in everyone if other not in self._of and _lie_together(p, other)]
            shard = HostShard(companions, is_compact=is_compact)
            self._of.update(dict.fromkeys(companions, shard))
        return self._of[p]

    def forget_moved(self) -> None:
        """Forget the shards of parameters that are elsewhere now; their states go on as plain tensors."""
        self._of = {p: shard for p, shard in self._of.items() if shard.is_still_there()}


def _is_slice(p: torch.nn.Parameter) -> bool:
    return owner_of(p) is not None and p.dim() == 1 and p.is_contiguous()


def _lie_together(p: torch.nn.Parameter, other: torch.nn.Parameter) -> bool:
    return (
        _is_slice(other)
        and owner_of(p) is owner_of(other)
        and p.dtype == other.dtype
        and p.untyped_storage()._cdata == other.untyped_storage()._cdata
    )


def _span(p: torch.Tensor) -> int:
    """How many elements of its storage a tensor reaches over."""
    if not p.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))


def _flat_of(tensor: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), begin, (length,), (1,))


def flat_gradient(gradient: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    """Return ``length`` elements from ``begin`` of the storage of ``gradient``, as a flat tensor."""
    return _flat_of(gradient.detach(), begin, length)


def shaped_like(p: torch.Tensor, flat: torch.Tensor, start: int) -> torch.Tensor:
    """Return the view of ``flat`` that has the shape and the strides of ``p`` and begins at element ``start``."""
    return flat.as_strided(p.shape, p.stride(), int(flat.storage_offset()) + start)


def _given_master(state: State, weight: torch.Tensor) -> torch.Tensor | None:
    if REMAINDER in state:
        # The parameter may have been made another dtype since.
        return read_master(weight.to(torch.bfloat16), state[REMAINDER].to("cpu"))
    master: torch.Tensor | None = state.get(MASTER)
    return master
