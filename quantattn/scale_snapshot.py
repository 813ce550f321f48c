"""snapshot_scales and restore_scales: for engines that release device memory and map it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from quantattn.errors import ScaleError
from quantattn.quant_scales import QuantScales
from quantattn.scale_buffers import commit_scales
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
    layers = _guarded(model)
    for layer in layers.values():
        layer.accept_buffers()
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
    layers = _guarded(model)
    if layers.keys() != snapshot.records.keys():
        odd = sorted(layers.keys() ^ snapshot.records.keys())
        raise ScaleError(f"snapshot: it was taken of other layers than the model's: {odd}")
    updates = {layer: snapshot.records[path] for path, layer in layers.items()}
    commit_scales(updates, replace=True)
    for path, layer in layers.items():
        layer.scale_state.ranges.update(snapshot.ranges[path])
    commit_scales({layer: {} for layer in updates})


def _guarded(model: nn.Module) -> dict[str, QuantScales]:
    modules = model.named_modules()
    return {path: m for path, m in modules if isinstance(m, QuantScales) and m.has_scales}
