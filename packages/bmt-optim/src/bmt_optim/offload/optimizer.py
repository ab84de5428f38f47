"""``AdamOffloadOptimizer``: Adam whose states live on the host, stepped there chunk by chunk beside the device's work."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from bmt_core.ops import Kernels, read_master
from bmt_core.params.owner import ParameterOwner
from bmt_core.run.lanes import Mark
from bmt_optim.adam.optimizer import MASTER, REMAINDER, AdamOptimizer, settings_of
from bmt_optim.adam.update_plan import OwnerUpdates, State, UpdatePlan
from bmt_optim.current_run import kernels_of_host
from bmt_optim.offload import worker
from bmt_optim.offload.chunks import HostSchedule, schedules_of
from bmt_optim.offload.copies import Copies, copies_of
from bmt_optim.offload.deltas import Deltas
from bmt_optim.offload.gradient_copies import Departures
from bmt_optim.offload.host_memory import CHUNK
from bmt_optim.offload.host_number import OnHost
from bmt_optim.offload.host_shard import HostShard, HostShards
from bmt_optim.offload.host_update import HostUpdate, run_all


class AdamOffloadOptimizer(AdamOptimizer):
    """:class:`AdamOptimizer`, arguments and numbers, with masters and moments in page-locked host memory (CUDA).

    The device keeps parameters and gradients alone. Gradients of Blocks are copied to the host while the backward pass goes on, as
    soon as they are reduced, and all others at the step, in chunks; a thread of the host steps one chunk while the next arrives
    (with the compiled kernels of ``bmt-kernels`` if they are installed, on the cores that are this rank's share; set the number of
    threads by ``BMT_OFFLOAD_THREADS``); the updated parameters of a Block return when all of it is stepped. The device waits for
    nothing but them. With ``overlap_forward``, :meth:`step` does not wait either: the next forward pass begins while later
    Blocks are stepped, and what :class:`AdamOptimizer` says about reading parameters by hand holds.

    Between backward and step, change gradients as torch counts changes: by operations on ``p.grad``, or by assigning it. What
    writes behind its back to gradients of Blocks (``p.grad.data``, NumPy, collectives of ``torch.distributed``) comes too late.

    On the CPU, where there is nowhere to go, it is :class:`AdamOptimizer`, in every bit, with no threads and no copies.

    An error of the host's thread is raised by the next call that needs its result, on this rank, and no shard is ever half new: see
    [Note: all or nothing] in :mod:`bmt_optim.offload.host_update`. States are those of
    :class:`AdamOptimizer` and either loads the other's.

    ``record_delta``: in every step, sum up the mean and the variance of (m / b1) / (sqrt(v / b2) + eps) + weight_decay * p over all
    parameters of half types, with b = 1 - beta**t: see :meth:`get_avg_delta`. It costs the host about another pass.

    >>> parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> parameter.grad = torch.tensor([1.0, -1.0], dtype=torch.bfloat16)
    >>> optimizer = AdamOffloadOptimizer([parameter], lr=0.5, record_delta=True)
    >>> optimizer.step()
    >>> parameter.detach(), round(optimizer.get_var_delta(), 3)
    (tensor([0.5000, 1.5000], dtype=torch.bfloat16), 1.0)
    """

    name: ClassVar[str] = "adam_offload"

    chunk: ClassVar[int] = CHUNK

    _shards: HostShards
    _schedules: list[tuple[OwnerUpdates, list[HostSchedule]]]
    _scheduled: object
    _departures: Departures
    _under_way: list[HostUpdate]
    _copies: dict[torch.device, Copies]
    _deltas: Deltas | None
    _chosen: Kernels | None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        hold_steps: int = 0,
        *,
        decoupled_weight_decay: bool | None = None,
        overlap_forward: bool = False,
        compact_master: bool | None = None,
        record_delta: bool = False,
    ) -> None:
        self.record_delta = record_delta
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

    def get_avg_delta(self) -> float:
        """Return the mean that ``record_delta`` asked for, of the last step, over all ranks. Collective."""
        return self._delta()[0]

    def get_var_delta(self) -> float:
        """Return the variance that ``record_delta`` asked for, of the last step, over all ranks. Collective."""
        return self._delta()[1]

    def wait(self) -> None:
        """See :meth:`AdamOptimizer.wait`; waits for the host's thread too, and raises what went wrong there."""
        super().wait()
        for update in self._under_way:
            update.wait()
        self._under_way = []

    @contextmanager
    def scaling_gradients(
        self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | None
    ) -> Iterator[None]:
        """Inside, the caller multiplies gradients by ``factor``, on the device; None: clears them if the step will be skipped.

        So copies of them that have left already can be used.
        """
        with self._departures.scaling(parameters, factor):
            yield

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`AdamOptimizer.load_state_dict`. A failed step is forgotten then: load the parameters too."""
        under_way = self._under_way
        super().load_state_dict(state_dict)
        for update in under_way:
            update.forgive(p for group in self.param_groups for p in group["params"])

    def portable_state(self, p: torch.nn.Parameter) -> State:
        """See :meth:`AdamOptimizer.portable_state`; tensors of offloaded parameters are the host's own."""
        if not self._offloads(p.device):
            return super().portable_state(p)
        self.wait()
        state = dict(self.state.get(p, {}))
        if REMAINDER in state:
            remainder, shard = state.pop(REMAINDER), self._shards.find(p)
            is_ours = shard is not None and shard.holds(remainder)
            weight = shard.weight_of(p) if shard is not None and is_ours else p.detach().to("cpu", torch.bfloat16)
            state[MASTER] = read_master(weight, remainder)
        return state

    def load_portable_state(self, p: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        """See :meth:`AdamOptimizer.load_portable_state`; what is offloaded stays on the host, and moves there in the next step.

        A failed step is forgotten when the states of all that it should have stepped were loaded: load the parameters too.
        """
        if not self._offloads(p.device):
            super().load_portable_state(p, state)
            return
        self._let_finish()
        self.state.pop(p, None)
        for update in self._under_way:
            update.forgive([p])
        if state:
            self.state[p] = {key: _on_host(value) for key, value in state.items()}

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        self.wait()
        return {**super().__getstate__(), "record_delta": self.record_delta}

    def _let_finish(self) -> None:
        super()._let_finish()
        for update in self._under_way:
            update.let_finish()

    def _forget(self) -> None:
        super()._forget()
        self._shards = HostShards()
        self._schedules, self._scheduled = [], None
        self._departures = Departures()
        self._under_way = []
        self._copies = {}
        self._deltas = None
        self._chosen = None

    def _offloads(self, device: torch.device) -> bool:
        """Whether parameters on ``device`` have their states elsewhere."""
        return device.type != "cpu"

    def _kernels(self) -> Kernels:
        if self._chosen is None:
            self._chosen = kernels_of_host()
        return self._chosen

    def _is_compact(self, p: torch.nn.Parameter) -> bool:
        if not self._offloads(p.device) or p.dtype != torch.bfloat16:
            return super()._is_compact(p)
        return self._kernels().has_compact_adam if self.compact_master is None else self.compact_master

    def _state_of(self, p: torch.nn.Parameter) -> State:
        if not self._offloads(p.device):
            return super()._state_of(p)
        state: State = self.state[p]
        self._shard_of(p).adopt(p, state)
        return state

    def _shard_of(self, p: torch.nn.Parameter) -> HostShard:
        everyone = [other for group in self.param_groups for other in group["params"]]
        return self._shards.make(p, everyone, is_compact=self._is_compact(p))

    def _updates(self) -> list[OwnerUpdates]:
        if not self._shards.are_still_there():
            self._shards.forget_moved()
            self._plan = UpdatePlan()
        return super()._updates()

    def _run(self, plan: list[OwnerUpdates], divisor: float | torch.Tensor, skip: torch.Tensor | None) -> None:
        self._deltas = Deltas() if self.record_delta else None
        here = [lot for lot in plan if not self._offloads(lot.updates[0].device)]
        super()._run(here, divisor, skip)
        if self._scheduled is not plan:
            self._schedule([lot for lot in plan if self._offloads(lot.updates[0].device)])
            self._scheduled = plan
        if vars(self).get("grad_scale", 1) is None:
            # GradScaler.unscale_() was called, which torch does not count as a change of the gradients.
            self._departures.clear()
        if self._schedules:
            self._run_on_host(divisor, skip)
        self._departures.clear()

    def _schedule(self, lots: Sequence[OwnerUpdates]) -> None:
        self._schedules = []
        for lot in lots:
            for part in [lot] if lot.owner is not None else _one_by_one(lot):
                shards = [self._shard_of(p) for update in part.updates for p in update.params]
                self._schedules.append((part, schedules_of(shards, part.updates, chunk=self.chunk)))
        # Those for whom step() waits come first; the others in the order in which forward needs them.
        self._schedules.sort(key=lambda entry: _overlaps(entry[0]))
        self._departures.clear([schedule for _, schedules in self._schedules for schedule in schedules])
        for part, schedules in self._schedules:
            if part.owner is not None and len(schedules) == 1:
                part.owner.watch_reductions(_Watcher(self, schedules[0]))

    def _run_on_host(self, divisor: float | torch.Tensor, skip: torch.Tensor | None) -> None:
        scale = OnHost(divisor) if isinstance(divisor, torch.Tensor) else divisor
        flag = None if skip is None else OnHost(skip)
        ways = [self._copies_for(part.updates[0].device) for part, _ in self._schedules]
        for way in dict.fromkeys(ways):
            way.begin()
        updates = [self._prepare(*entry, way) for entry, way in zip(self._schedules, ways, strict=True)]
        self._under_way = updates
        kernels, deltas = self._kernels(), self._deltas
        try:
            worker.submit(lambda: run_all(updates, flag, scale, kernels, ways, deltas))
        except BaseException as error:  # nobody else will say that they are over
            for update in updates:
                update.end(error)
            raise
        for (part, schedules), update in zip(self._schedules, updates, strict=True):
            self._tell(part, schedules, update)

    def _prepare(self, part: OwnerUpdates, schedules: Sequence[HostSchedule], way: Copies) -> HostUpdate:
        for schedule in schedules:
            schedule.shard.refresh(schedule.params)
        arrivals = [self._departures.arrival(schedule, way) for schedule in schedules]
        settings = {id(update): settings_of(update, update.advance()) for update in part.updates}
        held = [update for update in part.updates if settings[id(update)]["hold"]]
        for update in part.updates:
            if update not in held:  # what is written later has no version counter of its own
                torch.autograd.graph.increment_version(update.params)
        for schedule in schedules:
            schedule.shard.note_versions(schedule.params)
        return HostUpdate(arrivals, settings, [pair for schedule in schedules for pair in schedule.way_back(held)])

    def _tell(self, part: OwnerUpdates, schedules: Sequence[HostSchedule], update: HostUpdate) -> None:
        owner = part.owner
        if not _overlaps(part) or owner is None:
            update.wait()
        if owner is None:
            return
        if _overlaps(part):
            owner.note_update(update, [p.grad for schedule in schedules for p in schedule.params])
        else:
            owner.note_update()

    def _update(self, lot: OwnerUpdates, divisor: float | torch.Tensor, skip: torch.Tensor | None) -> None:
        deltas = self._deltas
        if deltas is None or (skip is not None and bool(skip)):
            super()._update(lot, divisor, skip)
            return
        masters = [[state.get(REMAINDER, state.get(MASTER)) for state in u.states] for u in lot.updates]
        before = [deltas.before(u.params, column) for u, column in zip(lot.updates, masters, strict=True)]
        super()._update(lot, divisor, skip)
        for u, weights in zip(lot.updates, before, strict=True):
            means, squares = ([state[key] for state in u.states] for key in ("exp_avg", "exp_avg_sq"))
            deltas.after(weights, means, squares, u.params, settings_of(u, u.states[0]["step"]))

    def _delta(self) -> tuple[float, float]:
        if not self.record_delta:
            raise ValueError("Nothing was recorded. Make the optimizer with record_delta=True.")
        self.wait()
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        return (self._deltas or Deltas()).mean_and_variance(device)

    def _copies_for(self, device: torch.device) -> Copies:
        if device not in self._copies:
            self._copies[device] = copies_of(device)
        return self._copies[device]

    def _leave(self, schedule: HostSchedule, flat: torch.Tensor, mark: Mark) -> None:
        for update in self._under_way:
            update.wait_on_host()  # the host may read the gradients of the last step still
        self._departures.leave(schedule, flat, mark, self._copies_for(schedule.shard.device))


class _Watcher:
    """Passes on that gradients are ready; keeps nobody alive."""

    def __init__(self, optimizer: AdamOffloadOptimizer, schedule: HostSchedule) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._schedule = weakref.ref(schedule)

    def __call__(self, flat: torch.Tensor, mark: Mark) -> None:
        optimizer, schedule = self._optimizer(), self._schedule()
        if optimizer is not None and schedule is not None:
            optimizer._leave(schedule, flat, mark)


def _one_by_one(lot: OwnerUpdates) -> list[OwnerUpdates]:
    return [OwnerUpdates(None, [update]) for update in lot.updates]


def _overlaps(lot: OwnerUpdates) -> bool:
    owner: ParameterOwner | None = lot.owner
    return owner is not None and all(update.group["overlap_forward"] for update in lot.updates)


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
