"""The core's own plugin, registered like those of third parties.

The functions import what they need, because the registry is loaded before these modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from bmt_core.comm.protocols import CommBackend
    from bmt_core.run.runtime import Runtime


@hookimpl
def bmt_comm_backends() -> list[type[CommBackend]]:
    """Announce the process groups of ``torch.distributed``."""
    from bmt_core.comm.torch_backend import TorchBackend

    return [TorchBackend]


@hookimpl
def bmt_cli_commands() -> list[click.Command]:
    """Announce ``bmt hang``."""
    from bmt_core.cli.hang import hang

    return [hang]


@hookimpl
def bmt_run_started(runtime: Runtime) -> None:
    """Have the watch of calls told of each step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if runtime.calls is not None:
        hook = register_optimizer_step_post_hook(runtime.calls.watch.end_of_step)
        runtime.at_shutdown.append(hook.remove)
