"""The `quantattn` command; a subcommand a file, which imports what it needs when it runs."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from quantattn.cli.audit import audit_command
from quantattn.cli.demo import demo_command
from quantattn.cli.doctor import doctor_command
from quantattn.cli.generate import generate_command
from quantattn.cli.inspect import inspect_command
from quantattn.errors import QuantAttnError

__all__ = ["app", "main"]


class _Group(TyperGroup):
    """Turns what quantattn raises on purpose, and a failing disk, into a message and status 2."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has seen enough: typer ends without a word
            raise
        except (QuantAttnError, OSError) as error:
            typer.echo(f"quantattn: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    help="Quantized attention: look into checkpoints, run them, check models and this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes break messages at 80 columns, in a pipe too
)
for command, summary in (
    (inspect_command, "What a checkpoint declares and holds, and what is wrong."),
    (generate_command, "Load a checkpoint and continue a prompt."),
    (demo_command, "The main job, on a checkpoint that the package carries."),
    (doctor_command, "What this machine can run, and with which kernels."),
    (audit_command, "Name the scales of a model that can be lost or rounded."),
):
    app.command(command.__name__.removesuffix("_command"), short_help=summary)(command)


def main() -> None:
    """Run the command line and exit with its status."""
    app(prog_name="quantattn")
