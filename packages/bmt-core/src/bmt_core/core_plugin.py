"""Core's own plugin: it enters by the same door as third parties.

Everything is imported when asked for, because the registry is loaded before the parts that are announced here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from bmt_core.checkpoint import CheckpointFormat
    from bmt_core.comm.protocols import CommBackend


@hookimpl
def bmt_comm_backends() -> list[type[CommBackend]]:
    """Announce the process groups of ``torch.distributed``."""
    from bmt_core.comm.torch_backend import TorchBackend

    return [TorchBackend]


@hookimpl
def bmt_checkpoint_formats() -> list[type[CheckpointFormat]]:
    """Announce files of ``torch.save``."""
    from bmt_core.checkpoint import TorchFormat

    return [TorchFormat]


@hookimpl
def bmt_cli_commands() -> list[click.Command]:
    """Announce ``bmt doctor``, ``bmt plugins`` and ``bmt bench``."""
    from bmt_core.cli import COMMANDS

    return COMMANDS
