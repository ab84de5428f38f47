"""A manager's state in a checkpoint: one whole state (of managers with ``logical_state``, such as
``OptimManager``), or a file per rank.

This module says which, and loads it; :mod:`bmt_checkpoint.training` saves it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from bmt_checkpoint.format_choice import FormatChoice
from bmt_checkpoint.loading import no_way_back
from bmt_checkpoint.random_state import data_rank_and_grid
from bmt_checkpoint.shared_reader import opened_by_all
from bmt_checkpoint.torch_file import read_torch_file
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import broadcast_object
from bmt_core.errors import BmtError, CheckpointError
from bmt_core.run.runtime import world_group
from bmt_params.state.serialization import from_bytes, to_bytes
from bmt_params.state.state_tensors import has_references, with_tensors

OPTIMIZER = "optimizer"
"""The name of the directory, or file, of the tensors in a whole state."""
NONE, LOGICAL, PER_RANK = "none", "logical", "per rank"


def kind_of(manager: Any) -> str:
    """Return how the state of ``manager`` is stored: :data:`NONE`, :data:`LOGICAL` (whole)
    or :data:`PER_RANK`.
    """
    if manager is None:
        return NONE
    logical = all(
        callable(getattr(manager, name, None)) for name in ("logical_state", "load_logical_state")
    )
    return LOGICAL if logical else PER_RANK


def rank_file(rank: int | str) -> str:
    """Return the name of the file with the state of one rank."""
    return f"optimizer-rank-{rank}.pt"


@contextmanager
def prepared_manager(
    manager: Any,
    model: nn.Module,
    folder: Path,
    head: Mapping[str, Any],
    state: Any,
    *,
    tensors: Path,
    format: FormatChoice,
) -> Iterator[Callable[[], None]]:
    """Check that the state in ``folder`` fits ``manager``, and yield the function that loads it.
    Both are collective.

    ``head`` is what ``training.pt`` says of the state, on every rank; ``state`` is the state, on
    rank 0, with names in place of tensors that lie in ``tensors``, of the ``format``. If it does
    not fit, every rank raises :class:`CheckpointError`, and the manager is as it was. A manager
    without ``check_logical_state()`` loads the state twice: here, as a check, and in the function,
    after the model was loaded, because the optimizer may keep copies of the model's weights. So
    does a manager with one state for each rank; its former state is kept in memory until the first
    load has succeeded.
    """
    group = world_group()
    what = f"loading the optimizer state of {folder}"
    with collective_section(group, what):
        _check_kind(manager, folder, head)
        own = (
            read_torch_file(folder / rank_file(group.rank))
            if manager and head["optimizer"] == PER_RANK
            else None
        )
    if manager is None:
        yield lambda: None
    elif head["optimizer"] == PER_RANK:
        yield _checked_rank_state(manager, own, what)
    elif broadcast_object(has_references(state), group):
        with opened_by_all(tensors, what, format) as shared:
            shared.verify()
            with collective_section(group, what):
                data = to_bytes(state) if group.rank == 0 else b""
            if shared.all_read:
                data = broadcast_object(data, group)
            with collective_section(group, what):
                whole = (
                    with_tensors(from_bytes(data), shared.stored)
                    if shared.reader is not None
                    else None
                )
            yield _checked_logical_state(manager, model, whole, what)
    else:
        yield _checked_logical_state(manager, model, state, what)


def _checked_rank_state(manager: Any, own: Any, what: str) -> Callable[[], None]:
    def load_own() -> None:
        with collective_section(world_group(), what), _as_checkpoint_error(manager):
            manager.load_state_dict(own)

    before = copy.deepcopy(manager.state_dict())
    try:
        load_own()
    except BmtError:
        manager.load_state_dict(before)
        raise
    return load_own


def _checked_logical_state(
    manager: Any, model: nn.Module, state: Any, what: str
) -> Callable[[], None]:
    named = list(model.named_parameters())

    def load_whole() -> None:
        with no_way_back(what, "model and optimizer are"):
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
            f"{folder} was saved without a manager, so the optimizer's state is not in it. Pass"
            " manager=None to load the rest."
        )
    if saved == LOGICAL and kind_of(manager) != LOGICAL:
        raise CheckpointError(
            f"{folder} holds the whole optimizer state, and {type(manager).__name__} has no"
            " load_logical_state(). Use the manager it was saved with (OptimManager),"
            " or manager=None."
        )
    if saved == PER_RANK and head["world_size"] != size:
        raise CheckpointError(
            f"{folder} holds the optimizer state of each of {head['world_size']} ranks, and this"
            f" run has {size}. Start {head['world_size']} ranks, or save with a manager that has"
            " logical_state(), as OptimManager has."
        )
    grid, here = head["places"][0]["grid"], data_rank_and_grid()["grid"]
    if saved == PER_RANK and grid != here:
        raise CheckpointError(
            f"{folder} holds the optimizer state of each rank of the grid {dict(grid)}, and this"
            f" run has {dict(here)}. Start ranks in that grid, or save with a manager that has"
            " logical_state(), as OptimManager has."
        )


@contextmanager
def _as_checkpoint_error(manager: Any) -> Iterator[None]:
    try:
        yield
    except BmtError:
        raise
    except Exception as error:  # what a manager raises for a state that it was not made for
        raise CheckpointError(
            f"The optimizer state does not fit this {type(manager).__name__}"
            f" ({type(error).__name__}: {error}). Use the manager it was saved with, or"
            " manager=None to load the rest."
        ) from error
