"""Scales from observed data: amax over a batch, divided by the role's range."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.errors import ScaleError
from quantattn.quant_scales import QuantScales
from quantattn.scale_buffers import commit_scales
from quantattn.scales import RecordedScale, ScaleSource, fit_scale

__all__ = ["calibrate_scales"]


def calibrate_scales(layer: QuantScales, observed: dict[str, Tensor]) -> None:
    """Set a layer's scales from what it sees, `scale = amax / range`, by tensor or by KV head.

    A role whose batch is empty or all zero keeps its scale: nothing can be learnt from it.
    Synchronises with the device once.

    Args:
        layer: The layer whose scales are set, with source `calibrated`.
        observed: For `q`, `k` and `v`: values `[num_tokens, heads, head_dim]`.

    Raises:
        ScaleError: The data is not finite, a live cache was written with other scales, or a CUDA
            graph is being captured.

    Example:
        >>> layer = QuantAttention(2, 4)
        >>> calibrate_scales(layer, {"k": torch.full((3, 2, 4), 5.0)})
        >>> round(layer.host_scale("k"), 6)
        0.025
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ScaleError("calibrate: it reads amax on the host, so call it outside graph capture")
    for role, data in observed.items():
        _check_observed(layer, role, data)
    seen = {
        role: data for role, data in observed.items() if role in layer.scale_roles and data.numel()
    }
    if not seen:
        return
    amax = {role: _amax(layer, role, data) for role, data in seen.items()}
    host = torch.cat([values.reshape(-1) for values in amax.values()]).tolist()
    updates: dict[str, RecordedScale] = {}
    for role, values in amax.items():
        numbers, host = host[: values.numel()], host[values.numel() :]
        constant = layer.scale_ranges[role]
        known = [number / constant if number else None for number in numbers]
        kept = layer.scale_sources[role].values
        if any(known):
            merged = [new if new else old for new, old in zip(known, kept, strict=True)]
            updates[role] = fit_scale(
                role,
                merged,
                layer.scale_shape,
                layer=layer.layer_name,
                source=ScaleSource.CALIBRATED,
            )
    commit_scales({layer: updates})


def _check_observed(layer: QuantScales, role: str, data: Tensor) -> None:
    """Refuse what is no batch of this layer's heads."""
    heads = layer.scale_shape.num_heads if role == "q" else layer.scale_shape.num_kv_heads
    is_batch = isinstance(data, Tensor) and data.ndim >= 2 and data.is_floating_point()
    is_wide = is_batch and data.element_size() > 1 and not data.is_meta
    if is_wide and (data.ndim == 2 or data.shape[1] == heads):
        return
    got = f"{list(data.shape)} {data.dtype}" if isinstance(data, Tensor) else type(data).__name__
    raise ScaleError(
        f"calibrate: got {got} for {role}, expected float32, float16 or bfloat16"
        f" [num_tokens, {heads}, head_dim]",
        layer=layer.layer_name,
        role=role,
    )


def _amax(layer: QuantScales, role: str, data: Tensor) -> Tensor:
    magnitudes = data.detach().abs()
    if not layer.scale_shape.of(role):
        return magnitudes.amax().float()
    by_kv_head = magnitudes.reshape(data.shape[0], layer.scale_shape.num_kv_heads, -1)
    return by_kv_head.amax(dim=(0, 2)).float()
