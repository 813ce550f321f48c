"""`quantattn doctor`: what this machine has, and what would run each operation on it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from quantattn.cli.tables import print_table

__all__ = ["doctor_command"]


def doctor_command() -> None:
    """Show versions, devices, and which kernel each operation and cache format would use here."""
    import torch

    from quantattn.ops.support import DEVICES, device_row, support_table

    typer.echo(f"quantattn: {_version('quantattn')}")
    typer.echo(f"python: {platform.python_version()} on {platform.system()} {platform.machine()}")
    typer.echo(f"torch: {torch.__version__}")
    typer.echo(f"triton: {_version('triton')}")
    devices = ["cpu"]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        typer.echo(f"cuda:{index}: {name}, compute capability {major}.{minor}")
        row = device_row(major, minor)
        if row is None:
            made_for = ", ".join(name for name in DEVICES if name != "cpu")
            typer.echo(
                f"  no kernel is made for it, but for {made_for}: use one of those, or the CPU"
            )
        elif row not in devices:
            devices.append(row)
    if devices == ["cpu"]:
        typer.echo("cuda: torch finds no device")
    typer.echo()
    table = [row for row in support_table() if row.device in devices]
    print_table(
        ("operation", "cache", "device", "kernel"),
        [
            (
                row.operation,
                row.kv_cache_dtype or "-",
                row.device,
                row.runs or f"none: {row.reason}",
            )
            for row in table
        ],
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
