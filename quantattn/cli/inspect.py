"""`quantattn inspect`: what a checkpoint declares, its scales, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantattn.cli.tables import print_table

if TYPE_CHECKING:
    from quantattn.loaders.inspect import Inspection

__all__ = ["inspect_command"]


def inspect_command(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A folder, a .safetensors file or its index.json."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Absent and one-sided scales are problems too.")
    ] = False,
) -> None:
    """Show what a checkpoint declares, every layer's scales with their source, and every problem.

    Needs no model code. Exit status: 0 nothing is refused, 1 there are problems, 2 the checkpoint
    is unreadable or the arguments are wrong.
    """
    from quantattn.loaders.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(path, strict=strict)
    if as_json:
        typer.echo(inspection.to_json())
    else:
        _print(inspection)
    raise typer.Exit(1 if inspection.problems else 0)


def _print(inspection: Inspection) -> None:
    from quantattn.loaders.report import format_value

    if inspection.declared["kv_dtype"] is None:
        typer.echo("no quantized KV cache is declared")
    for name, value in inspection.declared.items():
        if value not in (None, ()) and name != "unsupported":  # those are among the problems
            typer.echo(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
    typer.echo()
    print_table(
        ("layer", "role", "value", "source", "key", "file", "note"),
        [
            (
                row.layer,
                row.role,
                format_value(row.value),
                row.source,
                row.key or "",
                row.file or "",
                row.note or "",
            )
            for row in inspection.layers
        ],
    )
    for title, entries in (("problem", inspection.problems), ("ignored", inspection.ignored)):
        for entry in entries:
            typer.echo(f"{title}: {entry}")
    for warning in inspection.warnings:
        typer.echo(f"warning: {warning}")
    count = len(inspection.problems)
    typer.echo("no problems" if count == 0 else f"{count} problem(s): a load would be refused")
