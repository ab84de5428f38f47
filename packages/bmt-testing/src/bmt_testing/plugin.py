"""What bmt-testing adds to the program ``bmt``: the command ``bmt verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def bmt_cli_commands() -> list[click.Command]:
    """Announce ``bmt verify``."""
    from bmt_testing.verify_command import verify

    return [verify]
