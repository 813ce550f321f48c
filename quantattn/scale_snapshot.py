"""snapshot_scales and restore_scales: for engines that release device memory and map it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from quantattn.errors import ScaleError
from quantattn.quant_scales import QuantScales, guarded_layers
from quantattn.scale_access import accept_scales
from quantattn.scale_buffers import check_commit, commit_scales
from quantattn.scales import RecordedScale

__all__ = ["ScaleSnapshot", "restore_scales", "snapshot_scales"]


@dataclass(frozen=True)
class ScaleSnapshot:
    """The scales and ranges of a model at one time, on the host; made by `snapshot_scales`."""

    records: Mapping[str, Mapping[str, RecordedScale]]
    ranges: Mapping[str, Mapping[str, float]]


def snapshot_scales(model: nn.Module) -> ScaleSnapshot:
    """Keep a model's scales on the host, for an engine that is about to release device memory.

    What the buffers hold is kept; where that differs from the record, the buffer counts.

    Raises:
        ScaleError: A buffer holds no valid scale; it is named.

    Example:
        >>> layer = QuantAttention(4, 32, num_kv_heads=2)
        >>> layer.set_scale("k", 0.0123)
        >>> kept = snapshot_scales(layer)
        >>> _ = layer.k_scale.fill_(float("nan"))
        >>> restore_scales(layer, kept)
        >>> layer.host_scale("k") == torch.tensor(0.0123).item()
        True
    """
    layers = guarded_layers(model)
    for layer in layers.values():
        layer.mend_scales()
    accept_scales(layers.values())
    return ScaleSnapshot(
        {path: dict(layer.scale_state.record) for path, layer in layers.items()},
        {path: layer.scale_ranges for path, layer in layers.items()},
    )


def restore_scales(model: nn.Module, snapshot: ScaleSnapshot) -> None:
    """Write a snapshot back into a model's buffers, whatever they hold now.

    Args:
        model: The model that the snapshot was taken of, or one with the same layers.
        snapshot: What `snapshot_scales` gave.

    Raises:
        ScaleError: The model's layers are not those of the snapshot, or a live cache holds entries
            written with other scales; nothing was changed.

    Example:
        >>> layer = MLAAttention(4, 16, 8, softmax_scale=0.2)
        >>> kept = snapshot_scales(layer)
        >>> layer.set_scale("k", 0.5)
        >>> restore_scales(layer, kept)
        >>> layer.host_scale("k")
        1.0
    """
    layers = guarded_layers(model)
    if layers.keys() != snapshot.records.keys():
        odd = sorted(layers.keys() ^ snapshot.records.keys())
        raise ScaleError(f"snapshot: it was taken of other layers than the model's: {odd}")
    for path, layer in layers.items():
        _check_fits(path, layer, snapshot.records[path])
    updates = {layer: snapshot.records[path] for path, layer in layers.items()}
    check_commit(updates, replace=True)
    for path, layer in layers.items():
        layer.scale_state.ranges.update(snapshot.ranges[path])
    commit_scales(updates, replace=True)


def _check_fits(path: str, layer: QuantScales, record: Mapping[str, RecordedScale]) -> None:
    for role, scale in record.items():
        length = math.prod(layer.scale_shape.of(role))
        if role not in layer.scale_roles or len(scale.values) != length:
            raise ScaleError(
                f"snapshot: layer {path!r} has no {role} scale of {len(scale.values)} numbers",
                layer=path,
                role=role,
            )
