"""The click program ``bmt``: its own commands and those of plugins."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import click

from bmt_core.errors import BmtError, unknown_name
from bmt_core.packages import install_hint
from bmt_core.plugins import Registry
from bmtrain._program.bench import bench
from bmtrain._program.doctor import doctor
from bmtrain._program.plugin_list import plugins

COMMANDS: list[click.Command] = [bench, doctor, plugins]


class Program(click.Group):
    """A click group that asks plugins for commands. Its own work even if plugins are broken."""

    @cached_property
    def _registry(self) -> Registry:
        return Registry.load_what_works()

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Begin a call of the program, with the plugins that are installed and turned on now."""
        self.__dict__.pop("_registry", None)
        return super().make_context(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of its own commands and of those plugin commands that work."""
        return sorted({*self.commands, *self._registry.working("command")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one of its own commands or a plugin's."""
        return self.commands.get(cmd_name) or self._registry.working("command").get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. If there is none, the error suggests the closest name."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            unknown = unknown_name("command", name, self.list_commands(ctx))
            raise click.UsageError(
                unknown + self._within_a_group(ctx, name) + install_hint(name) + self._hint(), ctx
            )
        if doubled := self._registry.doubled("command").get(name):
            click.echo(f"Warning: {doubled}", err=True)
        return super().resolve_command(ctx, args)

    def _within_a_group(self, ctx: click.Context, name: str) -> str:
        """Return a hint at the command of that name within another one, such as
        ``bmt checkpoint inspect``; else "".
        """
        groups = [(outer, self.get_command(ctx, outer)) for outer in self.list_commands(ctx)]
        found = [
            outer
            for outer, group in groups
            if isinstance(group, click.Group) and name in group.commands
        ]
        return f" Did you mean 'bmt {found[0]} {name}'?" if found else ""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """End the help with a hint if plugins do not work."""
        if hint := self._hint().strip():
            formatter.write_paragraph()
            formatter.write_text(hint)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. For bmt's own errors, print only the message and exit with status 1."""
        try:
            return super().invoke(ctx)
        except BmtError as error:
            raise click.ClickException(str(error)) from error

    def _hint(self) -> str:
        return " Some plugins do not work: see bmt doctor." if self._registry.examine() else ""


main = Program(
    name="bmt",
    help="Look at an installation of bmt, and measure it. Packages add commands.",
    commands={command.name: command for command in COMMANDS if command.name is not None},
)
click.version_option(package_name="bmt-core", prog_name="bmt")(main)
