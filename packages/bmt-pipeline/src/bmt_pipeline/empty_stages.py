"""``check_for_layers_on_stages``: notices a run with ``pipe_size`` whose model has nothing on
the stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import Runtime, current
from bmt_params.models_of_run import CallEnd
from bmt_params.parameter_holders import own_axes
from bmt_pipeline.pipeline_ranks import AXIS, num_stages


class _Stages:
    """Whether the run has layers on its stages."""

    def __init__(self, runtime: Runtime) -> None:
        self.have_layers = False


def note_layers_on_stages() -> None:
    """Say that the current run has layers on its stages."""
    current().state(_Stages).have_layers = True


def check_for_layers_on_stages(module: nn.Module) -> CallEnd:
    """Raise :class:`ConfigError` on every rank if the call of ``module`` begins a training that
    uses no stages.

    One of ``ModelsOfRun.at_calls``. Any layer on a stage, of this module or another, ends the
    search.
    """
    if not current().state(_Stages).have_layers and torch.is_grad_enabled():
        parameters = list(module.parameters())
        if AXIS in own_axes(parameters):
            note_layers_on_stages()
        elif any(parameter.requires_grad for parameter in parameters):
            raise ConfigError(
                f"The run has {num_stages()} stages, and {type(module).__name__} is trained without"
                " layers on them: every rank would compute all of it. Put its layers into a"
                " PipelineTransformerBlockList before it is called, or leave out pipe_size."
            )
    return _ignore


def _ignore(read: Sequence[torch.Tensor] | None) -> None:
    pass
