"""How commands print tables: a row is a line, however wide, so that it can be copied and found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["print_table"]

WIDEST = 10_000
"""Columns that a table may take; a terminal that is narrower breaks its lines."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text under column titles, which are bold on a terminal."""
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=WIDEST, highlight=False, markup=False, emoji=False).print(table)
