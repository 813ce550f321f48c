"""PagedKVCache: owns or borrows the pages of all layers, hands them out and moves their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from quantattn import block_moves, cache_writes
from quantattn.cache_identity import (
    Identity,
    LayerScales,
    cache_identity,
    check_same_identity,
    identity_fingerprint,
)
from quantattn.errors import FormatError
from quantattn.formats import CacheFormat, parse_kv_cache_dtype
from quantattn.host_blocks import HostBlocks
from quantattn.layout import PageLayout
from quantattn.page_scales import forget_page_scales, initialize_page_scales, reset_page_scales
from quantattn.validation import MODEL_DTYPES, check_pages, check_tensor

__all__ = ["PagedKVCache"]


class PagedKVCache:
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
        self._bind(list(storage.unbind(0)), page_layout)

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
        cls._bind(cache, list(pages_per_layer), page_layout)
        return cache

    def _bind(self, pages_per_layer: list[Tensor], page_layout: PageLayout) -> None:
        self._pages = pages_per_layer
        self.page_layout = page_layout
        self.num_layers = len(pages_per_layer)
        self.block_size = page_layout.block_size(pages_per_layer[0])
        for pages in pages_per_layer:
            initialize_page_scales(pages, page_layout)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise FormatError(
            "PagedKVCache: it cannot be copied or pickled, as nobody would know which scales wrote"
            " the copy; use swap_out and swap_in, or save_blocks, to keep blocks"
        )

    @property
    def format(self) -> CacheFormat:
        """What entries are stored as."""
        return self.page_layout.format

    @property
    def num_blocks(self) -> int:
        """Pages a layer."""
        return self._pages[0].shape[0]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block of one layer, the scales in it included."""
        return self._pages[0].shape[1] * self._pages[0].element_size()

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

    def clear_blocks(self, blocks: Sequence[int] | Tensor) -> None:
        """Zero some blocks of every layer and set the scales in them to 1.0.

        The layers' scales may change again only if these are all blocks.

        Args:
            blocks: Block ids, each once.

        Raises:
            FormatError: An id is out of range or there twice.

        Example:
            >>> cache = PagedKVCache(1, 4, 16, 2, 8)
            >>> _ = cache.layer(0).fill_(3.0)
            >>> cache.clear_blocks([1])
            >>> int(cache.layer(0)[1].count_nonzero()), bool((cache.layer(0)[0] == 3.0).all())
            (0, True)
        """
        ids = block_moves.block_ids("blocks", blocks, self.num_blocks)
        block_moves.zero_blocks(self._pages, ids)
        for pages in self._pages:
            reset_page_scales(pages, self.page_layout, ids.to(pages.device))
            if len(ids) == self.num_blocks:
                cache_writes.forget(pages)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]] | Tensor) -> None:
        """Copy blocks of every layer; all sources are read before any destination is written.

        So `[(0, 1), (1, 0)]` exchanges two blocks.

        Args:
            pairs: Source and destination of each copy, `[num_pairs, 2]`; a source may serve several
                destinations.

        Raises:
            FormatError: An id is out of range, or two pairs have the same destination.

        Example:
            >>> cache = PagedKVCache(1, 4, 16, 2, 8)
            >>> _ = cache.layer(0)[0].fill_(3.0)
            >>> cache.copy_blocks([(0, 2)])
            >>> torch.equal(cache.layer(0)[2], cache.layer(0)[0])
            True
        """
        sources, destinations = block_moves.block_pairs(pairs, self.num_blocks)
        block_moves.copy_blocks(self._pages, sources, destinations)

    def fork(self, blocks: Sequence[int] | Tensor, into: Sequence[int] | Tensor) -> None:
        """Give a second user of some blocks its own copies, before one of the two writes.

        Args:
            blocks: Shared blocks; they stay as they are.
            into: As many free blocks; `into[i]` becomes a copy of `blocks[i]`.

        Raises:
            FormatError: The lists differ in length or share a block, an id is out of range, or one
                is twice in `into`.

        Example:
            >>> cache = PagedKVCache(1, 4, 16, 2, 8)
            >>> _ = cache.layer(0)[:2].fill_(3.0)
            >>> cache.fork([0, 1], [2, 3])
            >>> torch.equal(cache.layer(0)[2:], cache.layer(0)[:2])
            True
        """
        if len(blocks) != len(into):
            raise FormatError(
                f"blocks, into: got {len(blocks)} and {len(into)}, expected a free block for each"
            )
        pairs = list(zip(blocks, into, strict=True))
        sources, destinations = block_moves.block_pairs(pairs, self.num_blocks)
        shared = set(sources.tolist()) & set(destinations.tolist())
        if shared:
            raise FormatError(
                f"blocks, into: got block {min(shared)} in both, expected free blocks"
            )
        block_moves.copy_blocks(self._pages, sources, destinations)

    def fingerprint(self, scales: LayerScales | None = None) -> str:
        """Hash of all that the bytes of a block depend on: a key for blocks kept elsewhere.

        Args:
            scales: `k_scale` and `v_scale` of each layer, as `layer_scales(model)` gives them;
                needed, and read with one synchronisation, where the format uses them.

        Returns:
            64 hexadecimal digits.

        Raises:
            ScaleError: The format needs the scales, and they are absent, or do not fit.

        Example:
            >>> bf16, fp16 = (
            ...     PagedKVCache(1, 4, 16, 2, 8, dtype=d) for d in (torch.bfloat16, torch.half)
            ... )
            >>> bf16.fingerprint() == fp16.fingerprint()
            False
        """
        return identity_fingerprint(self._identity(scales))

    def swap_out(
        self, blocks: Sequence[int] | Tensor, *, scales: LayerScales | None = None
    ) -> HostBlocks:
        """Read blocks of every layer into host memory; the cache keeps them.

        Args:
            blocks: Block ids, each once.
            scales: As for `fingerprint`; what the blocks were written with.

        Raises:
            FormatError: An id is out of range or there twice.
            ScaleError: The format needs the scales, and they are absent, or do not fit.

        Example:
            >>> cache = PagedKVCache(1, 4, 16, 2, 8)
            >>> cache.swap_out([1, 3]).nbytes == 2 * cache.block_nbytes
            True
        """
        ids = block_moves.block_ids("blocks", blocks, self.num_blocks)
        return HostBlocks(block_moves.read_blocks(self._pages, ids), self._identity(scales))

    def swap_in(
        self,
        saved: HostBlocks,
        blocks: Sequence[int] | Tensor,
        *,
        scales: LayerScales | None = None,
    ) -> None:
        """Write saved blocks into blocks of every layer, which may be others than they were.

        Args:
            saved: What `swap_out` or `load_blocks` gave.
            blocks: Where each saved block goes, each id once.
            scales: As for `fingerprint`, the layers' own buffers: as after a write, those may not
                change while the cache holds the blocks.

        Raises:
            FormatError: The bytes mean something else in this cache, as a format, a shape or a
                scale differs; or an id is out of range, there twice, or one too many or too few.
            ScaleError: The format needs the scales, and they are absent, or do not fit.

        Example:
            >>> cache = PagedKVCache(1, 4, 16, 2, 8)
            >>> _ = cache.layer(0)[1].fill_(3.0)
            >>> saved = cache.swap_out([1])
            >>> cache.swap_in(saved, [2])
            >>> torch.equal(cache.layer(0)[2], cache.layer(0)[1])
            True
        """
        ids = block_moves.block_ids("blocks", blocks, self.num_blocks)
        check_same_identity(saved.identity, self._identity(scales))
        shape = (self.num_layers, len(ids), self.block_nbytes)
        check_tensor("saved blocks", saved.data, shape=shape, dtypes=(torch.uint8,))
        block_moves.write_blocks(self._pages, ids, saved.data)
        if self.format.uses_layer_scales and len(ids) > 0:
            for pages, pair in zip(self._pages, scales or (), strict=True):
                for scale in pair:
                    cache_writes.note_write(scale, pages)

    def _identity(self, scales: LayerScales | None) -> Identity:
        dtype = self.format.storage_dtype or self._pages[0].dtype
        return cache_identity(self.page_layout, self.block_size, dtype, self.num_layers, scales)
