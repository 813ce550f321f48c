"""`quantattn audit`: build a model and name what would go wrong with its scales."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer

from quantattn.errors import QuantAttnError

__all__ = ["audit_command"]


def audit_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE.PATH:FACTORY", help="What makes the model, called without arguments."
        ),
    ],
) -> None:
    """Call a function that makes a model, and name each scale in it that can be lost or rounded.

    Exit status: 0 nothing found, 1 findings, 2 the target makes no model.
    """
    from torch import nn

    from quantattn.audit import audit

    model = _make(target)
    if not isinstance(model, nn.Module):
        raise _bad(target, f"it made {type(model).__name__}, expected a torch.nn.Module")
    findings = audit(model)
    for finding in findings:
        typer.echo(finding)
    typer.echo(f"{len(findings)} finding(s)" if findings else "nothing found")
    raise typer.Exit(1 if findings else 0)


def _make(target: str) -> Any:
    from torch import nn

    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise _bad(target, "expected module.path:factory")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
        factory = getattr(module, name, None)
        if not callable(factory) or isinstance(factory, nn.Module):
            raise _bad(target, f"{module_name} has no function by the name {name}")
        return factory()
    except QuantAttnError:
        raise
    except (Exception, SystemExit) as error:
        raise _bad(target, f"{type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")


def _bad(target: str, reason: str) -> QuantAttnError:
    return QuantAttnError(f"audit: target {target!r}: {reason}")
