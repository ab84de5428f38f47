"""``AdamOffloadOptimizer``: Adam with its states in host memory, updated there by a thread while
the device works.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch

from bmt_core.ops import Kernels
from bmt_core.run.lanes import Mark
from bmt_core.run.runtime import current, is_initialized
from bmt_optim.adam.optimizer import AdamOptimizer
from bmt_optim.adam.parameter_state import (
    REMAINDER,
    State,
    copied_state,
    master_or_remainder,
)
from bmt_optim.adam.update_plan import OwnerUpdates, UpdatePlan
from bmt_optim.current_run import device_of, host_kernels
from bmt_optim.offload import worker
from bmt_optim.offload.chunks import ShardChunks
from bmt_optim.offload.copies import Copies, CudaCopies, HostNumber
from bmt_optim.offload.deltas import Deltas, copied_masters
from bmt_optim.offload.gradient_copies import GradientCopies
from bmt_optim.offload.host_memory import CHUNK
from bmt_optim.offload.host_shard import HostShard, parameters_in_storage_of
from bmt_optim.offload.host_update import HostUpdate, run_all
from bmt_optim.offload.placement import (
    DeviceMemory,
    DeviceRoom,
    StatePlacement,
    checked_budget,
)
from bmt_params.owner import ReductionWatcher, owner_of

CPU = torch.device("cpu")


class AdamOffloadOptimizer(AdamOptimizer):
    """:class:`AdamOptimizer`, with the same arguments and results, with masters and moments in
    page-locked host memory (CUDA).

    The device keeps parameters and gradients, and Adam's states of as many parameters as fit into
    ``device_memory``. Gradients that bmt-zero reduces, inside of
    Blocks and outside, are copied to the host during the backward pass, when they are reduced; all
    others are copied at the step, in chunks. A thread of the host updates one chunk while the next
    is copied: with the compiled kernels of ``bmt-kernels`` if they are installed, on this rank's
    share of the cores, or on ``BMT_OFFLOAD_THREADS`` threads. Parameters that are gathered
    together, such as those of a Block, are copied back when all of them are updated. With
    ``overlap_forward``, :meth:`step` does not wait for that: the next forward pass begins while
    later parameters are updated, and each gather waits for the update of its parameters. Before you
    read or write parameters yourself, call :meth:`wait`, as for :class:`AdamOptimizer`.

    Between backward and step, change gradients by operations on ``p.grad``, or by assigning it:
    torch counts these changes. It does not count writes to ``p.grad.data``, by NumPy, or by
    collectives of ``torch.distributed``; such writes are lost where gradients were copied during
    the backward pass.

    ``device_memory``: bytes of each device for masters and moments, which the device steps while
    the host steps the rest. The first parameters of the forward pass get them; those of a Block
    stay together. ``"auto"`` takes nine tenths of what the training has left free until the first
    step: it knows nothing of larger batches, or of other work that follows. Set
    :attr:`device_memory` to change it; the next step moves the states. The first step with another
    value than 0 is collective, and raises :class:`ConfigError` on every rank, before it changes
    anything, if the memory is not free on one of them. Neither results (but for rounding, where
    kernels of host and device differ) nor checkpoints depend on it.

    On the CPU it is :class:`AdamOptimizer`, in every bit, without threads or copies. An error of
    the host's thread is raised by the next call that needs its result, on this rank; on the device
    no shard is updated in part: see [Note: all or nothing] in :mod:`bmt_optim.offload.host_update`.
    Either optimizer loads the other's states.

    ``record_delta``: compute in every step mean and variance of (m / b1) / (sqrt(v / b2) + eps) +
    weight_decay * p over all parameters of half types, with b = 1 - beta**t: see
    :meth:`get_avg_delta`. This costs the host about one more pass.

    >>> parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> parameter.grad = torch.tensor([1.0, -1.0], dtype=torch.bfloat16)
    >>> optimizer = AdamOffloadOptimizer([parameter], lr=0.5, record_delta=True)
    >>> optimizer.step()
    >>> parameter.detach(), round(optimizer.get_var_delta(), 3)
    (tensor([0.5000, 1.5000], dtype=torch.bfloat16), 1.0)
    """

    name: ClassVar[str] = "adam_offload"

    chunk: ClassVar[int] = CHUNK

    _shards: dict[torch.nn.Parameter, HostShard]
    _offloaded: list[tuple[OwnerUpdates, list[ShardChunks]]]
    """The updates on the host, in order, each with the chunks of its shards."""
    _offloaded_plan: object
    _gradient_copies: GradientCopies
    _under_way: list[HostUpdate]
    _copies: dict[torch.device, Copies]
    _deltas: Deltas | None
    _kernels_on_host: Kernels | None
    _device_memory: DeviceMemory = 0
    _room_without_run: DeviceRoom | None = None
    _placement: StatePlacement

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        decoupled_weight_decay: bool | None = None,
        overlap_forward: bool | None = None,
        compact_master: bool | None = None,
        device_memory: int | Literal["auto"] = 0,
    ) -> None:
        self.record_delta = record_delta
        self._device_memory = checked_budget(device_memory)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            hold_steps,
            decoupled_weight_decay=decoupled_weight_decay,
            overlap_forward=overlap_forward,
            compact_master=compact_master,
        )

    @property
    def device_memory(self) -> int | Literal["auto"]:
        """Bytes of each device for states, or ``"auto"``."""
        return self._device_memory

    @device_memory.setter
    def device_memory(self, value: int | Literal["auto"]) -> None:
        self._device_memory = checked_budget(value)
        self._placement = StatePlacement(self._device_memory)
        self._plan = UpdatePlan()

    def get_avg_delta(self) -> float:
        """Return the mean that ``record_delta`` asked for, of the last step, over all ranks.
        Collective.
        """
        return self._delta()[0]

    def get_var_delta(self) -> float:
        """Return the variance that ``record_delta`` asked for, of the last step, over all ranks.
        Collective.
        """
        return self._delta()[1]

    def wait(self) -> None:
        """See :meth:`AdamOptimizer.wait`; waits for the host's thread too, and raises its error."""
        super().wait()
        for update in self._under_way:
            update.wait()
        self._under_way = []

    def scaling_gradients(
        self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor | None
    ) -> AbstractContextManager[object]:
        """See :meth:`ManagedOptimizer.scaling_gradients`: copies that were started before
        stay usable.
        """
        return self._gradient_copies.scaling(parameters, factor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`AdamOptimizer.load_state_dict`. This clears the error of a failed step: load
        the parameters too.
        """
        # Loading resets this optimizer, but the owners of its parameters still have the updates.
        under_way = self._under_way
        super().load_state_dict(state_dict)
        for update in under_way:
            update.note_loaded(p for group in self.param_groups for p in group["params"])

    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        """See :meth:`AdamOptimizer.load_portable_state`; an offloaded state stays on the host.

        The next step copies it into its shard's memory. The error of a failed step is cleared once
        the states of all its parameters were loaded: load the parameters too.
        """
        super().load_portable_state(p, state)
        if p in self._shards:
            self._shards[p].seen.forget(p)  # its master was replaced
        for update in self._under_way:
            update.note_loaded([p])

    def __getstate__(self) -> dict[str, Any]:
        own = {"record_delta": self.record_delta, "_device_memory": self._device_memory}
        return {**super().__getstate__(), **own}

    def _wait_despite_errors(self) -> None:
        super()._wait_despite_errors()
        for update in self._under_way:
            update.wait_despite_error()

    def _reset(self) -> None:
        super()._reset()
        self._shards = {}
        self._offloaded, self._offloaded_plan = [], None
        self._gradient_copies = GradientCopies()
        self._under_way = []
        self._copies = {}
        self._deltas = None
        self._kernels_on_host = None
        self._placement = StatePlacement(self._device_memory)

    def _offloads(self, device: torch.device) -> bool:
        """Whether parameters on ``device`` have their states on the host."""
        return device.type != "cpu"

    def _kernels(self) -> Kernels:
        if self._kernels_on_host is None:
            self._kernels_on_host = host_kernels()
        return self._kernels_on_host

    def _is_on_host(self, p: torch.nn.Parameter) -> bool:
        return self._offloads(p.device) and not self._placement.is_on_device(p)

    def _is_compact(self, p: torch.nn.Parameter) -> bool:
        if not self._is_on_host(p) or p.dtype != torch.bfloat16:
            return super()._is_compact(p)
        return (
            self._kernels().has_compact_adam if self.compact_master is None else self.compact_master
        )

    def _state_device(self, p: torch.nn.Parameter) -> torch.device:
        return CPU if self._is_on_host(p) else p.device

    def _state_of(self, p: torch.nn.Parameter) -> State:
        if self._offloads(p.device) and not self._placement.has(p):
            self._place(p)
        state: State = self.state[p]
        if self._is_on_host(p):
            self._shard_of(p).adopt(p, state)
            return state
        shard = self._shards.pop(p, None)
        if shard is not None:  # others, such as frozen ones, may stay in it
            shard.release(p)
        if state and (shard is not None or state["exp_avg"].device != p.device):
            self.state[p] = copied_state(state, p, p.device, {})
            self._stepped.forget(p)
        return super()._state_of(p)

    def _place(self, p: torch.nn.Parameter) -> None:
        """Decide where the states of ``p``, and of all parameters with the same owner, are."""
        owner = owner_of(p)
        together = [p]
        if owner is not None:
            for q in self._trained():
                is_near = owner_of(q) is owner and q.device == p.device
                if q is not p and is_near and not self._placement.has(q):
                    together.append(q)
        self._placement.decide(together, sum(map(self._bytes_on_device, together)))

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def _bytes_on_device(self, p: torch.nn.Parameter) -> int:
        """Return the bytes of the state of ``p`` if it is on the device."""
        wide = torch.promote_types(p.dtype, torch.float32)
        master = 0 if p.dtype == wide else wide.itemsize
        if super()._is_compact(p):
            master = torch.int16.itemsize
        return p.numel() * (2 * wide.itemsize + master)

    def _device_room(self) -> DeviceRoom:
        if is_initialized():
            return current().state(DeviceRoom)
        if self._room_without_run is None:
            self._room_without_run = DeviceRoom()
        return self._room_without_run

    def _weight_for(self, remainder: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        shard = self._shards.get(p)
        if shard is None or shard.views[p].get(REMAINDER) is not remainder:
            return super()._weight_for(remainder, p)
        shard.refresh([p])
        return shard.views[p]["weight"]

    def _shard_of(self, p: torch.nn.Parameter) -> HostShard:
        if p not in self._shards:
            # Parameters that already have a shard keep it, because their states are there.
            others = [
                q for group in self.param_groups for q in group["params"] if q not in self._shards
            ]
            shard = HostShard(parameters_in_storage_of(p, others), is_compact=self._is_compact(p))
            self._shards.update(dict.fromkeys(shard.params, shard))
        return self._shards[p]

    def _updates(self) -> list[OwnerUpdates]:
        moved = [shard for shard in dict.fromkeys(self._shards.values()) if shard.has_moved()]
        if moved:  # their states become plain tensors
            self._shards = {p: shard for p, shard in self._shards.items() if shard not in moved}
            self._plan = UpdatePlan()
        if not self._placement.is_agreed:
            offloaded = [p for p in self._trained() if self._offloads(p.device)]
            self._placement.agree(
                self._device_room(), [(p.device, self._bytes_on_device(p)) for p in offloaded]
            )
        return super()._updates()

    def _run(
        self, plan: list[OwnerUpdates], divisor: float | torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        self._deltas = Deltas() if self.record_delta else None
        super()._run([u for u in plan if not u.on_host], divisor, skip)
        if self._offloaded_plan is not plan:
            self._divide_into_chunks([u for u in plan if u.on_host])
            self._offloaded_plan = plan
        if vars(self).get("grad_scale", 1) is None:
            # GradScaler.unscale_() was called, which torch does not count as a change of
            # the gradients.
            self._gradient_copies.clear()
        if self._offloaded:
            self._run_on_host(divisor, skip)
        self._gradient_copies.clear()

    def _divide_into_chunks(self, plan: Sequence[OwnerUpdates]) -> None:
        self._offloaded = []
        for of_owner in plan:
            # Parameters without an owner: each update by itself.
            parts = (
                [of_owner]
                if of_owner.owner is not None
                else [OwnerUpdates(None, of_owner.on_host, [u]) for u in of_owner.updates]
            )
            for part in parts:
                shards = dict.fromkeys(
                    self._shard_of(p) for update in part.updates for p in update.params
                )
                chunks = [ShardChunks(shard, part.updates, self.chunk) for shard in shards]
                self._offloaded.append((part, chunks))
        # First the updates that step() waits for, then the others in the order of the forward pass.
        self._offloaded.sort(key=lambda entry: entry[0].overlaps_forward)
        self._gradient_copies = GradientCopies()
        for part, chunks in self._offloaded:
            owner = part.owner
            if owner is not None and len(chunks) == 1:
                owner.watch_reductions(
                    _copy_when_reduced(weakref.ref(self), weakref.ref(chunks[0]))
                )

    def _run_on_host(self, divisor: float | torch.Tensor, skip: torch.Tensor | None) -> None:
        scale = HostNumber(divisor) if isinstance(divisor, torch.Tensor) else divisor
        flag = None if skip is None else HostNumber(skip)
        for device in dict.fromkeys(part.device for part, _ in self._offloaded):
            self._copies_for(device).begin()
        updates = [self._prepare(part, chunks) for part, chunks in self._offloaded]
        self._under_way = updates
        kernels, deltas = self._kernels(), self._deltas
        try:
            worker.submit(lambda: run_all(updates, flag, scale, kernels, deltas))
        except BaseException as error:  # the worker will not mark them as over
            for update in updates:
                update.end(error)
            raise
        for (part, chunks), update in zip(self._offloaded, updates, strict=True):
            self._tell_owner(part, chunks, update)

    def _prepare(self, part: OwnerUpdates, chunks: Sequence[ShardChunks]) -> HostUpdate:
        copies = self._copies_for(part.device)
        for c in chunks:
            c.shard.refresh(c.params)
        gradients = [self._gradient_copies.take(c, copies) for c in chunks]
        settings = {id(update): update.settings(update.count_step()) for update in part.updates}
        held = [update for update in part.updates if settings[id(update)]["hold"]]
        for update in part.updates:
            if update not in held:  # the later write on the device does not count as a version
                torch.autograd.graph.increment_version(update.params)
        for c in chunks:
            c.shard.seen.note(c.params)
        weights = [pair for c in chunks for pair in c.stepped_weights(held)]
        return HostUpdate(gradients, settings, weights, copies)

    def _tell_owner(
        self, part: OwnerUpdates, chunks: Sequence[ShardChunks], update: HostUpdate
    ) -> None:
        owner, overlaps = part.owner, part.overlaps_forward
        if not overlaps:
            update.wait()
        if owner is not None and overlaps:
            owner.note_update(update, [p.grad for c in chunks for p in c.params])
        elif owner is not None:
            owner.note_update()

    def _update(
        self, of_owner: OwnerUpdates, divisor: float | torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        deltas = self._deltas
        if deltas is None or (skip is not None and bool(skip)):
            super()._update(of_owner, divisor, skip)
            return
        updates, overlaps = of_owner.updates, of_owner.overlaps_forward
        with self._stream.launch_on(of_owner.device) if overlaps else nullcontext():
            before = [
                copied_masters(u.params, [master_or_remainder(state) for state in u.states])
                for u in updates
            ]
            super()._update(of_owner, divisor, skip)
            for u, masters in zip(updates, before, strict=True):
                means, squares = (
                    [state[key] for state in u.states] for key in ("exp_avg", "exp_avg_sq")
                )
                deltas.add(masters, means, squares, u.params, u.settings(u.states[0]["step"]))

    def _delta(self) -> tuple[float, float]:
        if not self.record_delta:
            raise ValueError("Nothing was recorded. Make the optimizer with record_delta=True.")
        self.wait()
        device = device_of(p for group in self.param_groups for p in group["params"])
        return (self._deltas or Deltas()).mean_and_variance(device)

    def _copies_for(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = CudaCopies(device) if device.type == "cuda" else Copies()
        return self._copies[device]


def _copy_when_reduced(
    optimizer: weakref.ref[AdamOffloadOptimizer], chunks: weakref.ref[ShardChunks]
) -> ReductionWatcher:
    """Return a watcher that starts copying the gradients of ``chunks``, as long as both
    objects live.
    """

    def watcher(flat: torch.Tensor, done: Mark) -> None:
        found, its_chunks = optimizer(), chunks()
        if found is None or its_chunks is None:
            return
        for update in found._under_way:
            update.is_over.wait()  # the host may still read the gradients of the last step
        copies = found._copies_for(its_chunks.shard.device)
        found._gradient_copies.start(its_chunks, flat, done, copies)

    return watcher
