"""varlen_attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.formats import format_of_numbers
from quantattn.reference._attend import Softmax, attend, finish_output, load_query
from quantattn.reference._pages import ScaledRows, as_codes
from quantattn.reference._tiling import Batch

__all__ = ["varlen_attention"]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
    """See `quantattn.ops.varlen_attention`; the LSE is empty where it is not asked for."""
    # Packed keys are pages of one token each, those of a sequence in order.
    fmt = format_of_numbers(key.dtype)
    first, position = cu_seqlens_k[:-1, None], torch.arange(max_seqlen_k, device=key.device)
    out, lse = attend(
        load_query(query, q_scale, key.shape[1]),
        ScaledRows(as_codes(key, fmt)[:, None], fmt, k_scale),
        ScaledRows(as_codes(value, fmt)[:, None], fmt, v_scale),
        Batch(cu_seqlens_q, cu_seqlens_k.diff(), first + position, max_seqlen_q),
        Softmax(softmax_scale, causal, sliding_window, logits_soft_cap, sinks, prob_scale),
    )
    out = finish_output(out, out_scale, round_through, out_dtype)
    return out, lse if return_lse else lse.new_empty(0)
