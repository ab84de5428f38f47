"""The hooks that this package implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.runtime import Runtime
from bmt_core.settings import MeshAxis, RunSettings
from bmt_params.models_of_run import ModelsOfRun
from bmt_pipeline.empty_stages import check_for_layers_on_stages
from bmt_pipeline.pipeline_ranks import AXIS

if TYPE_CHECKING:
    import click


@hookimpl
def bmt_mesh_axes(config: RunSettings) -> Sequence[MeshAxis]:
    """Add the outermost axis of the grid, ``pp``: ``pipe_size`` stages that compute one
    model together.
    """
    return [MeshAxis(AXIS, config.pipe_size, 0)] if config.pipe_size > 1 else []


@hookimpl
def bmt_cli_commands() -> Sequence[click.Command]:
    """Add ``bmt pipeline-plan``."""
    from bmt_pipeline.cli import pipeline_plan  # a training needs no terminal

    return [pipeline_plan]


@hookimpl
def bmt_run_started(runtime: Runtime) -> None:
    """Look for layers on the stages when a model is called, and send what it writes to buffers
    outside of them.
    """
    if runtime.topology.axis_size(AXIS) > 1:
        # Runs without stages need none of this.
        from bmt_pipeline.outside_buffers import send_written_buffers

        at_calls = runtime.state(ModelsOfRun).at_calls
        at_calls += [check_for_layers_on_stages, send_written_buffers]
