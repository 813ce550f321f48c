"""rope_write_kv in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantattn.reference.static_quant_fp8 import static_quant_fp8
from quantattn.reference.write_kv import write_kv

__all__ = ["rope_write_kv"]


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str,
    scale_placement: str,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    q_scale: Tensor | None,
) -> Tensor:
    """See `quantattn.ops.rope_write_kv`."""
    cos, sin = _angles(cos_sin_cache, positions, slot_mapping)
    key, query = (_rotate(x, cos, sin, interleaved) for x in (key, query))
    write_kv(
        key,
        value,
        kv_cache,
        slot_mapping,
        k_scale,
        v_scale,
        kv_cache_dtype,
        layout,
        scale_placement,
    )
    return query if q_scale is None else static_quant_fp8(query, q_scale, torch.float8_e4m3fn)


def _angles(table: Tensor, positions: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every token, float32 `[num_tokens, 1, pairs]`."""
    nearest = positions.clamp(0, table.shape[0] - 1)
    unknown = (positions != nearest) & (slot_mapping >= 0)
    rows = table[nearest].float().masked_fill(unknown[:, None], math.nan)
    cos, sin = rows[:, None].chunk(2, dim=-1)
    return cos, sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    turning, rest = x.float().split([2 * pairs, x.shape[-1] - 2 * pairs], dim=-1)
    shape, axis = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    first, second = turning.unflatten(-1, shape).unbind(axis)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
    return torch.cat((turned.flatten(-2), rest), dim=-1).to(x.dtype)
