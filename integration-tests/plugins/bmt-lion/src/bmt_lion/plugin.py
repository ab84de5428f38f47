"""What bmt asks this package."""

from __future__ import annotations

from bmt_core.plugins.hookspecs import hookimpl
from bmt_lion.lion import Lion


@hookimpl
def bmt_optimizers() -> list[type[Lion]]:
    """Announce Lion."""
    return [Lion]
