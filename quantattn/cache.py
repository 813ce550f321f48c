"""PagedKVCache: owns or borrows the pages of all layers and hands them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantattn import cache_writes
from quantattn.errors import FormatError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.page_scales import forget_page_scales, reset_page_scales
from quantattn.paged_blocks import PagedBlocks
from quantattn.validation import MODEL_DTYPES, check_pages, check_tensor

__all__ = ["PagedKVCache"]


class PagedKVCache(PagedBlocks):
    """Pages for the keys and values of every layer, zeroed when made.

    Where a format keeps scales in its pages, those start at 1.0. Whatever moves a block moves all
    its bytes, so the scales go along. A latent cache (MLA) has `num_kv_heads=1`, `head_dim` =
    latent and rope width, `head_dim_v=0`.

    Args:
        num_layers: Layers that have pages of their own.
        num_blocks: Pages a layer.
        block_size: Tokens a page.
        num_kv_heads: KV heads.
        head_dim: Width of a key, elements.
        head_dim_v: Width of a value, elements; None: `head_dim`.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`), `fp8_e5m2`, `fp8_per_token_head`,
            `int8_per_token_head` or `int4_per_token_head`.
        dtype: The model's dtype, stored as it is by an `auto` cache.
        layout: `NHD` or `HND`.
        scale_placement: `page` or `inline`: where the scales of the formats per token and head lie.
        device: Where the pages are; None: torch's default device.

    Attributes:
        page_layout: How a page is laid out.
        format: What entries are stored as.
        num_layers: Layers that have pages of their own.
        block_size: Tokens a page.

    Raises:
        FormatError: A count is below 1, or the format or dtype is not served.

    Example:
        >>> cache = PagedKVCache(2, 4, 16, num_kv_heads=2, head_dim=8, kv_cache_dtype="fp8")
        >>> cache.layer(1).shape, cache.nbytes
        (torch.Size([4, 512]), 4096)
        >>> cache.copy_blocks([(0, 3), (1, 2)])
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        kv_cache_dtype: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        layout: str = "NHD",
        scale_placement: str = "page",
        device: torch.device | str | None = None,
    ) -> None:
        if min(num_layers, num_blocks, block_size) < 1:
            raise FormatError(
                f"num_layers, num_blocks, block_size: got {num_layers}, {num_blocks},"
                f" {block_size}, expected at least 1 each"
            )
        if dtype not in MODEL_DTYPES:
            raise FormatError(f"dtype: got {dtype}, expected one of {MODEL_DTYPES}")
        fmt = parse_kv_cache_dtype(kv_cache_dtype)
        width_v = head_dim if head_dim_v is None else head_dim_v
        page_layout = PageLayout(num_kv_heads, head_dim, width_v, layout, fmt, scale_placement)
        shape = (num_layers, num_blocks, page_layout.page_size(block_size))
        storage = torch.zeros(shape, dtype=fmt.storage_dtype or dtype, device=device)
        # A storage that gave its memory back may still live: nothing known of the place holds.
        forget_page_scales(storage.flatten(1))
        super().__init__(list(storage.unbind(0)), page_layout)

    @classmethod
    def borrow(
        cls,
        pages_per_layer: Sequence[Tensor],
        *,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        kv_cache_dtype: str = "auto",
        layout: str = "NHD",
        scale_placement: str = "page",
    ) -> PagedKVCache:
        """Use pages that an engine owns; they are neither copied nor zeroed.

        Scales inside pages that were not seen before are set to 1.0, see `initialize_page_scales`.

        Args:
            pages_per_layer: One tensor `[num_blocks, page_size]` a layer, unit stride inside a
                page.
            num_kv_heads: KV heads.
            head_dim: Width of a key, elements.
            head_dim_v: Width of a value, elements; None: `head_dim`.
            kv_cache_dtype: What the pages hold.
            layout: `NHD` or `HND`.
            scale_placement: `page` or `inline`, as for `PagedKVCache`.

        Raises:
            FormatError: There are no pages, their layers differ, or a layer's pages do not fit.

        Example:
            >>> pages = torch.zeros(4, 2, 16, 2, 8).flatten(1)
            >>> PagedKVCache.borrow([pages], num_kv_heads=2, head_dim=8).block_size
            16
        """
        if not pages_per_layer:
            raise FormatError("pages_per_layer: got no tensors, expected one a layer")
        fmt = parse_kv_cache_dtype(kv_cache_dtype)
        width_v = head_dim if head_dim_v is None else head_dim_v
        page_layout = PageLayout(num_kv_heads, head_dim, width_v, layout, fmt, scale_placement)
        first = pages_per_layer[0]
        for pages in pages_per_layer:
            check_pages(pages, page_layout, fmt, device=first.device)
            check_tensor("pages_per_layer", pages, shape=first.shape, dtypes=(first.dtype,))
        cache = cls.__new__(cls)
        PagedBlocks.__init__(cache, list(pages_per_layer), page_layout)
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of the pages of all layers, gaps between borrowed pages left out."""
        return self.num_layers * self.num_blocks * self.block_nbytes

    def layer(self, index: int) -> Tensor:
        """Pages of one layer, `[num_blocks, page_size]`; shares memory with the cache.

        Example:
            >>> PagedKVCache(2, 4, 16, 2, 8).layer(0).shape
            torch.Size([4, 512])
        """
        return self._pages[index]

    def clear(self) -> None:
        """Zero every page and set scales in pages to 1.0; the layers' scales may change again.

        Example:
            >>> cache = PagedKVCache(1, 4, 16, 2, 8)
            >>> _ = cache.layer(0).fill_(3.0)
            >>> cache.clear()
            >>> int(cache.layer(0).count_nonzero())
            0
        """
        for pages in self._pages:
            # Zero bytes are zero in every format, and not every device fills FP8 tensors.
            pages.view(torch.uint8).zero_()
            reset_page_scales(pages, self.page_layout)
            cache_writes.forget(pages)
