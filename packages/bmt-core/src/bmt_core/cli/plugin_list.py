"""``bmt plugins``: list the plugins and what they offer."""

from __future__ import annotations

import click

from bmt_core.cli.output import make_console, make_table, styled
from bmt_core.plugins import Registry


@click.command()
def plugins() -> None:
    """List the plugins and what each one offers.

    Exit status 1 when one does not work.
    """
    registry = Registry.load_what_works()
    console = make_console()
    table = make_table("Plugins", "plugin", "package", "version", "hooks", "offers")
    for info in registry.describe():
        offers = [f"{kind}: {', '.join(names)}" for kind, names in registry.names_of(info.name).items()]
        cells = (info.name, info.distribution, info.version, "\n".join(info.hooks), "\n".join(offers))
        table.add_row(*(styled(cell or "-") for cell in cells))
    console.print(table)
    if registry.disabled:
        console.print(styled(f"Turned off: {', '.join(registry.disabled)}"))
    problems = registry.examine()
    for problem in problems:
        console.print(styled(str(problem), "red"))
    if problems:
        raise SystemExit(1)
