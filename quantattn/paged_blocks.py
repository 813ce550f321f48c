"""PagedBlocks: the blocks of every layer's pages, and what moves them with their scales."""

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
from quantattn.formats import CacheFormat
from quantattn.host_blocks import HostBlocks
from quantattn.layout import PageLayout
from quantattn.page_scales import initialize_page_scales, reset_page_scales
from quantattn.validation import check_tensor

__all__ = ["PagedBlocks"]


class PagedBlocks:
    """Pages of every layer; scales in pages that were not seen before are set to 1.0.

    Args:
        pages_per_layer: One tensor `[num_blocks, page_size]` a layer, all alike.
        page_layout: How a page is laid out.

    Attributes:
        page_layout: How a page is laid out.
        num_layers: Layers that have pages of their own.
        block_size: Tokens a page.

    Example:
        >>> from quantattn.layout import PageLayout
        >>> from quantattn.paged_blocks import PagedBlocks
        >>> PagedBlocks([torch.zeros(4, 512)], PageLayout(2, 8, 8)).block_size
        16
    """

    def __init__(self, pages_per_layer: list[Tensor], page_layout: PageLayout) -> None:
        self._pages = pages_per_layer
        self.page_layout = page_layout
        self.num_layers = len(pages_per_layer)
        self.block_size = page_layout.block_size(pages_per_layer[0])
        for pages in pages_per_layer:
            initialize_page_scales(pages, page_layout)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise FormatError(
            f"{type(self).__name__}: it cannot be copied or pickled, as nobody would know which"
            " scales wrote the copy; use swap_out and swap_in, or save_blocks, to keep blocks"
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
