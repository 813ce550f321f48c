"""Which guarded layer of a model a scale's name means.

A layer is found by the attention module's path in the checkpoint: the same path in the model, a
path below it, or one that differs by an outer prefix. Where the model has no such path, the only
attention layer of that kind (decoder, cross-attention, draft) with that number is meant.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from quantattn.loaders.names import ScaleKind, ScaleName, Scope, parse_name
from quantattn.loaders.weights import match_name
from quantattn.quant_scales import guarded_layers, plain_path

__all__ = ["LayerIndex"]


class LayerIndex:
    """Finds the guarded layer of a model that a checkpoint's attention path means."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = guarded_layers(model)
        self._modules = {plain_path(path): None for path, _ in model.named_modules()}
        self._by_number: dict[tuple[Scope, int], list[str]] = {}
        self._below: dict[str, list[str]] = {}
        for path in self.layers:
            parents = itertools.accumulate(path.split(".")[:-1], "{}.{}".format)
            for parent in parents:
                self._below.setdefault(parent, []).append(path)
            place = _place_of(path)
            if place is not None:
                self._by_number.setdefault(place, []).append(path)

    def exact(self, key: str) -> ScaleName | None:
        """A key that is already the name of a guarded buffer of this model."""
        path, _, leaf = key.rpartition(".")
        role = leaf.removesuffix("_scale")
        name = match_name(path, self.layers) if path else ""
        if leaf == role or name not in self.layers or role not in self.layers[name].scale_roles:
            return None
        scope, layer = _place_of(name) or (Scope.DECODER, 0)
        if scope is Scope.VISION:  # a guarded layer has a cache, whatever its path is called
            scope = Scope.DECODER
        return ScaleName(key, "own", path, layer, scope, (role,), ScaleKind.MULTIPLIER)

    def find(self, name: ScaleName) -> str | None:
        """Path of the layer that a name means; None where the model has none."""
        path = self.by_path(name)
        return path if path is not None else self._by_layer_number(name)

    def by_path(self, name: ScaleName) -> str | None:
        """Path of the layer that a name means by its own path."""
        exact = match_name(name.attention, self.layers)
        if exact is not None:
            return exact
        below = self._layers_below(name)
        return below[0] if len(below) == 1 else None

    def owners(self, names: Sequence[ScaleName]) -> dict[str, ScaleName]:
        """For each layer that is meant, the first name that means it; by its path if one does."""
        owners: dict[str, ScaleName] = {}
        for find in (self.by_path, self._by_layer_number):
            for name in names:
                path = find(name)
                if path is not None:
                    owners.setdefault(path, name)
        return owners

    def decoder_layers(self) -> dict[int, str]:
        """Path of the only attention layer with each decoder layer's number."""
        paths: dict[int, list[str]] = {}
        for (scope, number), found in self._by_number.items():
            if scope is not Scope.DRAFT:
                paths.setdefault(number, []).extend(found)
        return {number: found[0] for number, found in paths.items() if len(found) == 1}

    def has_block(self, name: ScaleName) -> bool:
        """Whether the model holds the decoder layer of a name (a pipeline stage may not)."""
        block = name.attention.rpartition(".")[0]
        return match_name(block, self._modules) is not None

    def _layers_below(self, name: ScaleName) -> list[str]:
        base = match_name(name.attention, self._modules)
        return [] if base is None else self._below.get(base, [])

    def _by_layer_number(self, name: ScaleName) -> str | None:
        if name.layer is None:
            return None
        candidates = self._by_number.get((name.scope, name.layer), [])
        return candidates[0] if len(candidates) == 1 and not self._layers_below(name) else None


def _place_of(path: str) -> tuple[Scope, int] | None:
    """Kind and number of the layer at a module's path."""
    parsed = parse_name(f"{path}.k_scale") or parse_name(f"{path}.self_attn.k_scale")
    if parsed is None or parsed.layer is None:
        return None
    return parsed.scope, parsed.layer
