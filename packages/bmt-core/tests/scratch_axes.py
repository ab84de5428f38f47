"""A plugin of a few lines that adds axes to the grid, as a package of parallel layers or of pipelines would."""

from __future__ import annotations

from typing import Any

from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.settings import MeshAxis, RunSettings

STAGE = MeshAxis("stage", 2, 0)
"""Ranks along it hold different layers."""
SLICE = MeshAxis("slice", 2, 100, shards_data=False)
"""Ranks along it hold slices of the same layers and see the same data."""


class ScratchAxes:
    """Adds ``axes``."""

    def __init__(self, *axes: MeshAxis) -> None:
        self.axes = axes

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return list(self.axes)


def grid_with(*axes: MeshAxis, **settings: Any) -> dict[str, Any]:
    """Arguments of init_distributed() for a grid with ``axes``."""
    return {"plugins": [ScratchAxes(*axes)], "timeout": 60, **settings}
