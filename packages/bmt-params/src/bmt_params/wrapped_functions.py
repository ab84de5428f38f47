"""Functions of torch that a run wraps. Each function here returns one that takes the wrapper
off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def call_before(owner: Any, name: str, check: Callable[..., None]) -> Callable[[], None]:
    """Call ``check`` with the arguments of each call of ``owner.name``, before it."""

    def make(function: Function) -> Function:
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return function(*args, **kwargs)

        return checked

    return _wrap(owner, name, make)


def call_after(owner: Any, name: str, change: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Call ``change(self, result)`` after each call of the method ``owner.name``."""

    def make(function: Function) -> Function:
        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(self, *args, **kwargs)
            change(self, result)
            return result

        return changed

    return _wrap(owner, name, make)


def explain_error(
    owner: Any, name: str, kind: type[Exception], explain: Callable[[Exception], str]
) -> Callable[[], None]:
    """Add the text of ``explain(error)`` to errors of ``kind`` in calls of ``owner.name``."""

    def make(function: Function) -> Function:
        def explained(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except kind as error:
                text = explain(error)
                if not text:
                    raise
                raise kind(f"{error}{text}") from None

        return explained

    return _wrap(owner, name, make)


def _wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> Callable[[], None]:
    original = vars(owner)[name]
    is_bound = isinstance(original, (classmethod, staticmethod))
    function = original.__func__ if is_bound else original
    made = functools.wraps(function)(make(function))
    wrapped = type(original)(made) if is_bound else made
    setattr(owner, name, wrapped)

    def undo() -> None:
        if vars(owner)[name] is wrapped:
            setattr(owner, name, original)

    return undo
