"""What bmt-params does at the start and the end of a run.

The functions import what they need, because the registry is loaded before these modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from bmt_core.run.runtime import Runtime


@hookimpl
def bmt_run_started(runtime: Runtime) -> None:
    """Prepare torch for distributed parameters: fast optimizers accept them, DDP, FSDP and others
    refuse them, plain loops warn.
    """
    from bmt_core.torch_internals import register_foreach_type
    from bmt_params.guards.elementwise import check_steps
    from bmt_params.guards.refused_functions import refuse_torch_functions
    from bmt_params.parameter import DistributedParameter

    register_foreach_type(DistributedParameter)
    refuse_torch_functions(runtime)
    check_steps(runtime)


@hookimpl
def bmt_run_stopping(runtime: Runtime) -> None:
    """Leave torch as it was before the run."""
    from bmt_core.torch_internals import unregister_foreach_type
    from bmt_params.parameter import DistributedParameter

    unregister_foreach_type(DistributedParameter)
