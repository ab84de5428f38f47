"""The cases of a test that runs on ranks, all in one start of the ranks: ``cells`` for a test below
``on_ranks``, ``run_cells`` for a function that ``run_ranks`` would call.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_testing.job import FunctionReference, pickled
from bmt_testing.rank_process import _begin_job, _end_job

Test = Callable[..., None]


def cells(
    names: str | tuple[str, ...], values: Iterable[Any] | Callable[[int], Iterable[Any]]
) -> Callable[[Test], Test]:
    """Call the test once for each of ``values``, one cell after the other: in place of
    ``pytest.mark.parametrize(names, values)`` below ``on_ranks``, which would start the ranks for
    each cell. Several of these decorators make the grid of their values, which may be a function
    of the number of ranks.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    given = values if callable(values) else list(values)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            def call(*cell: Any) -> None:
                test(**arguments, **dict(zip(listed, cell, strict=True)))

            of_ranks = given(runtime.world_size()) if callable(given) else given
            _call_each(call, [each if len(listed) > 1 else (each,) for each in of_ranks])

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in listed]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


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


def _on_rank(reference: FunctionReference, cells: bytes) -> list[Any]:
    # The cells may have objects of the function's module, which is imported first.
    function = reference.resolve()
    return _call_each(function, pickle.loads(cells))


def _call_each(function: Callable[..., Any], cells: Iterable[Sequence[Any]]) -> list[Any]:
    """Return ``function(*cell)`` for each of ``cells``. Each begins as a test of its own does: with
    the seed, and without what the cells before it have made in the run. An error says in which cell
    it was raised; the cells after it are not called.
    """
    state, found = torch.get_rng_state(), []
    for number, cell in enumerate(cells):
        if runtime.is_initialized():
            if number:
                _end_job()
                _begin_job(f"cell/{number}")
        else:
            torch.set_rng_state(state)
        try:
            found.append(function(*cell))
        except BaseException as error:
            error.add_note(f"In the cell {tuple(cell)!r}.")
            raise
    return found
