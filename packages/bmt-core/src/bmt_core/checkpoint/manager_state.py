"""The state of the optimizers' manager in a checkpoint: whole, in ``training.pt``, or one file per rank with that rank's part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from bmt_core.checkpoint.model_state import world_group
from bmt_core.checkpoint.torch_file import read_torch_file
from bmt_core.comm.collective_section import collective_section
from bmt_core.errors import BmtError, CheckpointError

NONE, LOGICAL, PER_RANK = "none", "logical", "per rank"


def kind_of(manager: Any) -> str:
    """Return how the state of ``manager`` is stored: :data:`NONE`, :data:`LOGICAL` (whole) or :data:`PER_RANK`."""
    if manager is None:
        return NONE
    logical = all(callable(getattr(manager, name, None)) for name in ("logical_state", "load_logical_state"))
    return LOGICAL if logical else PER_RANK


def rank_file(rank: int) -> str:
    """Return the name of the file with the state of one rank."""
    return f"optimizer-rank-{rank}.pt"


def prepare_manager(
    manager: Any, model: nn.Module, folder: Path, head: Mapping[str, Any], state: Any
) -> Callable[[], None]:
    """Find out whether the state in ``folder`` fits ``manager``, and return the function that loads it. Both are collective.

    ``head`` is what ``training.pt`` says of the state, on every rank; ``state`` is the whole state, on rank 0. If the state does
    not fit, every rank raises :class:`CheckpointError`, and the manager is as it was. A manager that has no
    ``check_logical_state()`` is told to load the state here and again by the function, when the model has been loaded: the
    optimizer may keep copies of its weights.
    """
    group = world_group()
    what = f"loading the optimizer state of {folder}"
    with collective_section(group, what):
        _check_kind(manager, folder, head)
        own = read_torch_file(folder / rank_file(group.rank)) if manager and head["optimizer"] == PER_RANK else None
    if manager is None:
        return lambda: None
    if head["optimizer"] == PER_RANK:

        def load_own() -> None:
            with collective_section(group, what), _as_checkpoint_error(manager):
                manager.load_state_dict(own)

        before = copy.deepcopy(manager.state_dict())
        try:
            load_own()
        except BmtError:
            manager.load_state_dict(before)
            raise
        return load_own

    named = list(model.named_parameters())

    def load_whole() -> None:
        with _as_checkpoint_error(manager):
            manager.load_logical_state(named, state)

    with _as_checkpoint_error(manager):
        getattr(manager, "check_logical_state", manager.load_logical_state)(named, state)
    return load_whole


def _check_kind(manager: Any, folder: Path, head: Mapping[str, Any]) -> None:
    saved, size = head["optimizer"], world_group().size
    if manager is None:
        return
    if saved == NONE:
        raise CheckpointError(
            f"{folder} was saved without a manager, so the optimizer's state is not in it. Pass manager=None to load the rest."
        )
    if saved == LOGICAL and kind_of(manager) != LOGICAL:
        raise CheckpointError(
            f"{folder} holds the whole optimizer state, and {type(manager).__name__} has no load_logical_state()."
            " Use the manager it was saved with (OptimManager), or manager=None."
        )
    if saved == PER_RANK and head["world_size"] != size:
        raise CheckpointError(
            f"{folder} holds the optimizer state of each of {head['world_size']} ranks, and this run has {size}."
            f" Start {head['world_size']} ranks, or save with a manager that has logical_state(), as OptimManager has."
        )


@contextmanager
def _as_checkpoint_error(manager: Any) -> Iterator[None]:
    try:
        yield
    except BmtError:
        raise
    except Exception as error:  # what a manager raises for a state that it was not made for
        raise CheckpointError(
            f"The optimizer state does not fit this {type(manager).__name__} ({type(error).__name__}: {error}). Use the manager it"
            " was saved with, or manager=None to load the rest."
        ) from error
