"""What the facade adds to the program ``bmt``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def bmt_cli_commands() -> list[click.Command]:
    """Announce ``bmt doctor``, ``bmt plugins`` and ``bmt bench``."""
    from bmtrain._program import COMMANDS

    return COMMANDS
