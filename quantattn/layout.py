"""The bytes of a page: where K and V rows and their scales lie, as views made from strides.

A layer's pages are one tensor `[num_blocks, page_size]`, unit stride inside a page, any stride
between pages. A page holds all K rows, then all V rows; NHD keeps a token's heads together, HND a
head's tokens. A contiguous `[num_blocks, 2, block_size, num_kv_heads, head_dim]` (NHD) or
`[num_blocks, 2, num_kv_heads, block_size, head_dim]` (HND) tensor is such pages by `.flatten(1)`.

Pages of the formats that keep a scale for each row are bytes, in one of two placements:

- page: K codes and V codes as above, then the scales of K, then those of V, float32, one run a
  head: `[num_kv_heads, block_size]`; int4 `[num_kv_heads, 2, block_size]`, scales before offsets.
- inline: each token and head is K codes, K scale, V codes, V scale (int4: and offset, behind the
  scale); these records lie in NHD or HND order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from quantattn.errors import FormatError
from quantattn.formats import CacheFormat, parse_kv_cache_dtype

__all__ = ["HEAD_ORDERS", "PAD_SLOT", "PageLayout", "split_slots"]

PAD_SLOT = -1
"""Slot of a token that is padding: nothing is written. Schedulers send it in `slot_mapping`."""

HEAD_ORDERS = ("HND", "NHD")
SCALE_PLACEMENTS = ("inline", "page")

WORD = 4
"""Bytes of a float32."""

_AUTO = parse_kv_cache_dtype("auto")
# Stands for `auto`: Dynamo of torch 2.11 takes no object as the default of a field.
_UNSAID = cast(CacheFormat, None)


@dataclass(frozen=True)
class PageLayout:
    """How one layer's pages are laid out.

    A latent cache (MLA) is one head of `head_dim` = latent and rope width with `head_dim_v` 0.

    Attributes:
        num_kv_heads: KV heads in a page.
        head_dim: Numbers of a K row.
        head_dim_v: Numbers of a V row; 0 where a page holds no V.
        layout: `NHD` (token major) or `HND` (head major).
        format: What the rows hold; None: `auto`. Pages of formats with scales in the page are
            counted in bytes, all others in elements.
        scale_placement: `page` or `inline`: where such scales lie; no other format has a use for
            it.

    Raises:
        FormatError: `layout` or `scale_placement` is unknown, a width is out of range, or a row of
            codes would leave the scale behind it off a multiple of 4 bytes.

    Example:
        >>> PageLayout(num_kv_heads=2, head_dim=8, head_dim_v=4, layout="NHD").page_size(16)
        384
        >>> int8 = parse_kv_cache_dtype("int8_per_token_head")
        >>> PageLayout(2, 8, 4, format=int8).page_size(16)
        640
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    layout: str = "NHD"
    format: CacheFormat = _UNSAID
    scale_placement: str = "page"

    def __post_init__(self) -> None:
        if self.format is _UNSAID:
            object.__setattr__(self, "format", _AUTO)
        if self.layout not in HEAD_ORDERS:
            raise FormatError(f"layout: got {self.layout!r}, expected one of {HEAD_ORDERS}")
        if self.scale_placement not in SCALE_PLACEMENTS:
            raise FormatError(
                f"scale_placement: got {self.scale_placement!r}, expected one of {SCALE_PLACEMENTS}"
            )
        if self.num_kv_heads < 1 or self.head_dim < 1 or self.head_dim_v < 0:
            raise FormatError(
                f"page layout: got num_kv_heads {self.num_kv_heads}, head_dim {self.head_dim},"
                f" head_dim_v {self.head_dim_v}; expected at least 1, 1 and 0"
            )
        if self.format.has_page_scales:
            self._check_row_widths()

    @property
    def token_size(self) -> int:
        """Elements of one token in a page: K and V of all heads, with the scales beside them."""
        return self.num_kv_heads * (self._row_size(0) + self._row_size(1))

    def page_size(self, block_size: int) -> int:
        """Elements of a page of `block_size` tokens, scales included."""
        return block_size * self.token_size

    def block_size(self, pages: Tensor) -> int:
        """Tokens a page holds.

        Args:
            pages: One layer's pages, `[num_blocks, page_size]`.

        Raises:
            FormatError: A page is not a whole number of tokens.
        """
        page_size, token_size = pages.shape[1], self.token_size
        if page_size == 0 or page_size % token_size != 0:
            raise FormatError(
                f"kv_cache: a page has {page_size} elements, which is no multiple of the"
                f" {token_size} of one token (num_kv_heads {self.num_kv_heads}, head_dim"
                f" {self.head_dim}, head_dim_v {self.head_dim_v}, {self.format.name}); pass pages"
                " of this layer"
            )
        return page_size // token_size

    def key_view(self, pages: Tensor) -> Tensor:
        """View the K rows, `[num_blocks, block_size, num_kv_heads, code_width]`; shares memory.

        `code_width` is `head_dim`; half of it where a byte holds two codes.
        """
        return self._codes(pages, 0)

    def value_view(self, pages: Tensor) -> Tensor:
        """View the V rows, `[num_blocks, block_size, num_kv_heads, code_width]`; shares memory.

        `code_width` is `head_dim_v`; half of it where a byte holds two codes.
        """
        return self._codes(pages, 1)

    def key_scale_view(self, pages: Tensor) -> Tensor:
        """View the scales of the K rows; shares memory with pages of a format that has them.

        Returns:
            float32 `[num_blocks, block_size, num_kv_heads]`; int4
            `[num_blocks, block_size, num_kv_heads, 2]`: scale and offset.

        Raises:
            FormatError: The pages do not start at multiples of 4 bytes.
        """
        return self._scales(pages, 0)

    def value_scale_view(self, pages: Tensor) -> Tensor:
        """View the scales of the V rows, as `key_scale_view` does.

        Raises:
            FormatError: The pages do not start at multiples of 4 bytes.
        """
        return self._scales(pages, 1)

    def scale_views(self, pages: Tensor) -> tuple[Tensor, ...]:
        """View all scales that lie in the pages, K's and V's; none for a format without them.

        Raises:
            FormatError: The pages do not start at multiples of 4 bytes.
        """
        if not self.format.has_page_scales:
            return ()
        return self._scales(pages, 0), self._scales(pages, 1)

    def check_alignment(self, pages: Tensor) -> None:
        """Check that scales in these pages can be read as float32.

        Raises:
            FormatError: The pages do not start at multiples of 4 bytes.
        """
        if not self.format.has_page_scales:
            return
        offset, stride = pages.storage_offset(), pages.stride(0)
        if offset % WORD != 0 or stride % WORD != 0:
            raise FormatError(
                f"kv_cache: pages start {offset} bytes into their storage and {stride} bytes apart;"
                f" {self.format.name} keeps float32 scales in them, so make both a multiple of"
                f" {WORD}"
            )

    def _check_row_widths(self) -> None:
        step = WORD * 8 // (self.format.bits or 8)
        if self.head_dim_v == 0 or self.head_dim % step != 0 or self.head_dim_v % step != 0:
            raise FormatError(
                f"head_dim, head_dim_v: got {self.head_dim} and {self.head_dim_v} for"
                f" {self.format.name}, whose float32 scales need rows of whole words; pad both to"
                f" a positive multiple of {step}, or use another kv_cache_dtype"
            )

    def _code_width(self, side: int) -> int:
        return self.format.code_width(self.head_dim_v if side else self.head_dim)

    def _row_size(self, side: int) -> int:
        """Elements of a row of K (side 0) or V (side 1), its scales included."""
        return self._code_width(side) + WORD * self.format.row_scales

    @property
    def _is_inline(self) -> bool:
        return self.format.has_page_scales and self.scale_placement == "inline"

    def _codes(self, pages: Tensor, side: int) -> Tensor:
        block_size, width = self.block_size(pages), self._code_width(side)
        if self._is_inline:
            pitch, start = self.token_size // self.num_kv_heads, side * self._row_size(0)
        else:
            pitch = width
            start = side * block_size * self.num_kv_heads * self._code_width(0)
        return pages.as_strided(
            (pages.shape[0], block_size, self.num_kv_heads, width),
            (pages.stride(0), *self._record_strides(block_size, pitch), 1),
            pages.storage_offset() + start,
        )

    def _scales(self, pages: Tensor, side: int) -> Tensor:
        block_size, count = self.block_size(pages), self.format.row_scales
        self.check_alignment(pages)
        words = pages.view(torch.float32)
        if self._is_inline:
            start = side * self._row_size(0) + self._code_width(side)
            pitch = self.token_size // self.num_kv_heads // WORD
            strides = (*self._record_strides(block_size, pitch), 1)
        else:
            rows = block_size * self.num_kv_heads
            codes = rows * (self._code_width(0) + self._code_width(1))
            start = codes + side * rows * count * WORD
            strides = (1, count * block_size, block_size)
        view = words.as_strided(
            (pages.shape[0], block_size, self.num_kv_heads, count),
            (words.stride(0), *strides),
            words.storage_offset() + start // WORD,
        )
        return view if count > 1 else view.squeeze(3)

    def _record_strides(self, block_size: int, pitch: int) -> tuple[int, int]:
        """Distance between tokens and between heads of records that are `pitch` long."""
        if self.layout == "NHD":
            return self.num_kv_heads * pitch, pitch
        return pitch, block_size * pitch


def split_slots(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Split slots into block ids and offsets: slot = block * block_size + offset.

    Args:
        slots: Slots of any shape, int64, none of them padding.
        block_size: Tokens a page.

    Example:
        >>> import torch
        >>> split_slots(torch.tensor([5, 16]), 16)
        (tensor([0, 1]), tensor([5, 0]))
    """
    blocks = slots.div(block_size, rounding_mode="floor")
    return blocks, slots - blocks * block_size
