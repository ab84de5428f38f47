"""``cells``: the cases of a test that runs on ranks, all in one start of the ranks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import PrefixStore, Store

from bmt_core.run import runtime
from bmt_core.run.runtime import current
from bmt_testing.rank_process import _end_job

Test = Callable[..., None]


def cells(
    names: str | tuple[str, ...], values: Iterable[Any] | Callable[[int], Iterable[Any]]
) -> Callable[[Test], Test]:
    """Call the test once for each of ``values``, one cell after the other: in place of
    ``pytest.mark.parametrize(names, values)`` below ``on_ranks``, which would start the ranks for
    each cell. An error says in which cell it was raised; the cells after it are not called.

    Each cell begins as a test of its own does in a run that tests share: with the seed of the run,
    and without what the cells before it have made there. The test needs a run, so not
    ``init=None``. Several of these decorators make the grid of their values, which may be a
    function of the number of ranks.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    of_size = values if callable(values) else (lambda size, values=list(values): values)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            store = current().backend.context.store
            for number, value in enumerate(of_size(runtime.world_size())):
                if number:
                    _begin_anew(store, number)
                cell = dict(zip(listed, value if len(listed) > 1 else [value], strict=True))
                try:
                    test(**arguments, **cell)
                except Exception as error:
                    error.add_note(f"In the cell {cell}.")
                    raise

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in listed]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def _begin_anew(store: Store | None, number: int) -> None:
    """End what the cell before has made in the run, and begin the cell of this ``number``, which
    does not see what others have set in ``store``.
    """
    _end_job()
    run = current()
    if store is not None:
        own = PrefixStore(f"cell/{number}", store)
        run.backend.context = dataclasses.replace(run.backend.context, store=own)
    runtime._seed(run.settings.seed)
    run.registry.run_started(run)
