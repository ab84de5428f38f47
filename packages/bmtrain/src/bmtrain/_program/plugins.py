"""``bmt plugins``: list the plugins and what they offer."""

from __future__ import annotations

import click
from rich.console import Console

from bmt_core.cli.output import make_console, make_table, styled
from bmt_core.ops import by_priority
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
        offers = [
            f"{kind}: {', '.join(names)}" for kind, names in registry.names_of(info.name).items()
        ]
        cells = (
            info.name,
            info.distribution,
            info.version,
            "\n".join(info.hooks),
            "\n".join(offers),
        )
        table.add_row(*(styled(cell or "-") for cell in cells))
    console.print(table)
    _print_kernels(console, registry)
    if registry.disabled:
        console.print(styled(f"Turned off: {', '.join(registry.disabled)}"))
    problems = registry.examine()
    for problem in problems:
        console.print(styled(str(problem), "red"))
    if problems:
        raise SystemExit(1)


def _print_kernels(console: Console, registry: Registry) -> None:
    providers, owners = registry.working("kernel provider"), registry.owners("kernel provider")
    if not providers:
        return
    table = make_table(
        "Kernels, in the order in which they are asked",
        "provider",
        "plugin",
        "device",
        "priority",
        "operations",
    )
    for provider in by_priority(providers.values()):
        operations = ", ".join(provider.operations())
        cells = (
            provider.name,
            owners[provider.name],
            provider.device_type,
            str(provider.priority),
            operations or "-",
        )
        table.add_row(*map(styled, cells))
    console.print(table)
