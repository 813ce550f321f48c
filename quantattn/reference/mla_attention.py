"""mla_attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.reference._attend import Softmax, attend, finish_output, load_query
from quantattn.reference._pages import ScaledRows, as_codes
from quantattn.reference._tiling import Batch

__all__ = ["mla_attention"]


def mla_attention(
    query: Tensor,
    kv_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    latent_dim: int,
    kv_cache_dtype: str,
    scale: Tensor | None,
    q_scale: Tensor | None,
    softmax_scale: float,
    out_scale: Tensor | None,
    round_through: bool,
    out_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.mla_attention`; the LSE is empty where it is not asked for."""
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    rows = PageLayout(1, query.shape[2], 0).key_view(as_codes(kv_cache, fmt))
    out, lse = attend(
        load_query(query, q_scale, 1),
        ScaledRows(rows, fmt, scale),
        ScaledRows(rows[..., :latent_dim], fmt, scale),
        Batch(cu_seqlens_q, seq_lens, block_table, max_seqlen_q),
        Softmax(softmax_scale),
    )
    out = finish_output(out, out_scale, round_through, out_dtype)
    return out, lse if return_lse else lse.new_empty(0)
