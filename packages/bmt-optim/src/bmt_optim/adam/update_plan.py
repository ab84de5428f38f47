"""``UpdatePlan``: which parameters one kernel call updates together, and in which order the calls are made.

Parameters that lie in one flat shard (they have an *owner*) are updated together, and owners follow each other in the order of
their first parameters, whatever groups of the optimizer their parameters are in: the update of the first block is complete
before that of the second begins, so that the gather of a block has to wait for no other's update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bmt_core.params.owner import OwnerReference, ParameterOwner

State = dict[str, Any]


@dataclass
class Update:
    """One kernel call: parameters of one group, device and owner that have taken the same number of steps."""

    group: dict[str, Any]
    device: torch.device
    decoupled: bool
    params: list[torch.nn.Parameter] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def advance(self) -> int:
        """Count a step of all parameters, and return its number."""
        step = int(self.states[0]["step"]) + 1
        for state in self.states:
            state["step"] = step
        return step

    def is_in_step(self) -> bool:
        """Whether all parameters have taken the same number of steps still."""
        return len({state["step"] for state in self.states}) == 1


@dataclass
class OwnerUpdates:
    """All updates of what lies in one flat shard; of all that lies in none, if there is no owner."""

    reference: OwnerReference | None
    updates: list[Update] = field(default_factory=list)

    @property
    def owner(self) -> ParameterOwner | None:
        """The owner, unless it is gone."""
        return None if self.reference is None else self.reference()


class UpdatePlan:
    """The updates of one optimizer, made anew when other parameters have gradients, or anything else than numbers changed."""

    def __init__(self) -> None:
        self._key: list[tuple[Any, ...]] = []
        self._states: list[int] = []
        self._owners: list[OwnerUpdates] = []

    def of(
        self,
        groups: Iterable[dict[str, Any]],
        states: Mapping[Any, State],
        state_of: Callable[[torch.nn.Parameter], State],
        is_half: Callable[[State], bool],
    ) -> list[OwnerUpdates]:
        """Return the updates of all parameters in ``groups`` that have gradients.

        ``states`` has the state of every parameter that ``state_of`` was called with before; they are compared by identity.
        """
        key = [_key_of(group) for group in groups]
        if not self._is_made_for(key, states):
            self._owners = _make(key, state_of, is_half)
            self._key, self._states = key, _ids(states.values())
        return self._owners

    def _is_made_for(self, key: list[tuple[Any, ...]], states: Mapping[Any, State]) -> bool:
        if len(key) != len(self._key) or self._states != _ids(states.values()):
            return False
        if not all(_is_same(*pair) for pair in zip(key, self._key, strict=True)):
            return False
        return all(update.is_in_step() for owner in self._owners for update in owner.updates)


def _key_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return what decides how a group is cut into updates. No call per parameter: this runs in every step."""
    params = _with_gradients(group["params"])
    owners = [getattr(p, "owner_reference", None) for p in params]
    kinds = [(p.dtype, p.device) for p in params]
    return group, group["decoupled_weight_decay"], kinds, params, owners


def _with_gradients(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    grads = [p.grad for p in params]
    if True in [grad.is_sparse for grad in grads if grad is not None]:
        raise TypeError("AdamOptimizer takes dense gradients. Use torch.optim.SparseAdam for sparse embeddings.")
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
    is_half: Callable[[State], bool],
) -> list[OwnerUpdates]:
    owners: dict[int, OwnerUpdates] = {}
    updates: dict[tuple[Any, ...], Update] = {}
    for number, (group, decoupled, _, params, references) in enumerate(key):
        for p, reference in zip(params, references, strict=True):
            state = state_of(p)
            state["step"] = int(state["step"])
            is_decoupled = is_half(state) if decoupled is None else decoupled
            owner = None if reference is None else reference()  # gone: nobody is to be told
            kind = (id(owner), number, p.device, is_decoupled, state["step"])
            if kind not in updates:
                updates[kind] = Update(group, p.device, is_decoupled)
                lot = owners.setdefault(id(owner), OwnerUpdates(None if owner is None else reference))
                lot.updates.append(updates[kind])
            updates[kind].params.append(p)
            updates[kind].states.append(state)
    return list(owners.values())
