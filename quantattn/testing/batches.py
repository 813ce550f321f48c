"""Batches whose keys and values lie in pages of poison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.metadata import AttentionMetadata
from quantattn.ops import write_kv

__all__ = ["PagedBatch", "make_batch", "poisoned_pages"]

POISON = 0xFF
"""A byte that makes every stored number a NaN, in FP8, fp16, bf16 and fp32."""
GARBAGE_BLOCK = 2**31 - 1
"""What block tables hold behind a sequence's last block."""


@dataclass(frozen=True)
class PagedBatch:
    """A batch whose keys and values are in their pages; every other byte of the pages is poison.

    Attributes:
        query: `[num_tokens, num_heads, head_dim]`; rows of padding are NaN.
        key: Keys of all sequences, one after another, `[sum(seq_lens), num_kv_heads, head_dim]`.
        value: Their values, `[sum(seq_lens), num_kv_heads, head_dim_v]`.
        pages: `[num_blocks, page_size]`, a gap of poison between the pages.
        metadata: The batch; its block table is shuffled and ends in garbage.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    metadata: AttentionMetadata


def poisoned_pages(num_blocks: int, page_size: int, dtype: torch.dtype, *, gap: int = 8) -> Tensor:
    """Make pages `[num_blocks, page_size]` of NaN with `gap` elements between them.

    Example:
        >>> poisoned_pages(3, 4, torch.bfloat16).stride()
        (12, 1)
    """
    bytes_ = torch.full((num_blocks, (page_size + gap) * dtype.itemsize), POISON, dtype=torch.uint8)
    return bytes_.view(dtype)[:, :page_size]


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_cache_dtype: str = "auto",
    layout: str = "NHD",
    scale_placement: str = "page",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    padding: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """Draw a batch of normal numbers on the CPU and write its keys and values with `write_kv`.

    Args:
        query_lens: New tokens of each sequence.
        seq_lens: Keys of each sequence, the new ones included.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Width of a key.
        head_dim_v: Width of a value; None: `head_dim`.
        block_size: Tokens a page.
        dtype: Model dtype.
        kv_cache_dtype: What the pages hold.
        layout: `NHD` or `HND`.
        scale_placement: `page` or `inline`.
        k_scale: Scale of the written keys; None where `write_kv` ignores it.
        v_scale: Scale of the written values; None where `write_kv` ignores it.
        padding: Rows of padding behind the last sequence's.
        seed: Seed of the numbers and of the block order.

    Example:
        >>> make_batch([1], [5], num_heads=2, num_kv_heads=1, head_dim=8).pages.shape
        torch.Size([2, 256])
    """
    generator = torch.Generator().manual_seed(seed)
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    page_layout = PageLayout(
        num_kv_heads, head_dim, head_dim_v or head_dim, layout, fmt, scale_placement
    )
    total = sum(query_lens) + padding
    query = torch.randn(total, num_heads, head_dim, generator=generator).to(dtype)
    query[sum(query_lens) :] = torch.nan
    key = torch.randn(sum(seq_lens), num_kv_heads, head_dim, generator=generator).to(dtype)
    value = torch.randn(sum(seq_lens), num_kv_heads, page_layout.head_dim_v, generator=generator)
    value = value.to(dtype)
    table, num_blocks = _shuffled_table(seq_lens, block_size, generator)
    pages = poisoned_pages(
        num_blocks, page_layout.page_size(block_size), fmt.storage_dtype or dtype
    )
    everything = AttentionMetadata.from_lengths(seq_lens, seq_lens, table, block_size)
    write_kv(
        key,
        value,
        pages,
        everything.slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=kv_cache_dtype,
        layout=layout,
        scale_placement=scale_placement,
    )
    metadata = AttentionMetadata.from_lengths(
        query_lens, seq_lens, table, block_size, num_tokens=total
    )
    return PagedBatch(query, key, value, pages, metadata)


def _shuffled_table(
    seq_lens: Sequence[int], block_size: int, generator: torch.Generator
) -> tuple[Tensor, int]:
    """Block table with garbage behind each row's end; the number of blocks, one of them unused."""
    counts = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(counts) + 1, generator=generator).int()
    table = torch.full((len(counts), max(counts, default=0) + 1), GARBAGE_BLOCK, dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[start : start + count]
        start += count
    return table, len(order)
