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
    """Turns what quantattn raises on purpose into a message and exit status 2."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except QuantAttnError as error:
            typer.echo(f"quantattn: {error}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Group,
    help="Quantized attention: look into checkpoints, run them, check models and this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("inspect")(inspect_command)
app.command("generate")(generate_command)
app.command("demo")(demo_command)
app.command("doctor")(doctor_command)
app.command("audit")(audit_command)


def main() -> None:
    """Run the command line and exit with its status."""
    app(prog_name="quantattn")
