"""The core's own plugin, registered like those of third parties.

The functions import what they need, because the registry is loaded before these modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from bmt_core.comm.protocols import CommBackend
    from bmt_core.run.runtime import Runtime


@hookimpl
def bmt_comm_backends() -> list[type[CommBackend]]:
    """Announce the process groups of ``torch.distributed``."""
    from bmt_core.comm.torch_backend import TorchBackend

    return [TorchBackend]


@hookimpl
def bmt_run_started(runtime: Runtime) -> None:
    """Prepare torch for distributed parameters: fast optimizers accept them, DDP, FSDP and others
    refuse them, plain loops warn.
    """
    from bmt_core.modules.refused_functions import refuse_torch_functions
    from bmt_core.params.elementwise import check_steps
    from bmt_core.params.parameter import DistributedParameter
    from bmt_core.params.plain_loop_warnings import warn_of_plain_loops
    from bmt_core.torch_internals import register_foreach_type

    register_foreach_type(DistributedParameter)
    refuse_torch_functions(runtime)
    check_steps(runtime)
    warn_of_plain_loops(runtime)


@hookimpl
def bmt_run_stopping(runtime: Runtime) -> None:
    """Leave torch as it was before the run."""
    from bmt_core.params.parameter import DistributedParameter
    from bmt_core.torch_internals import unregister_foreach_type

    unregister_foreach_type(DistributedParameter)
