"""load_checkpoint and load_weights: plan everything, check everything, then write."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantattn.errors import Problem, RefusedCheckpointError, ScaleError
from quantattn.loaders.checkpoint import Checkpoint, open_checkpoint
from quantattn.loaders.checkpoint_scales import (
    UNDECLARED,
    checkpoint_warnings,
    declared_by,
    read_scales,
    scale_name,
)
from quantattn.loaders.collect import ScaleKey, collect_scales
from quantattn.loaders.layer_index import LayerIndex
from quantattn.loaders.materialize import materialize
from quantattn.loaders.names import ScaleName
from quantattn.loaders.plan import Rank, ScalePlan, plan_scales
from quantattn.loaders.postprocess import process_weights_after_loading
from quantattn.loaders.progress import with_progress
from quantattn.loaders.report import LoadReport, default_warning, one_sided_layers, report_scales
from quantattn.loaders.values import ReadContext
from quantattn.loaders.weights import (
    WeightPlan,
    destinations,
    match_name,
    misfit,
    mismatch,
    plan_weights,
)
from quantattn.scale_buffers import check_commit, commit_scales

__all__ = ["check_on_invalid", "load_checkpoint", "load_weights", "report_load", "tolerate"]

# What only strict=True refuses, and then whatever on_invalid says.
_STRICT_CODES = frozenset(
    {"missing_all", "missing_k", "missing_partial", "missing_v", "unknown_scale"}
)


def load_checkpoint(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    on_invalid: str = "error",
    device: torch.device | str | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    cache_scale_means: str | None = None,
    global_scale_means: str | None = None,
    accept_runtime_buffers: bool = False,
) -> LoadReport:
    """Load a checkpoint's weights and attention scales into a model, all or nothing.

    Every key is matched, converted and checked before the first tensor is written. What the file
    omits becomes 1.0; scales that were recorded before are forgotten.

    Args:
        model: The model; on the meta device it is materialised, once the checkpoint is accepted.
        path: A folder, a `.safetensors` file or a `.safetensors.index.json`.
        strict: Also refuse absent and one-sided k and v scales and scale-like keys of no known
            name.
        on_invalid: `error` refuses invalid and misplaced scales; `default` puts 1.0 in their
            place and lists them in the report.
        device: Where the model is to be; default where it is, the CPU if it is on meta.
        tp_rank: This rank among those that divide the heads.
        tp_size: Number of such ranks.
        cache_scale_means: `scale` or `amax`, for files with names like `k_cache.scale`.
        global_scale_means: `multiplier` or `reciprocal`, for names like `k_global_scale`.
        accept_runtime_buffers: Read an engine's own buffers (`attn._k_scale`), which may already
            hold its platform's factor.

    Returns:
        For every layer and role its value, source, key and file; and what was left aside or
        missing.

    Raises:
        RefusedCheckpointError: Scales or weights do not fit or are invalid; the model is as it was.
        CheckpointError: A file is damaged, hostile or missing; the model is as it was.
        ScaleError: A live cache holds entries that were written with scales that would change.

    Example:
        >>> from importlib.resources import files
        >>> model = torch.nn.ModuleDict(
        ...     {"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList()})}
        ... )
        >>> for _ in range(2):
        ...     block = torch.nn.ModuleDict({"self_attn": QuantAttention(4, 32, num_kv_heads=2)})
        ...     _ = model["model"]["layers"].append(block)
        >>> report = load_checkpoint(model, files("quantattn") / "data" / "demo")
        >>> [(row.layer, row.role) for row in report.loaded][:2]
        [('model.layers.0.self_attn', 'k'), ('model.layers.0.self_attn', 'v')]
    """
    check_on_invalid(on_invalid)
    rank = Rank(tp_rank, tp_size)
    with open_checkpoint(path) as checkpoint:
        declaration, context = declared_by(checkpoint)
        index = LayerIndex(model)
        context = replace(
            _for_model(context, index),
            cache_scale_means=cache_scale_means,
            global_scale_means=global_scale_means,
            accept_runtime_buffers=accept_runtime_buffers,
        )
        found, weight_keys = read_scales(checkpoint, context, index, destinations(model))
        if declaration.unsupported:
            found.tainted.update(found.scales)
        plan = plan_scales(
            model, found, index=index, rank=rank, strict=strict, kv_dtype=declaration.kv_dtype
        )
        plan.problems.extend(declaration.unsupported)
        tolerated = tolerate(plan, strict=strict, on_invalid=on_invalid)
        infos = [checkpoint.tensors[key] for key in weight_keys]
        weights = plan_weights(model, ((i.key, i.dtype, i.shape, i.file) for i in infos))
        plan.problems.extend(weights.problems)
        plan.refuse(os.fspath(path))
        check_commit(plan.updates, replace=True)
        materialize(model, device, loaded=set(weights.targets.values()))
        _copy_weights(checkpoint, model, weights)
        commit_scales(plan.updates, replace=True)
    process_weights_after_loading(model)
    return report_load(
        model, plan, tolerated, weights, checkpoint_warnings(checkpoint, declaration, plan.ignored)
    )


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    *,
    strict: bool = False,
    on_invalid: str = "error",
    tp_rank: int = 0,
    tp_size: int = 1,
) -> LoadReport:
    """Load named tensors, as an engine's own iterator gives them.

    Weights are copied as they arrive, so the stream may be larger than memory; scales are kept
    until its end, checked together and then written, all or none. Scales that the stream omits
    keep what is recorded, 1.0 if nothing is.

    Args:
        model: The model, on a real device.
        weights: Names in any known convention, and their tensors on any device.
        strict: Also refuse absent and one-sided k and v scales and scale-like keys of no known
            name.
        on_invalid: As for `load_checkpoint`.
        tp_rank: This rank among those that divide the heads.
        tp_size: Number of such ranks.

    Returns:
        As `load_checkpoint`.

    Raises:
        RefusedCheckpointError: A weight or a scale does not fit or is invalid; no scale was
            written, weights that came before the fault were.
        ScaleError: A live cache holds entries that were written with scales that would change.

    Example:
        >>> layer = QuantAttention(4, 32)
        >>> report = load_weights(layer, [("k_scale", torch.tensor(0.5))])
        >>> layer.host_scale("k"), layer.host_scale("v")
        (0.5, 1.0)
    """
    check_on_invalid(on_invalid)
    rank = Rank(tp_rank, tp_size)
    index = LayerIndex(model)
    places = destinations(model)
    scales: dict[str, tuple[ScaleName, Tensor]] = {}
    copied = WeightPlan()
    for key, tensor in weights:
        name = scale_name(key, index, places)
        if name is None:
            _copy_one(key, tensor, places, copied)
        else:
            scales[key] = (name, tensor.detach().clone())
    found = collect_scales(_scale_keys(scales), _for_model(UNDECLARED, index))
    for key in found.left_to_linear:
        _copy_one(key, scales[key][1], places, copied)
    plan = plan_scales(model, found, index=index, rank=rank, strict=strict)
    tolerated = tolerate(plan, strict=strict, on_invalid=on_invalid)
    plan.refuse("weights")
    commit_scales(plan.updates)
    process_weights_after_loading(model)
    copied.find_missing(places)
    return report_load(model, plan, tolerated, copied, [])


def check_on_invalid(on_invalid: str) -> None:
    """Refuse anything but the two words."""
    if on_invalid not in ("error", "default"):
        raise ScaleError(f"on_invalid: got {on_invalid!r}, expected 'error' or 'default'")


def _for_model(context: ReadContext, index: LayerIndex) -> ReadContext:
    layers = index.layers.values()
    one_latent = bool(layers) and all(layer.scale_state.has_one_latent for layer in layers)
    return replace(context, is_mla=context.is_mla or one_latent)


def _scale_keys(scales: Mapping[str, tuple[ScaleName, Tensor]]) -> list[ScaleKey]:
    """Bring small tensors to the host with one transfer for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for key, (_, tensor) in scales.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(key)
    host: dict[str, Tensor] = {}
    for (device, _), keys in groups.items():
        tensors = [scales[key][1] for key in keys]
        if device.type not in ("cpu", "meta"):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu()
            parts = flat.split([tensor.numel() for tensor in tensors])
            tensors = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        host.update(zip(keys, tensors, strict=True))
    return [
        ScaleKey(name, None, functools.partial(host.__getitem__, key))
        for key, (name, _) in scales.items()
    ]


def tolerate(plan: ScalePlan, *, strict: bool, on_invalid: str) -> list[Problem]:
    """Move out of a plan's problems what the caller does not want refused."""
    if not strict:
        unknown = [p for p in plan.problems if p.code == "unknown_scale"]
        plan.ignored.extend(unknown)
        plan.problems = [p for p in plan.problems if p not in unknown]
    if on_invalid == "error":
        return []
    kept = _STRICT_CODES if strict else frozenset()
    tolerated = [p for p in plan.problems if p.code not in kept]
    plan.problems = [p for p in plan.problems if p.code in kept]
    return tolerated


def _copy_one(key: str, tensor: Tensor, places: Mapping[str, Tensor], copied: WeightPlan) -> None:
    name = match_name(key, places)
    if name is None:
        copied.unexpected += (key,)
        return
    place = places[name]
    reason = mismatch(tensor.dtype, tuple(tensor.shape), place)
    if reason is not None:
        problem = misfit(key, name, reason)
        raise RefusedCheckpointError(problem.message, [problem])
    with torch.no_grad():
        place.copy_(tensor.reshape(place.shape))
    copied.targets[key] = name


def _copy_weights(checkpoint: Checkpoint, model: nn.Module, weights: WeightPlan) -> None:
    places = destinations(model)
    keys = list(weights.targets)
    sizes = [checkpoint.tensors[key].nbytes for key in keys]
    for key in with_progress(keys, sizes, f"loading {checkpoint.root.name}"):
        place = places[weights.targets[key]].detach()
        shape = checkpoint.tensors[key].shape
        checkpoint.copy_to(key, place if place.shape == shape else place.view(shape))


def report_load(
    model: nn.Module,
    plan: ScalePlan,
    tolerated: list[Problem],
    weights: WeightPlan,
    warnings: list[str],
) -> LoadReport:
    """Put together what a load did."""
    rows = report_scales(model)
    at_default = default_warning(model)
    one_sided = [
        f"layer {layer!r} has only one of k_scale and v_scale; the other is 1.0"
        for layer in one_sided_layers(rows)
    ]
    return LoadReport(
        rows=rows,
        problems=tuple(tolerated),
        ignored=tuple(plan.ignored),
        missing=weights.missing,
        unexpected=weights.unexpected,
        warnings=(*([at_default] if at_default else []), *one_sided, *warnings),
    )
