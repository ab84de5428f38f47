"""What the facade adds to the program ``bmt``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def bmt_cli_commands() -> list[click.Command]:
    """Announce ``bmt bench``, ``bmt doctor``, ``bmt memory`` and ``bmt plugins``."""
    from bmtrain._program.commands import COMMANDS

    return [each.load(name) for name, each in COMMANDS.items() if each.package == "bmt-train"]
