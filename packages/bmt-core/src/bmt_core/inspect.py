"""The old path of ``bmtrain.inspect`` and of ``BatchParts``, for one release."""

from typing import Any

from bmt_core.moved_modules import moved_attribute


def __getattr__(name: str) -> Any:
    return moved_attribute(
        __name__,
        "bmt_core.modules.batch_parts" if name == "BatchParts" else "bmtrain.inspect",
        name,
    )
