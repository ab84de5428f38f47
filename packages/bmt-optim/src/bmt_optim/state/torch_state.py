"""Checks that an optimizer can load a state in the form of torch's ``state_dict()``, from any
library and version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current, is_initialized, rank
from bmt_optim.current_run import world
from bmt_optim.managed_optimizer import ManagedOptimizer
from bmt_params.parameter import DistributedParameter

REMEDY = "Save with state_dict(gather_opt=True) to load at any world size."
_OTHER_GRID = (
    "It was saved at another world size, or of another model. Save with gather_opt=True to load at"
    " any world size."
)


Shapes = Mapping[str, Sequence[int] | None]
"""The shapes of a parameter's values in a state, by key; None for a value that is no tensor."""


def this_rank() -> dict[str, Any]:
    """Return what a state says about the rank whose parts it holds, for :func:`check_rank`."""
    return {"world_size": world().size, "rank": rank(), "grid": _grid()}


def _grid() -> str:
    return current().topology.grid if is_initialized() else ""


def check_rank(state: Mapping[str, Any]) -> None:
    """Raise :class:`CheckpointError` if ``state`` says that it is that of another rank."""
    size = state.get("world_size", world().size)
    if size != world().size:
        raise CheckpointError(
            f"The optimizer state was saved by one of {size} ranks, and this run has"
            f" {world().size}. {REMEDY}"
        )
    if state.get("rank", rank()) != rank():
        raise CheckpointError(
            f"The optimizer state is that of rank {state['rank']}, and this is rank {rank()}."
        )
    if state.get("grid", _grid()) != _grid():
        raise CheckpointError(
            f"The optimizer state was saved in the grid {state['grid']}, and this run has"
            f" {_grid()}: parts of the same sizes have other elements. {REMEDY}"
        )


def check_torch_state(
    optimizer: ManagedOptimizer, state: Mapping[str, Any], *, is_own: bool = True
) -> None:
    """Raise :class:`CheckpointError` unless ``optimizer`` can go on from ``state``.

    With ``is_own`` False the origin of ``state`` is unknown, so tensors that do not have their
    parameters' shapes are refused too.
    """
    _check_form(state)
    check_rank(state)
    groups, saved_groups = optimizer.param_groups, state["param_groups"]
    found = [len(group["params"]) for group in saved_groups]
    expected = [len(group["params"]) for group in groups]
    if found != expected:
        raise CheckpointError(
            f"The state has groups of {found} parameters, and this optimizer of"
            f" {expected}. {_OTHER_GRID}"
        )
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        complaint = _other_names(group, saved) or optimizer.complaint_about_options(saved)
        if complaint is not None:
            raise CheckpointError(
                f"Group {number} of the state {complaint}. Load it into optimizers like those that"
                " saved it."
            )
    for number, (p, entry) in enumerate(_entries(optimizer, state)):
        shapes = {
            key: value.shape if isinstance(value, torch.Tensor) else None
            for key, value in entry.items()
        }
        shape = p.shape
        if isinstance(p, DistributedParameter) and optimizer.state_owner(p) is not None:
            shape = p.whole_shape
        complaint = optimizer.complaint_about_state(shapes, shape) if shapes else None
        if complaint is None and not is_own:
            complaint = _other_shapes(shapes, shape)
        if complaint is not None:
            raise CheckpointError(f"The state of parameter {number} {complaint}. {_OTHER_GRID}")


def value_shapes(state: Any) -> dict[Any, dict[str, list[int] | None]]:
    """Return the shapes of the tensors in a state of torch's form, by parameter and key; None for
    values that are no tensors.

    The result is empty if the state has a form of its own.
    """
    entries = state.get("state") if isinstance(state, Mapping) else None
    if not isinstance(entries, Mapping) or not all(
        isinstance(entry, Mapping) for entry in entries.values()
    ):
        return {}
    return {
        index: {
            key: list(v.shape) if isinstance(v, torch.Tensor) else None for key, v in entry.items()
        }
        for index, entry in entries.items()
    }


def check_value_shapes(found: Mapping[Any, Shapes], saved: Mapping[Any, Shapes], what: str) -> None:
    """Raise :class:`CheckpointError` if values in a state have other shapes than when it was saved,
    or are not there.

    Both arguments are shapes by parameter and key. Errors name the parameter after ``what``. A
    parameter may have no values at all, because a program may start its moments anew.
    """
    for name, values in found.items():
        for key in saved.get(name, {}) if values else ():
            here, then = (_in_words(shapes, key) for shapes in (values, saved[name]))
            if here != then:
                raise CheckpointError(
                    f"The state {what}{name!r} has {here} as {key}, and when it was saved it had"
                    f" {then}: it was changed or damaged."
                )


def _in_words(shapes: Shapes, key: str) -> str:
    if key not in shapes:
        return "nothing"
    shape = shapes[key]
    return f"a tensor of shape {tuple(shape)}" if shape else "a number"


def with_all_options(optimizer: ManagedOptimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state``; options that its groups lack, because another library or version wrote it,
    are those of ``optimizer``.
    """
    groups = [
        {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            **saved,
        }
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
    ]
    return {**state, "param_groups": groups}


def _check_form(state: Any) -> None:
    if not isinstance(state, Mapping) or "state" not in state or "param_groups" not in state:
        found = (
            f"has {sorted(map(str, state))}"
            if isinstance(state, Mapping)
            else f"is a {type(state).__name__}"
        )
        raise CheckpointError(
            f"A state of an optimizer has 'state' and 'param_groups', and this one {found}. Pass on"
            " every rank what state_dict() or state_dict(gather=True) returned on it."
        )


def _entries(
    optimizer: ManagedOptimizer, state: Mapping[str, Any]
) -> Iterator[tuple[torch.nn.Parameter, Mapping[str, Any]]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for p, index in zip(params, indices, strict=True):
        yield p, state["state"].get(index, {})


def _other_names(group: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    here, there = list(group.get("param_names", ())), list(saved.get("param_names", ()))
    if not here or not there or here == there:
        return None
    return f"has the parameters {', '.join(there)}, and here it has {', '.join(here)}"


def _other_shapes(shapes: Mapping[str, torch.Size | None], shape: torch.Size) -> str | None:
    for key, found in shapes.items():
        if found and found != shape:
            return f"has {key} of shape {tuple(found)}, and the parameter here has {tuple(shape)}"
    return None
