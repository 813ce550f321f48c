"""PagedKVCache: owns or borrows the pages of all layers and hands out one layer's pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantattn import cache_writes
from quantattn.errors import FormatError
from quantattn.formats import CacheFormat
from quantattn.layout import PageLayout
from quantattn.validation import MODEL_DTYPES, check_pages, check_tensor, served_format

__all__ = ["PagedKVCache"]


class PagedKVCache:
    """Pages for the keys and values of every layer, zeroed when made.

    A latent cache (MLA) has `num_kv_heads=1`, `head_dim` = latent and rope width, `head_dim_v=0`.

    Args:
        num_layers: Layers that have pages of their own.
        num_blocks: Pages a layer.
        block_size: Tokens a page.
        num_kv_heads: KV heads.
        head_dim: Width of a key, elements.
        head_dim_v: Width of a value, elements; None: `head_dim`.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`) or `fp8_e5m2`.
        dtype: The model's dtype, stored as it is by an `auto` cache.
        layout: `NHD` or `HND`.
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
        device: torch.device | str | None = None,
    ) -> None:
        if min(num_layers, num_blocks, block_size) < 1:
            raise FormatError(
                f"num_layers, num_blocks, block_size: got {num_layers}, {num_blocks},"
                f" {block_size}, expected at least 1 each"
            )
        if dtype not in MODEL_DTYPES:
            raise FormatError(f"dtype: got {dtype}, expected one of {MODEL_DTYPES}")
        fmt = served_format(kv_cache_dtype)
        page_layout = _page_layout(num_kv_heads, head_dim, head_dim_v, layout)
        shape = (num_layers, num_blocks, page_layout.page_size(block_size))
        storage = torch.zeros(shape, dtype=fmt.storage_dtype or dtype, device=device)
        self._bind(list(storage.unbind(0)), page_layout, fmt)

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
    ) -> PagedKVCache:
        """Use pages that an engine owns; they are neither copied nor zeroed.

        Args:
            pages_per_layer: One tensor `[num_blocks, page_size]` a layer, unit stride inside a
                page.
            num_kv_heads: KV heads.
            head_dim: Width of a key, elements.
            head_dim_v: Width of a value, elements; None: `head_dim`.
            kv_cache_dtype: What the pages hold.
            layout: `NHD` or `HND`.

        Raises:
            FormatError: There are no pages, their layers differ, or a layer's pages do not fit.

        Example:
            >>> pages = torch.zeros(4, 2, 16, 2, 8).flatten(1)
            >>> PagedKVCache.borrow([pages], num_kv_heads=2, head_dim=8).block_size
            16
        """
        if not pages_per_layer:
            raise FormatError("pages_per_layer: got no tensors, expected one a layer")
        fmt = served_format(kv_cache_dtype)
        page_layout = _page_layout(num_kv_heads, head_dim, head_dim_v, layout)
        first = pages_per_layer[0]
        for pages in pages_per_layer:
            check_pages(pages, page_layout, fmt, device=first.device)
            check_tensor("pages_per_layer", pages, shape=first.shape, dtypes=(first.dtype,))
        cache = cls.__new__(cls)
        cls._bind(cache, list(pages_per_layer), page_layout, fmt)
        return cache

    def _bind(self, pages: list[Tensor], page_layout: PageLayout, fmt: CacheFormat) -> None:
        self._pages = pages
        self.page_layout = page_layout
        self.format = fmt
        self.num_layers = len(pages)
        self.block_size = page_layout.block_size(pages[0])

    @property
    def num_blocks(self) -> int:
        """Pages a layer."""
        return self._pages[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the pages of all layers, gaps between borrowed pages left out."""
        return sum(pages.numel() * pages.element_size() for pages in self._pages)

    def layer(self, index: int) -> Tensor:
        """Pages of one layer, `[num_blocks, page_size]`; shares memory with the cache."""
        return self._pages[index]

    def clear(self) -> None:
        """Zero every page, so that scales may change again."""
        for pages in self._pages:
            # Zero bytes are zero in every format, and not every device fills FP8 tensors.
            pages.view(torch.uint8).zero_()
            cache_writes.forget(pages)


def _page_layout(
    num_kv_heads: int, head_dim: int, head_dim_v: int | None, layout: str
) -> PageLayout:
    width_v = head_dim if head_dim_v is None else head_dim_v
    return PageLayout(num_kv_heads, head_dim, width_v, layout)
