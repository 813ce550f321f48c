"""load_kv_scales: KV scales that come in a JSON file beside the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from quantattn.loaders.collect import FoundScale, FoundScales
from quantattn.loaders.geometry import Geometry
from quantattn.loaders.json_file import read_json
from quantattn.loaders.kv_scales_json import KvScales, read_kv_scales
from quantattn.loaders.layer_index import LayerIndex
from quantattn.loaders.load import check_on_invalid, report_load, tolerate
from quantattn.loaders.names import ScaleKind, ScaleName, Scope
from quantattn.loaders.plan import Rank, plan_scales
from quantattn.loaders.postprocess import process_weights_after_loading
from quantattn.loaders.report import LoadReport
from quantattn.loaders.weights import WeightPlan
from quantattn.scale_buffers import commit_scales

__all__ = ["load_kv_scales"]


def load_kv_scales(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    on_invalid: str = "error",
    tp_rank: int = 0,
    tp_size: int = 1,
) -> LoadReport:
    """Load the KV scales of a JSON file into a model, all or none; other scales keep their record.

    Args:
        model: The model, on a real device.
        path: The JSON file, in any layout that `kv_scales_json` describes.
        on_invalid: `error` refuses a file with invalid or missing scales; `default` puts 1.0 in
            their place and lists them in the report.
        tp_rank: This rank among those that divide the heads.
        tp_size: Number of such ranks.

    Returns:
        For every layer and role its value, source, key (the path in the file) and file.

    Raises:
        RefusedCheckpointError: A scale is invalid or a layer is missing; the model is as it was.
        CheckpointError: The file is no JSON, or of no known layout.
        ScaleError: A live cache holds entries that were written with scales that would change.

    Example:
        >>> import json, tempfile
        >>> model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([QuantAttention(4, 32)])})
        >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ...     json.dump({"layers.0.attn.k_scale": 0.5, "layers.0.attn.v_scale": 0.25}, file)
        ...     file.flush()
        ...     report = load_kv_scales(model, file.name)
        >>> model["layers"][0].host_scale("v")
        0.25
    """
    check_on_invalid(on_invalid)
    rank = Rank(tp_rank, tp_size)
    path = Path(path)
    index = LayerIndex(model)
    read = read_kv_scales(
        read_json(path),
        file=path.name,
        geometry=_geometry(index, rank),
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    plan = plan_scales(model, _found(read, path.name, index), index=index, rank=rank)
    tolerated = tolerate(plan, strict=False, on_invalid=on_invalid)
    plan.refuse(str(path))
    commit_scales(plan.updates)
    process_weights_after_loading(model)
    return report_load(model, plan, tolerated, WeightPlan(), [])


def _geometry(index: LayerIndex, rank: Rank) -> Geometry:
    """The model's decoder layers that have scales of their own."""
    owners = {
        number: index.layers[path]
        for number, path in index.decoder_layers().items()
        if index.layers[path].kv_sharing_target is None
    }
    heads = {layer.scale_shape.num_kv_heads for layer in owners.values()}
    whole = heads.pop() * rank.tp_size if len(heads) == 1 and rank.tp_size == 1 else None
    return Geometry(
        num_layers=max(owners, default=-1) + 1,
        num_kv_heads=whole,
        is_mla=any(layer.scale_state.has_one_latent for layer in owners.values()),
        attention_layers=tuple(sorted(owners)),
    )


def _found(read: KvScales, file: str, index: LayerIndex) -> FoundScales:
    paths = index.decoder_layers()
    found = FoundScales(problems=list(read.problems))
    for (layer, role), value in read.values.items():
        key = read.keys[layer, role]
        attention = paths.get(layer, f"layers.{layer}.self_attn")
        kind = ScaleKind.MULTIPLIER
        name = ScaleName(key, "json", attention, layer, Scope.DECODER, (role,), kind)
        found.scales[attention, role] = FoundScale(name, role, value, file)
    return found
