"""write_kv in plain torch."""

from __future__ import annotations

from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.reference._pages import RowView, as_codes

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
) -> None:
    """See `quantattn.ops.write_kv`."""
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    page_layout = PageLayout(key.shape[1], key.shape[2], value.shape[2], layout)
    pages = as_codes(kv_cache, fmt)
    RowView(page_layout.key_view(pages), fmt, k_scale).store(key, slot_mapping)
    RowView(page_layout.value_view(pages), fmt, v_scale).store(value, slot_mapping)
