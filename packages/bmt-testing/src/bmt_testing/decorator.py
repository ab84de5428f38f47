"""``on_ranks``: a decorator for tests whose body runs on several ranks."""

from __future__ import annotations

import functools
import importlib
import inspect
import marshal
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any, TypeVar

from bmt_core.torch_internals import code_of, set_code
from bmt_testing.job import FunctionReference, pickled
from bmt_testing.outcome import RankFailure
from bmt_testing.pool import GRACE, rank_pool

Test = TypeVar("Test", bound=Callable[..., None])

_RANKS = "world_size"
_NO_SETTINGS: Mapping[str, Any] = {}


def on_ranks(
    *world_sizes: int,
    timeout: float = 60.0,
    grace: float = GRACE,
    env: Mapping[str, str] | None = None,
    init: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = _NO_SETTINGS,
    own_run: bool = False,
) -> Callable[[Test], Test]:
    """Run a test function on the ranks themselves, once for each number of ranks
    in ``world_sizes``.

    The function is at the top level of its module. Its arguments, parameters and fixtures of
    pytest, are sent to the ranks, so they must be picklable; the argument ``world_size`` is the
    number of ranks. The options are those of :meth:`RankPool.run`; ``init`` may be a function of
    the number of ranks, and of arguments of the test by their names after it. The test is skipped
    if a rank calls ``pytest.skip`` and no other rank fails.

    With ``pytest --pdb`` the first rank that fails opens the debugger in the terminal, and no time
    limit ends it.
    """
    import pytest  # the ranks of `run_ranks` do without

    from bmt_testing import rank_debugger

    if not world_sizes or not all(isinstance(size, int) for size in world_sizes):
        raise TypeError(
            f"on_ranks takes numbers of ranks, such as @on_ranks(1, 2), and got {world_sizes}."
        )

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters
        takes_size = _RANKS in parameters

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            size = arguments[_RANKS] if takes_size else arguments.pop(_RANKS)
            debugs = rank_debugger.is_wanted and rank_debugger.has_terminal()
            with TemporaryDirectory() if debugs else nullcontext() as folder:
                outcomes = rank_pool(size).outcomes(
                    _run_body,
                    FunctionReference.to(run),
                    _rewritten_code(test),
                    {name: _pickled(test, name, value) for name, value in arguments.items()},
                    folder,
                    timeout=rank_debugger.A_DAY if debugs else timeout,
                    grace=rank_debugger.A_DAY if debugs else grace,
                    env=env,
                    init=_settings(init, size, arguments) if callable(init) else init,
                    own_run=own_run,
                )
            failed = [outcome for outcome in outcomes if outcome.failed]
            if {outcome.error_type for outcome in failed} == {pytest.skip.Exception.__name__}:
                pytest.skip(failed[0].error_message)
            if failed:
                report = str(RankFailure(test.__qualname__, outcomes))
                if debugs:
                    raise rank_debugger.FailedAndDebugged(report, pytrace=False)  # type: ignore[call-arg]
                if rank_debugger.is_wanted:
                    report += (
                        "\n\n--pdb opened no debugger on a rank, because there is no terminal"
                        f" ({rank_debugger.TERMINAL}): start pytest in one."
                    )
                pytest.fail(report, pytrace=False)  # it has the tracebacks of the ranks

        size = inspect.Parameter(_RANKS, inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters.values(), *([] if takes_size else [size])]
        )
        ids = [f"{size}ranks" for size in world_sizes]
        decorated: Test = pytest.mark.parametrize(_RANKS, world_sizes, ids=ids)(run)
        return decorated

    return decorate


def _settings(
    init: Callable[..., Mapping[str, Any]], world_size: int, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    _, *names = inspect.signature(init).parameters
    return init(world_size, **{name: arguments[name] for name in names if name in arguments})


def _rewritten_code(test: Callable[..., None]) -> tuple[bytes, dict[str, str]]:
    """Return the code of ``test`` and the names of the modules that pytest has added to it, by what
    the code calls them.

    Pytest has rewritten the asserts, so that they tell their values. The ranks import the module as
    it is in the file.
    """
    function = inspect.unwrap(test)
    assert isinstance(function, FunctionType)
    added = {
        name: value.__name__ for name, value in function.__globals__.items() if name.startswith("@")
    }
    return marshal.dumps(code_of(function)), added


def _run_body(
    reference: FunctionReference,
    code: tuple[bytes, dict[str, str]],
    arguments: dict[str, bytes],
    debug_folder: str | None,
) -> None:
    test: Any = reference.resolve().__wrapped__  # type: ignore[attr-defined]
    function: Any = inspect.unwrap(test)
    set_code(function, marshal.loads(code[0]))
    for name, module in code[1].items():
        function.__globals__[name] = importlib.import_module(module)
    try:
        result = test(**{name: pickle.loads(value) for name, value in arguments.items()})
    except Exception as error:  # no skip, which is none
        if debug_folder is not None:
            from bmt_testing.rank_debugger import debug_if_first

            debug_if_first(error, debug_folder)
        raise
    if result is not None:
        raise TypeError(
            f"{test.__qualname__} returned {result!r}. A test returns nothing: assert what holds."
        )


def _pickled(test: Callable[..., None], name: str, value: object) -> bytes:
    try:
        return pickled(value)
    except Exception as error:
        raise TypeError(
            f"The argument {name!r} of {test.__qualname__} cannot be sent to the ranks: {error}."
            " Use parameters and fixtures that can be pickled, such as tmp_path, or call run_ranks"
            " in the test."
        ) from error
