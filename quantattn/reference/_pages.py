"""Rows of pages in plain torch: stored by slot, loaded by block, in fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantattn.arithmetic import decode_fp8, encode_fp8, quantize_fp8
from quantattn.formats import CacheFormat
from quantattn.layout import split_slots

__all__ = ["RowView", "as_codes"]


def as_codes(pages: Tensor, fmt: CacheFormat) -> Tensor:
    """View FP8 pages as bytes, which can be indexed on every device; others stay as they are."""
    return pages.view(torch.uint8) if fmt.is_quantized else pages


@dataclass(frozen=True)
class RowView:
    """The K rows or the V rows of one layer's pages, and what their numbers mean.

    Attributes:
        rows: `[num_blocks, block_size, num_kv_heads, width]`, bytes where `fmt` is FP8.
        fmt: What the rows hold.
        scale: float32, `[]`, `[1]` or `[num_kv_heads]`; None: 1.0. Ignored where `fmt` uses none.
    """

    rows: Tensor
    fmt: CacheFormat
    scale: Tensor | None

    @property
    def elements_per_token(self) -> int:
        """Numbers of one token, all heads."""
        return self.rows.shape[2] * self.rows.shape[3]

    def store(self, new: Tensor, slot_mapping: Tensor) -> None:
        """Write `new`, `[num_tokens, num_kv_heads, width]`; a negative slot is skipped."""
        if new.shape[0] == 0 or self.rows.shape[0] == 0:
            return
        stored = self._encode(new)
        # Padding repeats one valid row, or rewrites slot 0 with itself: the shapes stay fixed, so
        # neither a sync nor a mask that CUDA graphs cannot capture is needed.
        valid = slot_mapping >= 0
        any_valid = valid.any()
        own = torch.arange(len(valid), device=valid.device)
        source = torch.where(valid, own, valid.int().argmax())
        slots = torch.where(any_valid, slot_mapping[source], 0)
        stored = torch.where(any_valid, stored[source], self.rows[0, 0])
        self.rows[split_slots(slots, self.rows.shape[1])] = stored

    def load(self, blocks: Tensor, valid: Tensor) -> Tensor:
        """Dequantize the rows of some blocks.

        Args:
            blocks: Block ids, `[n, num_blocks]`, all inside the pages.
            valid: Which of the rows hold an entry, `[n, num_blocks * block_size]`, bool.

        Returns:
            float32 `[n, num_kv_heads, num_blocks * block_size, width]`; rows that are not valid are
            0.
        """
        stored = self.rows[blocks].flatten(1, 2)
        dtype = self.fmt.storage_dtype
        numbers = stored.float() if dtype is None else decode_fp8(stored, dtype)
        # Unwritten bytes may be NaN, and a masked probability of 0 would not hide them.
        numbers = torch.where(valid[:, :, None, None], numbers, 0.0)
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
