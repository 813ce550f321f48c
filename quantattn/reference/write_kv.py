"""write_kv in plain torch."""

from __future__ import annotations

from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.reference._pages import kv_rows

__all__ = ["write_kv"]


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str,
    scale_placement: str = "page",
) -> None:
    """See `quantattn.ops.write_kv`."""
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    num_kv_heads, head_dim = key.shape[1:]
    page_layout = PageLayout(num_kv_heads, head_dim, value.shape[2], layout, fmt, scale_placement)
    keys, values = kv_rows(kv_cache, page_layout, k_scale, v_scale)
    keys.store(key, slot_mapping)
    values.store(value, slot_mapping)
