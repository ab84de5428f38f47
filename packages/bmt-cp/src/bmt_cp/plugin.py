"""The hooks that this package implements."""

from __future__ import annotations

from collections.abc import Sequence

from bmt_core.errors import ConfigError
from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.run.runtime import Runtime
from bmt_core.settings import MeshAxis, RunSettings
from bmt_cp.context_group import AXIS
from bmt_cp.guards import CallFacts, FirstCalls
from bmt_params.models_of_run import ModelsOfRun


@hookimpl
def bmt_mesh_axes(config: RunSettings) -> Sequence[MeshAxis]:
    """Add the axis ``cp``, between ``dp`` and ``tp``: ranks that read the same batch and compute
    parts of each sequence.
    """
    size = config.axis_sizes.get(AXIS, 1)
    if size == 1:
        return []
    if config.gradients == "mean":
        raise ConfigError(
            f'cp_size={size} and gradients="mean": the losses of ranks along cp are parts of one'
            " sum, and a loop that calls loss.backward() itself cannot divide it by the tokens of"
            " all ranks. Leave gradients out, and train with an OptimManager:"
            " manager.backward(loss_sum, count=tokens)."
        )
    return [MeshAxis(AXIS, size, 75, shards_data=False, splits_sum=True)]


@hookimpl
def bmt_run_started(runtime: Runtime) -> None:
    """Note the number of ranks along ``cp``, and look at the first call of each model."""
    CallFacts.ranks = runtime.topology.axis_size(AXIS)
    runtime.at_shutdown.append(lambda: setattr(CallFacts, "ranks", 1))
    if CallFacts.ranks > 1:
        runtime.state(ModelsOfRun).at_calls.append(FirstCalls().begin)
