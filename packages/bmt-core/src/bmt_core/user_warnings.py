"""``warn_user``: a warning that shows the user's line, however deep inside of torch and bmt it
was found.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from bmt_core.packages import advice_on_missing

_LIBRARIES = ("torch", "bmtrain", "contextlib", "functools", "runpy")


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the place of the innermost caller outside of torch and bmt's packages."""
    outermost = frame = sys._getframe(1)
    while is_of_library(frame) and frame.f_back is not None:
        frame = frame.f_back
    user = outermost if is_of_library(frame) else frame
    names = user.f_globals
    warnings.warn_explicit(
        text + advice_on_missing(text),
        category,
        user.f_code.co_filename,
        user.f_lineno,
        module=names.get("__name__"),
        registry=names.setdefault("__warningregistry__", {}),
    )


def is_of_library(frame: FrameType) -> bool:
    """Whether ``frame`` is a call inside of torch, bmt's packages or what they are called by."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _LIBRARIES or package.startswith("bmt_")
