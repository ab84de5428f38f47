"""The plugin of bmt-watch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bmt_core.comm.observer import ObserverContext, RunObserver
from bmt_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def bmt_run_observer(context: ObserverContext) -> RunObserver | None:
    """Watch the calls of the run, unless it is not to be watched."""
    from bmt_watch.observer import observer_of

    return observer_of(context)


@hookimpl
def bmt_cli_commands() -> list[click.Command]:
    """Announce ``bmt hang``."""
    from bmt_watch.hang import hang

    return [hang]
