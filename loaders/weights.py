"""Where a checkpoint's ordinary tensors go in a model: matched and checked before any is copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantattn.errors import CheckpointError, Problem
from quantattn.quant_scales import guarded_layers, plain_path
from quantattn.scales import buffer_name

__all__ = ["WeightPlan", "destinations", "match_name", "misfit", "mismatch", "plan_weights"]

_OUTER_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")


@dataclass
class WeightPlan:
    """Which checkpoint key is copied into which tensor of the model.

    Attributes:
        targets: Checkpoint key -> name in the model.
        missing: Names in the model that no key is for.
        unexpected: Keys that the model has no place for.
        problems: Keys whose shape or dtype does not fit, and places that two keys claim.
    """

    targets: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    problems: list[Problem] = field(default_factory=list)

    def find_missing(self, places: Mapping[str, Tensor]) -> None:
        """Set `missing` to the places that no target fills; tied tensors count once."""
        filled = {id(places[name]) for name in self.targets.values()}
        self.missing = tuple(name for name, t in places.items() if id(t) not in filled)


def destinations(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name without wrappers; guarded scales are left out.

    Raises:
        CheckpointError: The weights are sharded, so that copies would be lost.
    """
    guarded = {
        f"{path}.{buffer_name(role)}".lstrip(".")
        for path, layer in guarded_layers(model).items()
        for role in layer.scale_roles
    }
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise CheckpointError(
            "model: its weights are sharded by FullyShardedDataParallel, where they cannot be"
            " written one by one; load before wrapping, or use its own state dict functions"
        )
    state = model.state_dict(keep_vars=True)
    named = {plain_path(name): t for name, t in state.items() if isinstance(t, Tensor)}
    return {name: tensor for name, tensor in named.items() if name not in guarded}


def match_name(key: str, names: Mapping[str, object]) -> str | None:
    """The model's name for a checkpoint key: the same, or one that differs by an outer prefix.

    Example:
        >>> match_name("language_model.model.norm.weight", {"model.norm.weight": 0})
        'model.norm.weight'
    """
    if key in names:
        return key
    for prefix in _OUTER_PREFIXES:
        stripped = key.removeprefix(prefix) if key.startswith(prefix) else None
        for candidate in (stripped, f"model.{stripped}"):
            if stripped is not None and candidate in names:
                return candidate
    for candidate in (f"model.{key}", f"module.{key}"):
        if candidate in names:
            return candidate
    return None


def plan_weights(
    model: nn.Module, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], str | None]]
) -> WeightPlan:
    """Match every tensor with its place and check dtype and shape; copies nothing.

    Args:
        model: The model to load into; may be on the meta device.
        tensors: Key, dtype, shape and file of each ordinary tensor.
    """
    places = destinations(model)
    plan = WeightPlan()
    claimed: dict[str, str] = {}
    unexpected = []
    for key, dtype, shape, file in tensors:
        name = match_name(key, places)
        if name is None:
            unexpected.append(key)
        elif name in claimed:
            message = f"{key!r} and {claimed[name]!r} are both for {name!r}; remove one of them"
            plan.problems.append(Problem("conflict", key, file, message))
        elif (reason := mismatch(dtype, shape, places[name])) is not None:
            plan.problems.append(misfit(key, name, reason, file))
        else:
            claimed[name] = key
            plan.targets[key] = name
    plan.find_missing(places)
    plan.unexpected = tuple(unexpected)
    return plan


def misfit(key: str, name: str, reason: str, file: str | None = None) -> Problem:
    """The problem of a stored tensor that cannot be copied into the place `name`."""
    place = "its place" if key == name else repr(name)
    return Problem("weight_mismatch", key, file, f"{key!r} does not fit {place}: {reason}")


def mismatch(dtype: torch.dtype, shape: tuple[int, ...], place: Tensor) -> str | None:
    """Why a stored tensor cannot be copied into its place; None when it can."""
    if _squeezed(shape) != _squeezed(tuple(place.shape)):
        return (
            f"got shape {list(shape)}, expected {list(place.shape)}"
            " (weights are not split here: a model for one rank of several takes its own rank's)"
        )
    quantized = dtype.itemsize == 1 or place.dtype.itemsize == 1
    if quantized and dtype != place.dtype:
        return (
            f"got {dtype}, expected {place.dtype}; build the model with layers for the checkpoint's"
            " own weights, such as quantattn.models.FP8Linear for FP8"
        )
    if dtype.is_floating_point != place.dtype.is_floating_point:
        return f"got {dtype}, expected {place.dtype}"
    return None


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
