"""The errors for users. Each message says what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from bmt_core.packages import advice_on_missing


class BmtError(Exception):
    """Base of every error that bmt raises on purpose."""

    def __str__(self) -> str:
        text = super().__str__()
        return text + advice_on_missing(text)


class ConfigError(BmtError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class NotInitializedError(BmtError, RuntimeError):
    """Something that needs a running bmt was used before ``init_distributed()``."""


class PluginError(BmtError):
    """A plugin is broken, unknown, offers a name that another one has, or is not the same on
    every rank.
    """


class CheckpointError(BmtError):
    """A checkpoint cannot be written, read, or does not fit the model."""


class RemoteError(BmtError, RuntimeError):
    """Another rank failed, and this one cannot go on without it."""


class CallError(RemoteError):
    """A collective cannot finish: ranks have entered different ones, or one of them has ended or
    does not come.

    Every later collective of the run raises it too.
    """


def cause_of(error: BaseException) -> str:
    """Return the class and the first sentence of ``error``, for the error text that names it as
    the cause.

    >>> cause_of(RuntimeError("failed finding central directory. This is an internal error. ..."))
    'RuntimeError: failed finding central directory'
    """
    sentence = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".,:")
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__


def unknown_name(noun: str, name: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown ``name``.

    >>> unknown_name("optimizer", "loin", ["adam", "lion"])
    "No optimizer is named 'loin'. Did you mean 'lion'? Known: adam, lion."
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"No {noun} is named {name!r}.{guess} Known: {', '.join(names) or 'none'}."
