"""Checks that the attention operations share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantattn.errors import FormatError, ScaleError
from quantattn.validation import MODEL_DTYPES, check_scale, check_tensor

__all__ = ["QUERY_DTYPES", "check_batch", "check_query", "check_scores", "model_dtype"]

QUERY_DTYPES = (*MODEL_DTYPES, torch.float8_e4m3fn)


def check_query(query: Tensor, q_scale: Tensor | None, num_kv_heads: int) -> None:
    """Check the query, and that it comes with a scale if and only if it is FP8.

    Raises:
        FormatError: Its dtype or shape is not served.
        ScaleError: The scale is absent, superfluous or does not fit.
    """
    check_tensor("query", query, shape=(None, None, None), dtypes=QUERY_DTYPES)
    num_heads = query.shape[1]
    if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        raise FormatError(
            f"query: {num_heads} heads do not share num_kv_heads {num_kv_heads} evenly; expected"
            " a multiple of num_kv_heads"
        )
    if query.dtype == torch.float8_e4m3fn:
        check_scale("q_scale", q_scale, num_kv_heads, query.device)
    elif q_scale is not None:
        raise ScaleError(
            f"q_scale: got one for a query of {query.dtype}, expected None; quantize the query"
            " with static_quant_fp8 first, or leave q_scale out",
            role="q",
        )


def check_batch(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    *,
    device: torch.device,
) -> None:
    """Check the index tensors against each other.

    Raises:
        FormatError: A dtype, shape or device does not fit.
    """
    int32 = (torch.int32,)
    check_tensor("seq_lens", seq_lens, shape=(None,), dtypes=int32, device=device)
    num_seqs = seq_lens.shape[0]
    check_tensor("cu_seqlens_q", cu_seqlens_q, shape=(num_seqs + 1,), dtypes=int32, device=device)
    check_tensor("block_table", block_table, shape=(num_seqs, None), dtypes=int32, device=device)
    if max_seqlen_q < 0:
        raise FormatError(f"max_seqlen_q: got {max_seqlen_q}, expected a count of tokens")


def check_scores(
    softmax_scale: float, causal: bool, sliding_window: int | None, logits_soft_cap: float | None
) -> None:
    """Check what turns scores into probabilities.

    Raises:
        FormatError: A number is out of its range, or there is a window without causality.
    """
    if not -math.inf < softmax_scale < math.inf:
        raise FormatError(f"softmax_scale: got {softmax_scale}, expected a finite number")
    if sliding_window is not None and (sliding_window < 1 or not causal):
        raise FormatError(
            f"sliding_window: got {sliding_window} with causal={causal}, expected at least 1 key"
            " and causal=True, or None"
        )
    if logits_soft_cap is not None and not 0.0 < logits_soft_cap < math.inf:
        raise FormatError(
            f"logits_soft_cap: got {logits_soft_cap}, expected a positive number, or None"
        )


def model_dtype(query: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that an unquantized output has: `out_dtype`, else the query's, else bf16.

    Raises:
        FormatError: `out_dtype` is no model dtype.
    """
    if out_dtype is None:
        return query.dtype if query.dtype in MODEL_DTYPES else torch.bfloat16
    if out_dtype not in MODEL_DTYPES:
        raise FormatError(f"out_dtype: got {out_dtype}, expected one of {MODEL_DTYPES}")
    return out_dtype
