"""The bytes of a page: where K and V rows lie, as views made from strides.

A layer's pages are one tensor `[num_blocks, page_size]`, unit stride inside a page, any stride
between pages. A page holds all K rows, then all V rows; NHD keeps a token's heads together, HND a
head's tokens. A contiguous `[num_blocks, 2, block_size, num_kv_heads, head_dim]` (NHD) or
`[num_blocks, 2, num_kv_heads, block_size, head_dim]` (HND) tensor is such pages by `.flatten(1)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantattn.errors import FormatError

__all__ = ["HEAD_ORDERS", "PAD_SLOT", "PageLayout", "split_slots"]

PAD_SLOT = -1
"""Slot of a token that is padding: nothing is written. Schedulers send it in `slot_mapping`."""

HEAD_ORDERS = ("HND", "NHD")


@dataclass(frozen=True)
class PageLayout:
    """How one layer's pages are laid out.

    A latent cache (MLA) is one head of `head_dim` = latent and rope width with `head_dim_v` 0.

    Attributes:
        num_kv_heads: KV heads in a page.
        head_dim: Width of a K row, elements.
        head_dim_v: Width of a V row, elements; 0 where a page holds no V.
        order: `NHD` (token major) or `HND` (head major).

    Raises:
        FormatError: `order` is neither, or a width is out of range.

    Example:
        >>> PageLayout(num_kv_heads=2, head_dim=8, head_dim_v=4, order="NHD").page_size(16)
        384
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    order: str = "NHD"

    def __post_init__(self) -> None:
        if self.order not in HEAD_ORDERS:
            raise FormatError(f"layout: got {self.order!r}, expected one of {HEAD_ORDERS}")
        if self.num_kv_heads < 1 or self.head_dim < 1 or self.head_dim_v < 0:
            raise FormatError(
                f"page layout: got num_kv_heads {self.num_kv_heads}, head_dim {self.head_dim},"
                f" head_dim_v {self.head_dim_v}; expected at least 1, 1 and 0"
            )

    @property
    def token_size(self) -> int:
        """Elements of one token in a page, K and V of all heads."""
        return self.num_kv_heads * (self.head_dim + self.head_dim_v)

    def page_size(self, block_size: int) -> int:
        """Elements of a page of `block_size` tokens."""
        return block_size * self.token_size

    def block_size(self, pages: Tensor) -> int:
        """Tokens a page holds.

        Args:
            pages: One layer's pages, `[num_blocks, page_size]`.

        Raises:
            FormatError: A page is not a whole number of tokens.
        """
        page_size = pages.shape[1]
        if page_size == 0 or page_size % self.token_size != 0:
            raise FormatError(
                f"kv_cache: a page has {page_size} elements, which is no multiple of the"
                f" {self.token_size} of one token (num_kv_heads {self.num_kv_heads} x (head_dim"
                f" {self.head_dim} + head_dim_v {self.head_dim_v})); pass pages of this layer"
            )
        return page_size // self.token_size

    def key_view(self, pages: Tensor) -> Tensor:
        """View the K rows, `[num_blocks, block_size, num_kv_heads, head_dim]`; shares memory."""
        return self._rows(pages, self.head_dim, 0)

    def value_view(self, pages: Tensor) -> Tensor:
        """View the V rows, `[num_blocks, block_size, num_kv_heads, head_dim_v]`; shares memory."""
        start = self.block_size(pages) * self.num_kv_heads * self.head_dim
        return self._rows(pages, self.head_dim_v, start)

    def _rows(self, pages: Tensor, width: int, start: int) -> Tensor:
        block_size = self.block_size(pages)
        if self.order == "NHD":
            token_stride, head_stride = self.num_kv_heads * width, width
        else:
            token_stride, head_stride = width, block_size * width
        return pages.as_strided(
            (pages.shape[0], block_size, self.num_kv_heads, width),
            (pages.stride(0), token_stride, head_stride, 1),
            pages.storage_offset() + start,
        )


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
