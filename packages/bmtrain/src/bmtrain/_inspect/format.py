"""Summaries as text, and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bmtrain._inspect.statistics import Statistics

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")


def format_summary(summary: Sequence[Statistics]) -> str:
    """Return ``summary``, a list of dicts as :func:`inspect_model` returns it, as a text table of
    BMTrain's layout.

    The name column is 4 characters wider than the longest name, the shape column is 20 wide,
    others 10. Longer texts are cut; floats have four decimals; a key that a dict lacks gives an
    empty cell.
    """
    longest = max(len(_text(item.get("name", "name"))) for item in [{}, *summary])
    widths = [longest + 4, 20, *[10] * (len(_COLUMNS) - 2)]
    rows = [_COLUMNS, *[[_text(item.get(column, "")) for column in _COLUMNS] for item in summary]]
    return "\n".join(
        "".join(f" {cell}"[:width].ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def summary_table(summary: Sequence[Statistics], title: str = "") -> Table:
    """Return ``summary`` as a table of rich, which cuts nothing:
    ``rich.print(summary_table(inspect_model(model, "*")))``.
    """
    from rich.table import Table  # here: training imports this package, and needs no tables

    table = Table(title=title or None)
    for column in _COLUMNS:
        table.add_column(
            column, overflow="fold", justify="left" if column in ("name", "shape") else "right"
        )
    for item in summary:
        table.add_row(*[_text(item.get(column, "")) for column in _COLUMNS])
    return table


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
