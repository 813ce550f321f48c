"""paged_attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.reference._attend import Softmax, attend, finish_output, load_query
from quantattn.reference._pages import kv_rows
from quantattn.reference._tiling import Batch
from quantattn.rotation import rotate, rotate_back

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    num_kv_heads: int,
    head_dim_v: int,
    kv_cache_dtype: str,
    layout: str,
    scale_placement: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale: Tensor | None,
    prob_scale: Tensor | None,
    softmax_scale: float,
    causal: bool,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    sinks: Tensor | None,
    out_scale: Tensor | None,
    round_through: bool,
    out_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.paged_attention`; the LSE is empty where it is not asked for."""
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    head_dim = query.shape[2]
    page_layout = PageLayout(num_kv_heads, head_dim, head_dim_v, layout, fmt, scale_placement)
    numbers = load_query(query, q_scale, num_kv_heads)
    out, lse = attend(
        rotate(numbers) if fmt.is_rotated else numbers,
        *kv_rows(kv_cache, page_layout, k_scale, v_scale),
        Batch(cu_seqlens_q, seq_lens, block_table, max_seqlen_q),
        Softmax(softmax_scale, causal, sliding_window, logits_soft_cap, sinks, prob_scale),
    )
    if fmt.is_rotated:
        out = rotate_back(out)
    out = finish_output(out, out_scale, round_through, out_dtype)
    return out, lse if return_lse else lse.new_empty(0)
