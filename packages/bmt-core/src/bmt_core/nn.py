"""The old path of ``bmtrain.nn``, for one release."""

from typing import Any

from bmt_core.moved_modules import moved_attribute


def __getattr__(name: str) -> Any:
    return moved_attribute(__name__, "bmtrain.nn", name)
