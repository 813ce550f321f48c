"""How commands print tables: a row is a line, however wide, so that it can be copied and found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import typer

__all__ = ["print_table"]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text under column titles, every column as wide as its widest cell."""
    table = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
