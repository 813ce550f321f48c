"""KV scales that come in a JSON file beside the checkpoint, in each of the layouts that are in use.

- by rank (old vLLM, SGLang): `{"kv_cache": {"dtype", "scaling_factor": {rank: {layer: number}}}}`;
  a layer may also have `[k, v]` or `{"k": ..., "v": ...}`
- calibration rows (LightLLM): `{"quant_type", "qmax", "scales": [[k..., v...], ...]}`
- lists by role (ONNX Runtime GenAI): `{"scales": {"k_scales": [...], "v_scales": [...]}}`, with
  `layer_ids` beside them where not every layer has a cache
- names (AngelSlim, FastDeploy): a flat map of checkpoint keys, read by the same rules as tensors

Every number is checked like a checkpoint's tensor. Scales for each head come for the whole model;
taking a rank's part of them is the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantattn.errors import CheckpointError, Problem
from quantattn.loaders.geometry import Geometry
from quantattn.loaders.json_object import JsonObject
from quantattn.loaders.kv_scales_layouts import KvScalesRun, StoredScale, layout_of
from quantattn.loaders.names import ScaleName, Scope
from quantattn.loaders.resolution import Outcome, resolve
from quantattn.loaders.values import ReadContext, ScaleValue

__all__ = ["KvScales", "is_kv_scales", "read_kv_scales"]

Place = tuple[int, str]


@dataclass(frozen=True)
class KvScales:
    """What a JSON scale file holds.

    Attributes:
        values: (layer, role) to multiplier, a float or one for each head of the whole model; draft
            layers are counted on from the decoder's.
        keys: (layer, role) to the path of the value in the file.
        problems: Why the file is refused; empty: it is good.
    """

    values: Mapping[Place, ScaleValue] = field(default_factory=dict)
    keys: Mapping[Place, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def is_kv_scales(data: Mapping[str, object]) -> bool:
    """Whether a parsed JSON object is a KV scale file of a known layout.

    Args:
        data: The file's top-level object.

    Example:
        >>> is_kv_scales({"model.layers.0.self_attn.k_scale": 0.02})
        True
        >>> is_kv_scales({"model_type": "llama"})
        False
    """
    return layout_of(data) is not None


def read_kv_scales(
    data: Mapping[str, object],
    *,
    file: str,
    geometry: Geometry,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> KvScales:
    """Read a KV scale file of any known layout.

    Args:
        data: The parsed file.
        file: Its name, for messages.
        geometry: The model's; each attention layer that it knows must have its scales.
        tp_rank: This process's tensor-parallel rank.
        tp_size: Ranks in all; a file by rank must have been made for as many.

    Raises:
        CheckpointError: The file is of no known layout, or a member has a wrong type.

    Example:
        >>> factors = {"0": {"0": 0.5, "1": 0.25}}
        >>> data = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors}}
        >>> read_kv_scales(data, file="kv_cache_scales.json", geometry=Geometry()).values[1, "v"]
        0.25
    """
    layout = layout_of(data)
    if layout is None:
        expected = "kv_cache.scaling_factor, scales, or names of attention scales"
        raise CheckpointError(f"{file}: no KV scale file; expected {expected}", file=file)
    read = _Reading(file, geometry)
    for item in layout(JsonObject(data, file), KvScalesRun(geometry, tp_rank, tp_size)):
        if isinstance(item, Problem):
            read.problems.append(item)
        else:
            read.add(item)
    if not any(problem.key is None for problem in read.problems):
        read.problems.extend(_missing(file, geometry, read.seen))
    return KvScales(read.values, read.keys, tuple(read.problems))


class _Reading:
    """Values and problems of one file, as its entries are read one after another."""

    def __init__(self, file: str, geometry: Geometry) -> None:
        self.file = file
        self.num_layers = geometry.num_layers
        self.without_cache = _layers_without_cache(geometry)
        self.context = ReadContext(
            kv="fp8_e4m3",
            num_layers=geometry.num_layers,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            is_mla=geometry.is_mla,
            shared_layers=frozenset(geometry.kv_shared),
        )
        self.values: dict[Place, ScaleValue] = {}
        self.keys: dict[Place, str] = {}
        self.problems: list[Problem] = []
        self.seen: set[Place] = set()

    def add(self, entry: StoredScale) -> None:
        """Read one entry."""
        layer = self._layer(entry.name)
        if layer in self.without_cache:
            return
        if layer is None:
            self._refuse(entry.name, "no_layer", "no layer number, or one past an unknown count")
            return
        self.seen.update((layer, role) for role in entry.name.roles)
        tensor = _tensor(entry.stored)
        if tensor is None:
            reason = f"got {entry.stored!r:.80}, expected a number or a list of numbers"
            self._refuse(entry.name, "dtype", reason)
            return
        found = resolve(entry.name, tensor, self.context)
        if found.outcome is Outcome.PROBLEM:
            self.problems.append(_named(found.problem(self.file), entry.name))
        for role, value in found.values.items():
            self._put((layer, role), value, entry.name)

    def _layer(self, name: ScaleName) -> int | None:
        """Draft layers that count from 0 by themselves go behind the decoder's."""
        if name.scope is not Scope.DRAFT or name.layer is None:
            return name.layer
        if self.num_layers is None or name.layer >= self.num_layers:
            return None if self.num_layers is None else name.layer
        return self.num_layers + name.layer

    def _put(self, place: Place, value: ScaleValue, name: ScaleName) -> None:
        if self.values.setdefault(place, value) != value:
            reason = f"{value} here, but {self.values[place]} under {self.keys[place]}"
            self._refuse(name, "conflict", reason)
        self.keys.setdefault(place, name.key)

    def _refuse(self, name: ScaleName, code: str, reason: str) -> None:
        problem = Problem(code, name.key, self.file, f"{name.key}: {reason}")
        self.problems.append(_named(problem, name))


def _named(problem: Problem, name: ScaleName) -> Problem:
    """The problem with layer and role in its message, which a path in a file may not show."""
    roles = " and ".join(name.roles)
    return replace(
        problem, message=f"{problem.file}: layer {name.layer}, {roles}: {problem.message}"
    )


def _tensor(stored: object) -> Tensor | None:
    """The number or the regular (nested) list of numbers as float64."""
    if not _is_numeric(stored):
        return None
    try:
        return torch.tensor(stored, dtype=torch.float64)
    except (OverflowError, TypeError, ValueError):
        return None


def _is_numeric(stored: object) -> bool:
    if isinstance(stored, list):
        return bool(stored) and all(_is_numeric(item) for item in stored)
    return isinstance(stored, (int, float)) and not isinstance(stored, bool)


def _layers_without_cache(geometry: Geometry) -> frozenset[int]:
    """Layers of a hybrid model that a file may list although they have no attention."""
    if geometry.num_layers is None or geometry.attention_layers is None:
        return frozenset()
    return frozenset(range(geometry.num_layers)).difference(geometry.attention_layers)


def _missing(file: str, geometry: Geometry, seen: set[Place]) -> Iterator[Problem]:
    owners = [it for it in geometry.attention_layers or () if it not in geometry.kv_shared]
    without = {role: {layer for layer in owners if (layer, role) not in seen} for role in "kv"}
    both = without["k"] & without["v"]
    for code, layers in (
        ("missing_all", both),
        ("missing_k", without["k"] - both),
        ("missing_v", without["v"] - both),
    ):
        if layers:
            listed = ", ".join(str(layer) for layer in sorted(layers))
            message = f"{file}: {code.replace('_', ' ')} scales of layers {listed}"
            yield Problem(code, None, file, f"{message}; calibrate every layer")
