"""The hooks that this package implements."""

from __future__ import annotations

from collections.abc import Sequence

from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.plugins.protocols import Run
from bmt_core.settings import MeshAxis, RunSettings
from bmt_tp.tensor_group import AXIS, tensor_ranks


@hookimpl
def bmt_mesh_axes(config: RunSettings) -> Sequence[MeshAxis]:
    """Add the innermost axis of the grid, ``tp``: ``tp_size`` ranks that compute one model
    together, on the same data.
    """
    return [MeshAxis(AXIS, config.tp_size, 100, shards_data=False)] if config.tp_size > 1 else []


@hookimpl
def bmt_run_started(runtime: Run) -> None:
    """Look up the ranks along ``tp`` now, so that ``torch.compile`` never traces the look-up."""
    tensor_ranks()
