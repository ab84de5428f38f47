"""Tables and coloured text on the terminal, and wide plain text where there is no terminal."""

from __future__ import annotations

import shutil
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_WITHOUT_TERMINAL = 200


def make_console(*, stderr: bool = False) -> Console:
    """Return a console on standard output (or error) as it is now."""
    stream = sys.stderr if stderr else sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def make_table(title: str, *columns: str) -> Table:
    """Return an empty table; every column wraps and none is cut."""
    table = Table(title=title, title_justify="left", show_header=bool(any(columns)))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def styled(text: str, style: str = "") -> Text:
    """Return ``text`` in ``style``. Square brackets in it are not markup, as they are in a
    plain string.
    """
    return Text(text, style=style)
