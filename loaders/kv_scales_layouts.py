"""The layouts of JSON KV scale files: each reader gives the stored numbers, still unread.

A reader yields a `Problem` instead where the whole file does not fit the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from quantattn.errors import Problem
from quantattn.formats import FP8_E4M3_MAX
from quantattn.loaders.geometry import Geometry
from quantattn.loaders.json_object import JsonObject
from quantattn.loaders.names import ScaleKind, ScaleName, Scope, parse_name

__all__ = ["KvScalesRun", "StoredScale", "layout_of"]


@dataclass(frozen=True)
class KvScalesRun:
    """What a scale file is read for.

    Attributes:
        geometry: The model's.
        tp_rank: This process's tensor-parallel rank.
        tp_size: Ranks in all.
    """

    geometry: Geometry
    tp_rank: int
    tp_size: int


@dataclass(frozen=True)
class StoredScale:
    """One value of a scale file.

    Attributes:
        name: What its place in the file says; the key is its path there.
        stored: The parsed JSON value, not yet checked.
    """

    name: ScaleName
    stored: object


Layout = Callable[[JsonObject, KvScalesRun], Iterator[StoredScale | Problem]]


def layout_of(data: Mapping[str, object]) -> Layout | None:
    """The reader of a parsed file's layout; None: it is no KV scale file.

    Args:
        data: The file's top-level object.

    Example:
        >>> layout_of({"kv_cache": {}}).__name__
        '_read_by_rank'
    """
    if "kv_cache" in data:
        return _read_by_rank
    if isinstance(data.get("scales"), list) and "quant_type" in data:
        return _read_calibration_rows
    if isinstance(data.get("scales"), dict) or isinstance(data.get("mtp"), dict):
        return _read_lists_by_role
    return _read_names if any(parse_name(key) is not None for key in data) else None


def _read_by_rank(file: JsonObject, run: KvScalesRun) -> Iterator[StoredScale | Problem]:
    """Old vLLM and SGLang: one factor a layer, by rank."""
    cache = file.child("kv_cache") or JsonObject({}, file.file, "kv_cache")
    dtype = cache.text("dtype")
    if dtype != "float8_e4m3fn":
        reason = f"kv_cache.dtype is {dtype!r}, expected 'float8_e4m3fn'"
        yield _problem(file, "unsupported_scheme", reason)
        return
    written_for, expected = file.text("model_type"), run.geometry.model_type
    if written_for is not None and expected is not None and written_for != expected:
        reason = f"model_type is {written_for!r}, but the model's is {expected!r}"
        yield _problem(file, "conflict", reason)
        return
    ranks = cache.child("scaling_factor") or JsonObject({}, file.file, "kv_cache.scaling_factor")
    if set(ranks.data) != {str(rank) for rank in range(run.tp_size)}:
        layers = ", ".join(str(layer) for layer in run.geometry.attention_layers or ()) or "all"
        reason = (
            f"{ranks.path} is for ranks {', '.join(ranks.data) or '(none)'}, but tp_size is"
            f" {run.tp_size}, so no scale is known for layers {layers}; make the file for"
            f" tensor-parallel size {run.tp_size}"
        )
        yield _problem(file, "missing_all", reason)
        return
    factors = ranks.child(str(run.tp_rank)) or JsonObject({}, file.file, ranks.path)
    for key, stored in factors.data.items():
        yield from _by_role(file, run, factors.place(key), _layer(factors, key), stored)


def _read_calibration_rows(file: JsonObject, run: KvScalesRun) -> Iterator[StoredScale | Problem]:
    """LightLLM and LightCompress: one row a layer, K's numbers, then V's, of the whole model."""
    if (fault := _format_fault(file)) is not None:
        yield fault
        return
    for layer, row in enumerate(_list(file, "scales")):
        if not isinstance(row, list) or not row or len(row) % 2:
            raise file.error("scales", "rows that hold as many numbers for K as for V")
        half = len(row) // 2
        pair = {"k": row[:half], "v": row[half:]}
        yield from _by_role(file, run, f"scales.{layer}", layer, pair)


def _read_lists_by_role(file: JsonObject, run: KvScalesRun) -> Iterator[StoredScale | Problem]:
    """ONNX Runtime GenAI: one list a role, for the decoder and for draft layers (`mtp`)."""
    draft = file.child("mtp")
    for part, first in ((file, 0), (draft, run.geometry.num_layers)):
        scales = part.child("scales") if part is not None else None
        if part is None or scales is None:
            continue
        if (fault := _format_fault(part)) is not None:
            yield fault
            return
        if first is None:
            reason = "scales of draft layers, but the config does not say how many layers there are"
            yield _problem(file, "no_layer", reason)
            return
        for role in ("k", "v"):
            listed = _list(scales, f"{role}_scales")
            for index, (layer, stored) in enumerate(
                zip(_layer_ids(part, len(listed)), listed, strict=True)
            ):
                place = f"{scales.place(f'{role}_scales')}.{index}"
                yield _stored(place, first + layer, role, stored)


def _read_names(file: JsonObject, run: KvScalesRun) -> Iterator[StoredScale | Problem]:
    """AngelSlim and FastDeploy: a flat map of checkpoint keys, which say all by themselves."""
    for key, stored in file.data.items():
        name = parse_name(key)
        if name is None:
            yield Problem("unknown_scale", key, file.file, f"{key}: no name of an attention scale")
        else:
            yield StoredScale(name, stored)


def _problem(file: JsonObject, code: str, reason: str) -> Problem:
    return Problem(code, None, file.file, f"{file.file}: {reason}")


def _stored(path: str, layer: int, roles: Iterable[str], stored: object) -> StoredScale:
    attention = f"layers.{layer}.attn"
    name = ScaleName(
        path, "json", attention, layer, Scope.DECODER, tuple(roles), ScaleKind.MULTIPLIER
    )
    return StoredScale(name, stored)


def _by_role(
    file: JsonObject, run: KvScalesRun, path: str, layer: int, stored: object
) -> Iterator[StoredScale | Problem]:
    """A number serves K and V; a pair or an object has one for each."""
    num_layers = run.geometry.num_layers
    if num_layers is not None and layer >= num_layers:
        reason = f"{path} is for layer {layer}, but the model has {num_layers} layers"
        yield _problem(file, "no_layer", reason)
        return
    if isinstance(stored, list) and len(stored) == 2:
        stored = {"k": stored[0], "v": stored[1]}
    if not isinstance(stored, dict):
        yield _stored(path, layer, ("k", "v"), stored)
        return
    for key, value in stored.items():
        role = key.removesuffix("_scale")
        yield _stored(f"{path}.{key}", layer, role, value)


def _layer(factors: JsonObject, key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise factors.error(key, "a layer index for a name")
    return int(key)


def _format_fault(part: JsonObject) -> Problem | None:
    largest = part.data.get("qmax")
    if largest is None or largest == FP8_E4M3_MAX:
        return None
    reason = f"{part.place('qmax')} is {largest!r}: not scales of fp8_e4m3, whose maximum is 448"
    return _problem(part, "unsupported_scheme", reason)


def _list(part: JsonObject, key: str) -> list[object]:
    value = part.data.get(key)
    if not isinstance(value, list):
        raise part.error(key, "a list")
    return value


def _layer_ids(part: JsonObject, count: int) -> list[int]:
    ids = part.data.get("layer_ids")
    if ids is None:
        return list(range(count))
    is_index = isinstance(ids, list) and all(type(it) is int and 0 <= it < 10**9 for it in ids)
    if not isinstance(ids, list) or not is_index or len(ids) != count:
        raise part.error("layer_ids", f"{count} layer indices, one for each entry of the lists")
    return ids
