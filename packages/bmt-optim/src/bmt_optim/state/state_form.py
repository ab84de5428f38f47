"""The form of a manager's state: which parts it has, and of what type, before anything is read
from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import broadcast_object
from bmt_core.errors import BmtError, CheckpointError
from bmt_optim.current_run import world

_RANK_STATE = "OptimManager.state_dict()"
_LOGICAL_STATE = "OptimManager.logical_state() or state_dict(gather_opt=True)"


def check_form(state: Any) -> None:
    """Raise :class:`CheckpointError` unless ``state`` has the form of a manager's state, a rank's
    or a gathered one.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"The state is {_named(state)}, not one that {_RANK_STATE} returned. Pass one on"
            " every rank."
        )
    _check_is_list(state, "lr_schedulers")
    if "logical" in state:
        check_logical_form(state)
    else:
        _check_is_list(state, "optimizers")


def check_logical_form(state: Any) -> None:
    """Raise :class:`CheckpointError` unless ``state`` has the form of a gathered state. Its
    parameters may be on rank 0 only.
    """
    logical = state.get("logical") if isinstance(state, Mapping) else None
    if (
        not isinstance(logical, Mapping)
        or not all(
            isinstance(logical.get(name, {}), Mapping) for name in ("shapes", "value_shapes")
        )
        or not isinstance(logical.get("parameters"), Mapping)
        or not _are_mappings(logical.get("groups"))
        or not isinstance(state.get("lr_schedulers"), list)
    ):
        raise CheckpointError(
            f"The optimizer state is damaged, or not one that {_LOGICAL_STATE} returned."
        )


@contextmanager
def checking_form() -> Iterator[None]:
    """Raise :class:`CheckpointError` in place of what Python raises in the ``with`` statement for a
    state of another form.
    """
    try:
        yield
    except BmtError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The optimizer state is damaged, or not one that {_RANK_STATE} returned"
            f" ({type(error).__name__}: {error})."
        ) from error


def _check_is_list(state: Mapping[str, Any], key: str) -> None:
    if key not in state:
        raise CheckpointError(
            f"The state has no {key!r}, so it is not one that {_RANK_STATE} returned."
        )
    if not isinstance(state[key], list | tuple):
        raise CheckpointError(
            f"{key!r} of the state is {_named(state[key])}, not a list. Pass what"
            f" {_RANK_STATE} returned."
        )


def _are_mappings(groups: Any) -> bool:
    """Whether ``groups`` is a list of lists of mappings: the options of each optimizer's
    parameter groups.
    """
    if not isinstance(groups, list) or not all(
        isinstance(of_optimizer, list) for of_optimizer in groups
    ):
        return False
    return all(isinstance(group, Mapping) for of_optimizer in groups for group in of_optimizer)


def _named(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def with_head_of_rank_0(state: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``state``; on ranks where it is None, rank 0's without the states of parameters.
    Collective.
    """
    with collective_section(world(), "loading the optimizer state"):
        head = None if state is None else _without_parameters(state)
    head = broadcast_object(head, world())
    if head is None:
        raise CheckpointError(
            "Rank 0 was given no optimizer state. Pass what logical_state() returned there."
        )
    return head if state is None else state


def _without_parameters(state: Mapping[str, Any]) -> Mapping[str, Any]:
    check_logical_form(state)
    return {**state, "logical": {**state["logical"], "parameters": {}}}
