"""The old path of ``bmt_checkpoint``, for one release."""

from typing import Any

from bmt_core.moved_modules import moved_attribute


def __getattr__(name: str) -> Any:
    return moved_attribute(__name__, "bmt_checkpoint", name)
