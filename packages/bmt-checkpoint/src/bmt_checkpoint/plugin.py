"""What bmt-checkpoint adds to a run: formats of files, and the command ``bmt checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import click

    from bmt_checkpoint.format import CheckpointFormat


@hookimpl
def bmt_checkpoint_formats() -> list[type[CheckpointFormat]]:
    """Announce files of ``torch.save`` and of safetensors, and directories of
    ``torch.distributed.checkpoint``.
    """
    from bmt_checkpoint import DcpFormat, SafetensorsFormat, TorchFormat

    return [TorchFormat, SafetensorsFormat, DcpFormat]


@hookimpl
def bmt_cli_commands() -> list[click.Command]:
    """Announce ``bmt checkpoint``."""
    from bmt_checkpoint.cli import checkpoint

    return [checkpoint]
