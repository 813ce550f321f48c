"""`model.load_state_dict(sd)` for state dicts of every known naming convention.

Every guarded layer renames the keys below its own path as it loads. Keys that lie beside it
(`self_attn.k_scale` for a layer at `self_attn.attn`) are renamed by its parent, which gets a hook
when the layer becomes its child. torch loads one module after another: what is wrong with a layer's
scales is raised before that layer changes, when layers before it have been loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from quantattn.errors import ScaleError
from quantattn.loaders.names import ScaleKind, parse_name
from quantattn.loaders.resolution import Outcome, resolve
from quantattn.loaders.values import ReadContext
from quantattn.quant_scales import QuantScales
from quantattn.scales import buffer_name

__all__ = ["install"]


# Their own hooks add or remove their part of the path.
_RENAMING_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def install() -> None:
    """Teach QuantScales modules, and the parents they will get, the names of every convention."""
    QuantScales.translate_state_dict = _translate_own
    register_module_module_registration_hook(_hook_parent)


def _hook_parent(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    child = getattr(child, "_orig_mod", child)  # what torch.compile wraps
    is_layer = isinstance(child, QuantScales) and not isinstance(parent, QuantScales)
    if is_layer and name not in _RENAMING_WRAPPERS:
        hooks = parent._load_state_dict_pre_hooks.values()
        if not any(getattr(hook, "hook", None) is _translate_below for hook in hooks):
            parent.register_load_state_dict_pre_hook(_translate_below)


def _translate_below(
    parent: nn.Module, state_dict: dict[str, Any], prefix: str, *args: object
) -> None:
    layers = [
        (path, module)
        for path, module in parent.named_modules()
        if isinstance(module, QuantScales) and module.has_scales
    ]
    if len(layers) == 1:
        ((path, layer),) = layers
        places = {prefix + name for name in parent.state_dict(keep_vars=True)}
        _translate(layer, state_dict, prefix, f"{prefix}{path}.", places)


def _translate_own(layer: QuantScales, state_dict: dict[str, Any], prefix: str) -> None:
    _translate(layer, state_dict, prefix, prefix, _places(layer, prefix))


def _translate(
    layer: QuantScales, state_dict: dict[str, Any], scope: str, own: str, places: set[str]
) -> None:
    """Replace the keys below `scope` that name this layer's scales by the layer's own names.

    Keys of `places`, which some module has a tensor for, are not touched.
    """
    guarded = {own + buffer_name(role) for role in layer.scale_roles}
    taken = places | guarded | {own + alias for alias in layer.scale_state.aliases}
    for key in [k for k in state_dict if k.startswith(scope) and k not in taken]:
        name = parse_name(f"layers.0.self_attn.{key[len(scope) :]}")
        if name is None or not isinstance(state_dict[key], Tensor):
            continue
        resolution = resolve(name, state_dict[key], _context(layer))
        if resolution.outcome is Outcome.PROBLEM and name.kind is not ScaleKind.UNKNOWN:
            message = resolution.message.replace(name.key, key)
            raise ScaleError(message, layer=layer.layer_name, key=key)
        if resolution.outcome is Outcome.IGNORED:
            del state_dict[key]
        if resolution.outcome is Outcome.VALUES:
            del state_dict[key]
            for role, value in resolution.values.items():
                place = own + buffer_name(role)
                if place in guarded:
                    _put(state_dict, place, torch.tensor(value, dtype=torch.float32), key)


def _put(state_dict: dict[str, Any], place: str, value: Tensor, key: str) -> None:
    present = state_dict.setdefault(place, value)
    if present is not value and present.flatten().tolist() != value.flatten().tolist():
        raise ScaleError(
            f"{key}: says {value.tolist()}, but {place} is already {present.tolist()}; remove one",
            key=key,
        )


def _places(layer: QuantScales, own: str) -> set[str]:
    return {own + name for name in layer.state_dict(keep_vars=True)}


def _context(layer: QuantScales) -> ReadContext:
    shape = layer.scale_shape
    return ReadContext(
        kv="fp8_e4m3",
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        is_mla=layer.scale_state.has_one_latent,
    )
