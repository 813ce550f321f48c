"""Where the rows of K and of V, and their scales, lie in a page: strides for kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantattn.layout import PageLayout

__all__ = ["RowPlaces", "row_places"]


class RowPlaces(NamedTuple):
    """The rows of one side, in elements of the page, and their scales, in words of 4 bytes.

    Attributes:
        start: First row.
        token_stride: From a token to the next.
        head_stride: From a head to the next.
        scale_start: First scale; 0 where a page holds none.
        scale_token_stride: From a token's scale to the next one's.
        scale_head_stride: From a head's scale to the next one's.
        offset_distance: From a scale to the offset beside it; 0 where there is none.
    """

    start: int
    token_stride: int
    head_stride: int
    scale_start: int = 0
    scale_token_stride: int = 0
    scale_head_stride: int = 0
    offset_distance: int = 0


@lru_cache
def row_places(layout: PageLayout, block_size: int) -> tuple[RowPlaces, RowPlaces]:
    """Say where K rows and V rows lie in pages of `block_size` tokens.

    Example:
        >>> row_places(PageLayout(2, 8, 4, "HND"), 16)[1][:3]
        (256, 4, 64)
    """
    # What the layout says of pages holds wherever they are: these have no memory.
    dtype = torch.uint8 if layout.format.is_quantized else torch.bfloat16
    page = torch.empty((1, layout.page_size(block_size)), dtype=dtype, device="meta")
    codes = layout.key_view(page), layout.value_view(page)
    scales = layout.scale_views(page) or (None, None)
    key, value = (_side(*views) for views in zip(codes, scales, strict=True))
    return key, value


def _side(codes: Tensor, scales: Tensor | None) -> RowPlaces:
    places = RowPlaces(int(codes.storage_offset()), codes.stride(1), codes.stride(2))
    if scales is None:
        return places
    return places._replace(
        scale_start=int(scales.storage_offset()),
        scale_token_stride=scales.stride(1),
        scale_head_stride=scales.stride(2),
        offset_distance=scales.stride(3) if scales.ndim == 4 else 0,
    )
