"""Checks that the operations which write keys and values share."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.errors import FormatError
from quantattn.formats import CacheFormat
from quantattn.layout import PageLayout
from quantattn.validation import check_pages, check_scale, check_tensor

__all__ = ["check_write", "used_scales"]


def check_write(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    fmt: CacheFormat,
    layout: str,
    scale_placement: str,
) -> None:
    """Check values, slots and pages against keys `[num_tokens, num_kv_heads, head_dim]`.

    Raises:
        FormatError: A dtype, shape, device, stride or the format does not fit.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    rows, device = (num_tokens, num_kv_heads, None), key.device
    check_tensor("value", value, shape=rows, dtypes=(key.dtype,), device=device)
    if value.shape[2] == 0:
        raise FormatError(
            "value: got head_dim_v 0, expected at least 1; write_latent writes rows without values"
        )
    slots = (num_tokens,)
    check_tensor("slot_mapping", slot_mapping, shape=slots, dtypes=(torch.int64,), device=device)
    page_layout = PageLayout(num_kv_heads, head_dim, value.shape[2], layout, fmt, scale_placement)
    check_pages(kv_cache, page_layout, fmt, device=device)


def used_scales(
    key: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, fmt: CacheFormat
) -> tuple[Tensor | None, Tensor | None]:
    """The layer's scales as the format uses them, checked; None where it ignores them.

    Raises:
        ScaleError: A scale is absent, or its dtype, shape or device does not fit.
    """
    if not fmt.uses_layer_scales:
        return None, None
    check_scale("k_scale", k_scale, key.shape[1], key.device)
    check_scale("v_scale", v_scale, key.shape[1], key.device)
    return k_scale, v_scale
