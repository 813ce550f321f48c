"""inspect_checkpoint: what a checkpoint declares, what scales it holds, what is wrong; no model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantattn.errors import Problem
from quantattn.loaders.checkpoint import open_checkpoint
from quantattn.loaders.checkpoint_scales import checkpoint_warnings, declared_by, read_scales
from quantattn.loaders.collect import FoundScales
from quantattn.loaders.declaration import Declaration
from quantattn.loaders.names import ScaleName, Scope, parse_name
from quantattn.loaders.report import ScaleRow
from quantattn.loaders.resolution import has_cache
from quantattn.loaders.values import ReadContext
from quantattn.scales import DEFAULT_SCALE, ROLES, buffer_name

__all__ = ["Inspection", "inspect_checkpoint"]

# A tensor of an attention module: its path, and the projection that makes it one.
_PROJECTION = re.compile(
    r"(?P<attention>.+)\.(?:\w*[qkv]_proj|qkv_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|qkv"
    r"|query_key_value|Wqkv|wqkv|W_pack|c_attn|linear_qkv|wq_a|wkv_a_with_mqa|w?[qkv])\..+"
)


@dataclass(frozen=True)
class Inspection:
    """What `inspect_checkpoint` found.

    Attributes:
        declared: What the config files say about the KV cache, with the field that says so.
        layers: For every attention module and role its value, source (`checkpoint` or `default`),
            key and file. A layer that shares another's cache has that layer's k and v scale.
        problems: Why a load would be refused.
        ignored: Scale keys that a load leaves aside, and why.
        warnings: What a user should know beside that.
    """

    declared: Mapping[str, Any]
    layers: tuple[ScaleRow, ...]
    problems: tuple[Problem, ...]
    ignored: tuple[Problem, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        """The documented JSON object: declared, layers, problems.

        Example:
            >>> import json
            >>> from importlib.resources import files
            >>> inspection = inspect_checkpoint(files("quantattn") / "data" / "demo")
            >>> list(json.loads(inspection.to_json()))
            ['declared', 'layers', 'problems']
        """
        rows = [
            {
                "layer": row.layer,
                "role": row.role,
                "value": row.value,
                "source": row.source,
                "key": row.key,
                "file": row.file,
            }
            for row in self.layers
        ]
        problems = [
            {"code": p.code, "key": p.key, "file": p.file, "message": p.message}
            for p in self.problems
        ]
        document = {"declared": self.declared, "layers": rows, "problems": problems}
        return json.dumps(document, indent=2, allow_nan=False)


def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    cache_scale_means: str | None = None,
    global_scale_means: str | None = None,
    accept_runtime_buffers: bool = False,
) -> Inspection:
    """Read a checkpoint's declaration and scales, without the code of its model.

    Args:
        path: A folder, a `.safetensors` file or a `.safetensors.index.json`.
        strict: Absent and one-sided k and v scales are problems too, where a KV format is declared.
        cache_scale_means: `scale` or `amax`, for files with names like `k_cache.scale`.
        global_scale_means: `multiplier` or `reciprocal`, for names like `k_global_scale`.
        accept_runtime_buffers: Read an engine's own buffers (`attn._k_scale`), which may already
            hold its platform's factor.

    Raises:
        CheckpointError: A file is damaged, hostile or missing.

    Example:
        >>> from importlib.resources import files
        >>> inspection = inspect_checkpoint(files("quantattn") / "data" / "demo")
        >>> inspection.declared["kv_dtype"], len(inspection.layers), inspection.problems
        ('fp8_e4m3', 8, ())
    """
    with open_checkpoint(path) as checkpoint:
        declaration, context = declared_by(checkpoint)
        context = replace(
            context,
            cache_scale_means=cache_scale_means,
            global_scale_means=global_scale_means,
            accept_runtime_buffers=accept_runtime_buffers,
        )
        found, weight_keys = read_scales(checkpoint, context)
        rows = _rows(_attention_modules(weight_keys, found, context), found, declaration)
        problems = [*found.problems, *declaration.unsupported]
        if strict and declaration.kv_dtype is not None:
            problems += _absent(rows, declaration)
        warnings = checkpoint_warnings(checkpoint, declaration, found.ignored)
    return Inspection(
        declared=declaration.to_json(),
        layers=tuple(rows),
        problems=tuple(problems),
        ignored=tuple(found.ignored),
        warnings=tuple(warnings),
    )


def _attention_modules(
    weight_keys: list[str], found: FoundScales, context: ReadContext
) -> list[ScaleName]:
    """One name for every attention module that has a cache, in the order of the layers."""
    modules: dict[str, ScaleName] = {}
    for key in weight_keys:
        match = _PROJECTION.fullmatch(key)
        name = None if match is None else parse_name(f"{match['attention']}.k_scale")
        if name is not None and has_cache(name, context):
            modules.setdefault(name.attention, name)
    for attention, _ in found.scales:
        name = parse_name(f"{attention}.k_scale")
        if name is not None:
            modules.setdefault(attention, name)
    return sorted(modules.values(), key=lambda name: (name.scope.value, name.layer or 0))


def _rows(modules: list[ScaleName], found: FoundScales, declaration: Declaration) -> list[ScaleRow]:
    by_layer = {name.layer: name.attention for name in modules if name.scope is Scope.DECODER}
    rows = []
    for module in modules:
        target = None
        if module.scope is Scope.DECODER and module.layer is not None:
            target = by_layer.get(declaration.geometry.kv_shared.get(module.layer))
        for role in ROLES:
            owner = target if target is not None and role in ("k", "v") else module.attention
            rows.append(_row(module.attention, owner, role, found))
    return rows


def _row(attention: str, owner: str, role: str, found: FoundScales) -> ScaleRow:
    scale = found.scales.get((owner, role))
    if scale is None and role == "v":
        scale = found.latent_v.get(owner)
    if scale is None or scale.name.key in {problem.key for problem in found.problems}:
        return ScaleRow(attention, role, DEFAULT_SCALE, "default")
    note = scale.note if owner == attention else f"of {owner}, whose cache it shares"
    return ScaleRow(attention, role, scale.value, "checkpoint", scale.name.key, scale.file, note)


def _absent(rows: list[ScaleRow], declaration: Declaration) -> list[Problem]:
    wanted = {"k"} if declaration.geometry.is_mla else {"k", "v"}
    lacking: dict[str, list[str]] = {}
    given = any(row.role in wanted and row.source != "default" for row in rows)
    for row in rows:
        if row.role in wanted and row.source == "default":
            lacking.setdefault(row.layer, []).append(row.role)
    problems = []
    for layer, roles in lacking.items():
        if len(roles) < len(wanted):
            code = f"missing_{roles[0]}"
        else:
            code = "missing_partial" if given else "missing_all"
        names = " and ".join(buffer_name(role) for role in roles)
        message = f"layer {layer!r}: the checkpoint has no valid {names}"
        problems.append(Problem(code, None, None, message))
    return problems
