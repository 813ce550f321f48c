"""The torch.library fragment that all operations are declared in: `torch.ops.quantattn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]

LIBRARY = torch.library.Library("quantattn", "DEF")


def register(
    schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Declare one operation and its implementations; there is no fallback to another device's."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    # Nothing here has a gradient; plain torch would tie every page to the graph of what it stored.
    LIBRARY.impl(name, torch.no_grad()(cpu), "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"quantattn::{name}", fake, lib=LIBRARY)
