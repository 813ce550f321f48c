"""Bring a model to the device it is loaded on: off the meta device, or from another one."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["materialize"]


def materialize(model: nn.Module, device: torch.device | str | None, *, loaded: set[str]) -> None:
    """Move a model to a device; what is on the meta device gets memory there.

    Tensors that stay tied are tied again. A module with a materialised tensor that the checkpoint
    does not fill is initialised by its own `reset_parameters`, if it has one.

    Args:
        model: The model, changed in place.
        device: Where it is to be; None: where it is, the CPU for what is on meta.
        loaded: Names of the tensors that the checkpoint is about to fill.
    """
    if device is not None and not _on_meta(model):
        model.to(device)
        return
    ties = _ties(model)
    for path, module in model.named_modules():
        own = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        on_meta = {name for name, tensor in own.items() if tensor.is_meta}
        if on_meta:
            module.to_empty(device=device or "cpu", recurse=False)
            if any(f"{path}.{name}".lstrip(".") not in loaded for name in on_meta):
                _initialise(module)
    for owner, name, first_owner, first_name in ties:
        setattr(owner, name, getattr(first_owner, first_name))
    if device is not None:
        model.to(device)


def _initialise(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _on_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in model.parameters()) or any(t.is_meta for t in model.buffers())


def _ties(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Places that hold the same Parameter as an earlier one."""
    first: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            known = first.setdefault(id(parameter), (module, name))
            if known != (module, name):
                ties.append((module, name, *known))
    return ties
