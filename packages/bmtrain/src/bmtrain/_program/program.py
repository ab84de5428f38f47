"""The click program ``bmt``: its own commands and those of plugins.

``bmt --help`` and ``bmt --version`` take a fraction of a second, because nothing here imports
bmt_core, which imports torch, before a command is called. A plugin of another package is loaded
when a command is called that no package of bmt has.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from bmtrain._program.commands import COMMANDS, foreign_plugins, installed_commands

if TYPE_CHECKING:
    from bmt_core.plugins import Registry


class Program(click.Group):
    """A click group of bmt's commands, which asks plugins for others. Its own work even if plugins
    are broken.
    """

    @cached_property
    def _registry(self) -> Registry:
        from bmt_core.plugins import Registry

        return Registry.load_what_works()

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Begin a call of the program, with the plugins that are installed and turned on now."""
        self.__dict__.pop("_registry", None)
        return super().make_context(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands of bmt's packages."""
        return sorted(installed_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command of bmt's packages, or of another plugin, which cannot replace them."""
        if cmd_name in installed_commands():
            return COMMANDS[cmd_name].load(cmd_name)
        return self._registry.working("command").get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. If there is none, the error suggests the closest name."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            raise click.UsageError(self._unknown(ctx, name), ctx)
        return super().resolve_command(ctx, args)

    def _unknown(self, ctx: click.Context, name: str) -> str:
        from bmt_core.errors import unknown_name
        from bmt_core.packages import install_hint

        known = sorted({*self.list_commands(ctx), *self._registry.working("command")})
        groups = [(outer, self.get_command(ctx, outer)) for outer in known]
        within = [
            outer
            for outer, group in groups
            if isinstance(group, click.Group) and name in group.commands
        ]
        nearest = f" Did you mean 'bmt {within[0]} {name}'?" if within else ""
        broken = " Some plugins do not work: see bmt doctor." if self._registry.examine() else ""
        return unknown_name("command", name, known) + nearest + install_hint(name) + broken

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them, then the plugins that may have others."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.help) for name, each in sorted(installed_commands().items())]
            )
        if others := foreign_plugins():
            with formatter.section("Plugins of other packages, whose commands bmt plugins lists"):
                formatter.write_text(", ".join(others))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Of bmt's own errors print only the message, and exit with status 2."""
        from bmt_core.errors import BmtError

        try:
            return super().invoke(ctx)
        except BmtError as error:
            raise _CannotWork(str(error)) from error


class _CannotWork(click.ClickException):
    exit_code = 2  # as click has for wrong options


main = Program(
    name="bmt",
    help="Look at an installation of bmt, measure it, and plan trainings.\n\n"
    "Exit status: 0 nothing is wrong, 1 the command found something wrong, 2 it could not do its"
    " work.",
)
click.version_option(package_name="bmt-core", prog_name="bmt")(main)
