"""The torch.library fragment that all operations are declared in: `torch.ops.quantattn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["MULTIPLYING", "by_capability", "register"]

LIBRARY = torch.library.Library("quantattn", "DEF")

MULTIPLYING: set[str] = set()
"""Operations that multiply tiles, which Triton does on GPUs of compute capability 8.0 and later."""


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    multiplies: bool = False,
) -> None:
    """Declare one operation and its implementations.

    No device falls back to another's implementation, but older GPUs in what `multiplies`: there
    plain torch serves, as `quantattn.ops.support` says.
    """
    name = schema.partition("(")[0]
    # Nothing here has a gradient; plain torch would tie every page to the graph of what it stored.
    plain = torch.no_grad()(cpu)
    if multiplies:
        MULTIPLYING.add(name)
        cuda = by_capability(cuda, plain)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, plain, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"quantattn::{name}", fake, lib=LIBRARY)


def by_capability(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Choose between a kernel that multiplies tiles and plain torch, by the first tensor's GPU."""

    def run(*arguments: Any) -> Any:
        return (kernel if _multiplies(arguments[0].device) else plain)(*arguments)

    return run


@cache
def _multiplies(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
