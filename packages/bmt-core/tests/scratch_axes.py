"""A plugin of a few lines that adds axes to the grid, as a package of parallel layers or of
pipelines would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.settings import MeshAxis, RunSettings

STAGE = MeshAxis("stage", 2, 0)
"""Ranks along it hold different layers."""
SLICE = MeshAxis("slice", 2, 100, shards_data=False)
"""Ranks along it hold slices of the same layers and see the same data."""


class ScratchAxes:
    """Adds ``axes``, in the sizes that ``axis_sizes`` asks for, if it names them."""

    def __init__(self, *axes: MeshAxis) -> None:
        self.axes = axes

    @hookimpl
    def bmt_mesh_axes(self, config: RunSettings) -> list[MeshAxis]:
        return [
            replace(axis, size=config.axis_sizes.get(axis.name, axis.size)) for axis in self.axes
        ]


def grid_with(*axes: MeshAxis, **settings: Any) -> dict[str, Any]:
    """Arguments of init_distributed() for a grid with ``axes``."""
    # Those of tp and pp would be arguments of their own.
    sizes = {axis.name: axis.size for axis in axes if axis.name not in ("tp", "pp")}
    return {"plugins": [ScratchAxes(*axes)], "axis_sizes": sizes, "timeout": 60, **settings}
