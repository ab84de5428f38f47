"""``UpdatePlan``: the parameters of each kernel call, and the order of the calls.

Parameters in one flat shard have an *owner*, such as their Block's group. An owner's parameters are
updated by consecutive calls, and owners come in the order of their first parameters, whatever
parameter groups these are in. So the update of the first Block is complete before that of the
second begins, and the gather of a Block waits for no other's update. With ``overlap_forward`` they
run on an :class:`UpdateStream`, while the next forward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bmt_optim.adam.parameter_state import MASTER, State, master_or_remainder
from bmt_params.owner import OwnerReference, ParameterOwner


@dataclass
class Update:
    """One kernel call: parameters of one group, device and owner that have taken the same number
    of steps.
    """

    group: dict[str, Any]
    device: torch.device
    decoupled: bool
    params: list[torch.nn.Parameter] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    with_whole_masters: list[torch.nn.Parameter] = field(default_factory=list)

    def count_step(self) -> int:
        """Count a step of all parameters, and return its number."""
        step = int(self.states[0]["step"]) + 1
        for state in self.states:
            state["step"] = step
        return step

    def settings(self, step: int) -> dict[str, Any]:
        """Return the options of ``adam_step`` for step number ``step``."""
        group = self.group
        return {
            "step": step,
            "lr": float(group["lr"]),  # torch allows tensors, of betas too
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "decoupled": self.decoupled,
            "hold": step <= group["hold_steps"],
        }

    def is_in_step(self) -> bool:
        """Whether all parameters still have the same number of steps."""
        return len({state["step"] for state in self.states}) == 1


@dataclass
class OwnerUpdates:
    """The updates of one owner's parameters on one device, or of all parameters without
    an owner.

    ``on_host``: their states are on the host, which takes the step.
    """

    reference: OwnerReference | None
    on_host: bool
    updates: list[Update] = field(default_factory=list)

    @property
    def owner(self) -> ParameterOwner | None:
        """The owner, unless it is gone."""
        return None if self.reference is None else self.reference()

    @property
    def device(self) -> torch.device:
        """Where all of the parameters are."""
        return self.updates[0].device

    @property
    def overlaps_forward(self) -> bool:
        """Whether the next forward pass may begin before the updates are done: all groups allow it,
        and an owner can wait.
        """
        if self.reference is None or self.reference() is None:
            return False
        return all(update.group["overlap_forward"] for update in self.updates)


class UpdatePlan:
    """The updates of one optimizer, made again if other parameters have gradients or anything but
    plain numbers changed.
    """

    def __init__(self) -> None:
        self._key: list[tuple[Any, ...]] = []
        self._states: list[int] = []
        self._owners: list[OwnerUpdates] = []

    def of(
        self,
        groups: Iterable[dict[str, Any]],
        states: Mapping[Any, State],
        state_of: Callable[[torch.nn.Parameter], State],
        is_on_host: Callable[[torch.nn.Parameter], bool],
    ) -> list[OwnerUpdates]:
        """Return the updates of all parameters in ``groups`` that have gradients.

        ``states`` has the present state of each parameter for which ``state_of`` was called before;
        they are compared by identity. ``is_on_host`` says which states the host steps.
        """
        key = [_key_of(group) for group in groups]
        if not self._is_made_for(key, states):
            self._owners = _make(key, state_of, is_on_host)
            self._key, self._states = key, _ids(states.values())
        return self._owners

    def _is_made_for(self, key: list[tuple[Any, ...]], states: Mapping[Any, State]) -> bool:
        if len(key) != len(self._key) or self._states != _ids(states.values()):
            return False
        if not all(_is_same(*pair) for pair in zip(key, self._key, strict=True)):
            return False
        return all(update.is_in_step() for owner in self._owners for update in owner.updates)


def _key_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that determines how a group is cut into updates. No call per parameter: this
    runs in every step.
    """
    params = _with_gradients(group["params"])
    references = [getattr(p, "owner_reference", None) for p in params]
    kinds = [(p.dtype, p.device) for p in params]
    return group, group["decoupled_weight_decay"], kinds, params, references


def _with_gradients(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    grads = [p.grad for p in params]
    if True in [grad.is_sparse for grad in grads if grad is not None]:
        raise TypeError(
            "AdamOptimizer takes dense gradients. Use torch.optim.SparseAdam for sparse embeddings."
        )
    return [p for p, grad in zip(params, grads, strict=True) if grad is not None]


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if one[0] is not other[0] or one[1:3] != other[1:3]:
        return False
    # By identity: the old objects are kept, so that no new one can have the address of one of them.
    return _ids(one[3]) == _ids(other[3]) and _ids(one[4]) == _ids(other[4])


def _ids(objects: Iterable[object]) -> list[int]:
    return list(map(id, objects))


def _make(
    key: list[tuple[Any, ...]],
    state_of: Callable[[torch.nn.Parameter], State],
    is_on_host: Callable[[torch.nn.Parameter], bool],
) -> list[OwnerUpdates]:
    owners: dict[tuple[int, torch.device, bool], OwnerUpdates] = {}
    updates: dict[tuple[Any, ...], Update] = {}
    for number, (group, decoupled, _, params, references) in enumerate(key):
        for p, reference in zip(params, references, strict=True):
            state = state_of(p)
            state["step"] = int(state["step"])
            is_decoupled = (
                master_or_remainder(state) is not None if decoupled is None else decoupled
            )
            # None: the owner is gone, or there is none.
            owner = None if reference is None else reference()
            on_host = is_on_host(p)
            kind = (id(owner), number, p.device, on_host, is_decoupled, state["step"])
            if kind not in updates:
                updates[kind] = Update(group, p.device, is_decoupled)
                of_owner = owners.setdefault(
                    (id(owner), p.device, on_host),
                    OwnerUpdates(None if owner is None else reference, on_host),
                )
                of_owner.updates.append(updates[kind])
            updates[kind].params.append(p)
            updates[kind].states.append(state)
            if MASTER in state:
                updates[kind].with_whole_masters.append(p)
    return list(owners.values())


PRIORITY = -1
"""Higher than the computation's, which would otherwise delay an update so much that the gather
after it is late.
"""


class UpdateStream:
    """The streams of one optimizer's updates, one on each CUDA device; on the CPU, updates run in
    the caller.

    Later Blocks are updated while the first ones compute. Updates read memory that the computation
    allocated (gradients, flags): the Block keeps it alive until its next gather has arrived, which
    is after its update.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def exists_on(self, device: torch.device) -> bool:
        """Whether updates on ``device`` have a stream of their own."""
        return device.type == "cuda"

    def begin(self, device: torch.device) -> None:
        """Make the following updates wait for the computation so far."""
        if not self.exists_on(device):
            return
        if device not in self._streams:
            # torch does not annotate it.
            self._streams[device] = torch.cuda.Stream(device, PRIORITY)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def launch_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched on the stream. Call
        :meth:`begin` before.
        """
        return torch.cuda.stream(self._streams[device]) if self.exists_on(device) else nullcontext()

    def wait(self) -> None:
        """Make the computation wait for all updates."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
