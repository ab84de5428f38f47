"""``run_cells``: the cells of a grid of tests in one run of ranks, which is started once for all of
them; ``each_cell`` for the body of a test that is on ranks already.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bmt_core.run.runtime import current, is_initialized
from bmt_testing import run_ranks
from bmt_testing.job import FunctionReference, pickled


def run_cells(
    function: Callable[..., Any], ranks: int, cells: Iterable[Sequence[Any]], **options: Any
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Call ``function(*cell)`` for each of ``cells`` on ``ranks`` ranks, one cell after another.
    Return each cell with what every rank returned for it. ``options`` are those of ``run_ranks``.
    """
    given = list(cells)
    reference = FunctionReference.to(function)
    of_ranks = run_ranks(_on_rank, ranks, reference, pickled(given), **options)
    return list(zip(given, zip(*of_ranks, strict=True), strict=True))


def each_cell(function: Callable[..., Any], cells: Iterable[Sequence[Any]]) -> list[Any]:
    """Return ``function(*cell)`` for each of ``cells``. Each begins with the same random numbers,
    and without what others have left in the run. An error says in which cell it was raised.
    """
    state, found = torch.get_rng_state(), []
    for cell in cells:
        torch.set_rng_state(state)
        if is_initialized():
            current()._states.clear()
        try:
            found.append(function(*cell))
        except BaseException as error:
            error.add_note(f"In the cell {tuple(cell)!r}.")
            raise
    return found


def _on_rank(reference: FunctionReference, cells: bytes) -> list[Any]:
    # The cells may have objects of the function's module, which is imported first.
    function = reference.resolve()
    return each_cell(function, pickle.loads(cells))
