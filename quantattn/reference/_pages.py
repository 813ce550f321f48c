"""Rows of pages in plain torch: stored by slot, loaded by block in fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantattn.arithmetic import (
    decode_fp8,
    dequantize_rows,
    encode_fp8,
    quantize_fp8,
    quantize_rows,
)
from quantattn.formats import CacheFormat
from quantattn.layout import PageLayout, split_slots

__all__ = ["Rows", "ScaledRows", "SelfScaledRows", "as_codes", "kv_rows"]


class Rows(Protocol):
    """The K rows or the V rows of one layer's pages, and what their numbers mean."""

    @property
    def rows(self) -> Tensor:
        """What is stored, `[num_blocks, block_size, num_kv_heads, code_width]`."""

    @property
    def width(self) -> int:
        """Numbers of a row."""

    def store(self, new: Tensor, slot_mapping: Tensor) -> None:
        """Write `new`, `[num_tokens, num_kv_heads, width]`; a negative slot is skipped."""

    def load(self, blocks: Tensor, valid: Tensor) -> Tensor:
        """Dequantize the rows of some blocks.

        Args:
            blocks: Block ids, `[n, num_blocks]`, all inside the pages.
            valid: Which of the rows hold an entry, `[n, num_blocks * block_size]`, bool.

        Returns:
            float32 `[n, num_kv_heads, num_blocks * block_size, width]`; rows that are not valid are
            0. Rows of int4 are in the rotated basis.
        """


@dataclass(frozen=True)
class ScaledRows:
    """Rows that one scale of the layer serves, or one a head.

    Attributes:
        rows: `[num_blocks, block_size, num_kv_heads, width]`, bytes where `fmt` is FP8.
        fmt: What the rows hold.
        scale: float32, `[]`, `[1]` or `[num_kv_heads]`; None: 1.0. Ignored where `fmt` uses none.
    """

    rows: Tensor
    fmt: CacheFormat
    scale: Tensor | None

    @property
    def width(self) -> int:
        """See `Rows`."""
        return self.rows.shape[3]

    def store(self, new: Tensor, slot_mapping: Tensor) -> None:
        """See `Rows`."""
        _scatter(self.rows, self._encode(new), slot_mapping)

    def load(self, blocks: Tensor, valid: Tensor) -> Tensor:
        """See `Rows`."""
        stored = self.rows[blocks].flatten(1, 2)
        dtype = self.fmt.storage_dtype
        numbers = _masked(stored.float() if dtype is None else decode_fp8(stored, dtype), valid)
        if dtype is not None and self.scale is not None:
            numbers = numbers * self.scale.reshape(-1, 1)
        return numbers.transpose(1, 2)

    def _encode(self, new: Tensor) -> Tensor:
        dtype = self.fmt.storage_dtype
        if dtype is None:
            return new.to(self.rows.dtype)
        if self.scale is None:
            return encode_fp8(new, dtype).view(torch.uint8)
        return quantize_fp8(new, self.scale.reshape(-1, 1), dtype).view(torch.uint8)


@dataclass(frozen=True)
class SelfScaledRows:
    """Rows that each have a scale of their own in the page.

    Attributes:
        rows: Codes, uint8 `[num_blocks, block_size, num_kv_heads, code_width]`.
        scales: float32 `[num_blocks, block_size, num_kv_heads]`, with offsets `[..., 2]`.
        fmt: What the rows hold.
        width: Numbers of a row.
    """

    rows: Tensor
    scales: Tensor
    fmt: CacheFormat
    width: int

    def store(self, new: Tensor, slot_mapping: Tensor) -> None:
        """See `Rows`."""
        codes, scales = quantize_rows(new, self.fmt)
        _scatter(self.rows, codes, slot_mapping)
        _scatter(self.scales, scales, slot_mapping)

    def load(self, blocks: Tensor, valid: Tensor) -> Tensor:
        """See `Rows`."""
        codes, scales = self.rows[blocks].flatten(1, 2), self.scales[blocks].flatten(1, 2)
        return _masked(dequantize_rows(codes, scales, self.fmt), valid).transpose(1, 2)


def as_codes(pages: Tensor, fmt: CacheFormat) -> Tensor:
    """View FP8 pages as bytes, which can be indexed on every device; others stay as they are."""
    return pages.view(torch.uint8) if fmt.is_quantized else pages


def kv_rows(
    pages: Tensor, layout: PageLayout, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Rows, Rows]:
    """The K rows and the V rows of one layer's pages.

    Args:
        pages: `[num_blocks, page_size]`.
        layout: How a page is laid out.
        k_scale: The layer's scale of K; ignored where the pages hold scales.
        v_scale: The layer's scale of V; ignored where the pages hold scales.
    """
    fmt = layout.format
    codes = as_codes(pages, fmt)
    keys, values = layout.key_view(codes), layout.value_view(codes)
    if not fmt.has_page_scales:
        return ScaledRows(keys, fmt, k_scale), ScaledRows(values, fmt, v_scale)
    key_scales, value_scales = layout.scale_views(codes)
    return (
        SelfScaledRows(keys, key_scales, fmt, layout.head_dim),
        SelfScaledRows(values, value_scales, fmt, layout.head_dim_v),
    )


def _scatter(target: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    """Write `new`, `[num_tokens, ...]`, to `target`, `[num_blocks, block_size, ...]`, by slot."""
    if target.shape[0] > 0:
        valid = slot_mapping >= 0
        target[split_slots(slot_mapping[valid], target.shape[1])] = new[valid]


def _masked(numbers: Tensor, valid: Tensor) -> Tensor:
    """Set rows that hold no entry to 0, in `[n, rows, num_kv_heads, width]`."""
    # Unwritten bytes may be NaN, and a masked probability of 0 would not hide them.
    return torch.where(valid[:, :, None, None], numbers, 0.0)
