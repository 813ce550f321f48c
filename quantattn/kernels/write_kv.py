"""write_kv in Triton."""

from __future__ import annotations

from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._write_rows import write_rows
from quantattn.layout import PageLayout

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
    *,
    native: bool | None = None,
) -> None:
    """See `quantattn.ops.write_kv`.

    `native` chooses between the device's FP8 conversion and the one by integers; None: what
    `is_native` says.
    """
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    sizes = (key.shape[1], key.shape[2], value.shape[2])
    page_layout = PageLayout(*sizes, layout, fmt, scale_placement)
    write_rows(key, value, kv_cache, slot_mapping, k_scale, v_scale, page_layout, native)
