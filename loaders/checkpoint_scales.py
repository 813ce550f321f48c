"""The scales of an open checkpoint: what its files declare, and what its keys hold."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantattn.errors import Problem
from quantattn.loaders.checkpoint import Checkpoint
from quantattn.loaders.collect import FoundScales, ScaleKey, collect_scales
from quantattn.loaders.declaration import DECLARATION_FILES, Declaration, read_declaration
from quantattn.loaders.layer_index import LayerIndex
from quantattn.loaders.names import ScaleKind, ScaleName, parse_name
from quantattn.loaders.values import ReadContext

__all__ = ["UNDECLARED", "checkpoint_warnings", "declared_by", "read_scales", "scale_name"]

UNDECLARED = ReadContext(kv="fp8_e4m3")
"""Where no config says anything, the names are taken at their word."""

_LARGEST_SCALE_BYTES = 1 << 20
# Names under which tools leave KV scales beside a checkpoint.
_SCALE_FILES = (
    "kv_cache_scales.json",
    "kv_cache_scale.json",
    "kv_cache_calib.json",
    "kv_scales.json",
)


def declared_by(checkpoint: Checkpoint) -> tuple[Declaration, ReadContext]:
    """What the JSON files say; where there are none, what the names say is taken at its word."""
    files = {name: checkpoint.json(name) for name in DECLARATION_FILES}
    declaration = read_declaration(files)
    has_config = any(content is not None for content in files.values())
    return declaration, declaration.read_context() if has_config else UNDECLARED


def read_scales(
    checkpoint: Checkpoint,
    context: ReadContext,
    index: LayerIndex | None = None,
    places: Mapping[str, Tensor] | None = None,
) -> tuple[FoundScales, list[str]]:
    """Read every scale of a checkpoint; also give the keys that are ordinary tensors."""
    scale_keys = []
    weight_keys = []
    for key, info in checkpoint.tensors.items():
        name = scale_name(key, index, places or {})
        if name is None:
            weight_keys.append(key)
        else:
            scale_keys.append(ScaleKey(name, info.file, functools.partial(_read, checkpoint, key)))
    found = collect_scales(scale_keys, context)
    return found, [*weight_keys, *found.left_to_linear]


def _read(checkpoint: Checkpoint, key: str) -> Tensor:
    """A scale's tensor; only its shape where it is far too large for one."""
    info = checkpoint.tensors[key]
    if info.nbytes > _LARGEST_SCALE_BYTES:
        return torch.empty(info.shape, dtype=info.dtype, device="meta")
    return checkpoint.read(key)


def scale_name(
    key: str, index: LayerIndex | None, places: Mapping[str, Tensor]
) -> ScaleName | None:
    """The scale that a key names; None for a weight, or where the model has that very name."""
    exact = None if index is None else index.exact(key)
    if exact is not None or key in places:
        return exact
    name = parse_name(key)
    if name is None or name.kind is ScaleKind.OUT_ALIAS:
        return None
    if name.layer is None and index is not None and index.find(name) is not None:
        return replace(name, layer=0)  # a model of one unnumbered layer
    return name


def checkpoint_warnings(
    checkpoint: Checkpoint, declaration: Declaration, ignored: Iterable[Problem]
) -> list[str]:
    """What a user of this checkpoint should know, beside its problems."""
    warnings = [
        f"{file}: not read, because no index lists it and other files hold the weights"
        for file in checkpoint.unlisted_files
    ]
    warnings += [
        f"{file}: a file of KV scales, which was not read; load_kv_scales reads it"
        for file in _SCALE_FILES
        if (checkpoint.root / file).is_file()
    ]
    undeclared = [p.key for p in ignored if p.code == "kv_not_declared"]
    if undeclared:
        warnings.append(
            f"{len(undeclared)} scale keys ({undeclared[0]}, ...) were left aside: the config"
            " declares no quantized KV cache"
        )
    if declaration.kv_measured == "pre_rope":
        warnings.append(
            "the k scales were measured before RoPE and k_norm (kv_cache_post_rope is false): on a"
            " model with k_norm they can be several times too small"
        )
    return warnings
