"""``explain_keywords``: calls with a keyword argument that a function does not have say which
one is near.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def explain_keywords(**instead: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator whose function raises ``TypeError`` with the near argument for one that it
    does not have.

    ``instead``: arguments of other libraries, with the name that they have here, or a sentence.

    >>> @explain_keywords(stage="zero_level")
    ... def start(seed: int = 0, zero_level: int = 3) -> None: ...
    >>> start(stage=2)
    Traceback (most recent call last):
    TypeError: start() got an unexpected keyword argument 'stage'. Did you mean zero_level? Its
    arguments: seed, zero_level.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if not kwargs.keys() <= names:
                check_keywords(function, kwargs, instead)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_keywords(
    function: Callable[..., Any], given: Iterable[str], instead: Mapping[str, str]
) -> None:
    """Raise ``TypeError`` if ``function`` does not take one of the keyword arguments ``given``:
    see :func:`explain_keywords`.
    """
    parameters = inspect.signature(function).parameters
    if any(each.kind == each.VAR_KEYWORD for each in parameters.values()):
        return
    known = [name for name in parameters if name != "self"]
    for name in given:
        if name in known:
            continue
        near = instead.get(name) or next(iter(get_close_matches(name, known, n=1)), "")
        hint = f" Did you mean {near}?" if near in known else f" {near}" if near else ""
        called = function.__qualname__.removesuffix(".__init__")
        raise TypeError(
            f"{called}() got an unexpected keyword argument {name!r}.{hint} Its arguments:"
            f" {', '.join(known)}."
        )
