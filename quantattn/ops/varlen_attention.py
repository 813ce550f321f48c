"""varlen_attention: schema, checks, fake and dispatch."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from quantattn.errors import FormatError
from quantattn.ops._checks import QUERY_DTYPES, check_query, check_scores, model_dtype
from quantattn.ops._library import register
from quantattn.reference import varlen_attention as reference
from quantattn.validation import (
    FP8_DTYPES,
    MODEL_DTYPES,
    check_group_scale,
    check_scale,
    check_tensor,
)

__all__ = ["varlen_attention"]


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over keys and values that lie one sequence after another.

    out = softmax(query K^T * softmax_scale) V, with K and V as if dequantized exactly. Query i of a
    sequence with q_len queries and k_len keys sits at position k_len - q_len + i.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, fp32, fp16, bf16, or e4m3 with `q_scale`. Rows
            from `cu_seqlens_q[-1]` on are padding: output 0, LSE -inf.
        key: `[num_keys, num_kv_heads, head_dim]`, fp32, fp16, bf16, e4m3 or e5m2, any strides; rows
            from `cu_seqlens_k[-1]` on are not read. `num_heads` is a multiple of `num_kv_heads`.
        value: `[num_keys, num_kv_heads, head_dim_v]`, dtype of `key`, any strides.
        cu_seqlens_q: Prefix sums of the query lengths, `[num_seqs + 1]`, int32, first 0.
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: Longest query, tokens.
        max_seqlen_k: Most keys of a sequence; must not be understated.
        k_scale: Dequantizing multiplier of K, float32, `[]`, `[1]` or `[num_kv_heads]`; ignored
            where `key` is not FP8.
        v_scale: The same for V.
        q_scale: The same for an e4m3 query.
        prob_scale: The same for the probabilities, which are quantized to e4m3 with it; None: they
            stay float32.
        softmax_scale: Multiplier of the logits; None: `head_dim ** -0.5`.
        causal: A row sees no key behind its own position.
        sliding_window: A row at position p sees keys p - sliding_window + 1 to p; None: all.
        logits_soft_cap: Logits become cap * tanh(logit / cap); None: they stay.
        sinks: A logit a head that joins the denominator once, after the cap, `[num_heads]`.
        out_scale: float32, `[]`, `[1]` or `[num_groups]`: the output is quantized to e4m3 with it,
            as `static_quant_fp8` does, from float32.
        round_through: Round to the model's dtype before quantizing the output.
        out_dtype: The model's dtype; None: the query's, bf16 for an e4m3 query.
        return_lse: Also return the log of the denominator.

    Returns:
        Output `[num_tokens, num_heads, head_dim_v]`, model dtype or e4m3. With `return_lse` also
        the natural-log LSE `[num_tokens, num_heads]`, float32, sinks included; a row that sees no
        key gives 0 and -inf.

    Raises:
        FormatError: A dtype, shape, device or option does not fit.
        ScaleError: A scale is absent or superfluous, or its dtype, shape or device does not fit.

    Example:
        >>> packed = torch.randn(5, 4, 8)
        >>> ends = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> out = varlen_attention(
        ...     packed[:, :2],
        ...     packed[:, 2:3],
        ...     packed[:, 3:],
        ...     cu_seqlens_q=ends,
        ...     cu_seqlens_k=ends,
        ...     max_seqlen_q=3,
        ...     max_seqlen_k=3,
        ... )
        >>> out.shape
        torch.Size([5, 2, 8])
    """
    check_tensor("query", query, shape=(None, None, None), dtypes=QUERY_DTYPES)
    (_, num_heads, head_dim), device = query.shape, query.device
    stored = (*MODEL_DTYPES, *FP8_DTYPES)
    check_tensor("key", key, shape=(None, None, head_dim), dtypes=stored, device=device)
    num_keys, num_kv_heads, _ = key.shape
    shape = (num_keys, num_kv_heads, None)
    check_tensor("value", value, shape=shape, dtypes=(key.dtype,), device=device)
    check_query(query, q_scale, num_kv_heads)
    _check_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, device)
    if key.dtype in FP8_DTYPES:
        check_scale("k_scale", k_scale, num_kv_heads, device)
        check_scale("v_scale", v_scale, num_kv_heads, device)
    else:
        k_scale = v_scale = None
    if prob_scale is not None:
        check_scale("prob_scale", prob_scale, num_kv_heads, device)
    if out_scale is not None:
        check_group_scale("out_scale", out_scale, num_heads * value.shape[2], device)
    if sinks is not None:
        check_tensor("sinks", sinks, shape=(num_heads,), dtypes=MODEL_DTYPES, device=device)
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    check_scores(softmax_scale, causal, sliding_window, logits_soft_cap)
    out, lse = torch.ops.quantattn.varlen_attention(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        k_scale,
        v_scale,
        q_scale,
        prob_scale,
        softmax_scale,
        causal,
        sliding_window,
        logits_soft_cap,
        sinks,
        out_scale,
        round_through,
        model_dtype(query, out_dtype),
        return_lse,
    )
    return (out, lse) if return_lse else out


def _check_lengths(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    device: torch.device,
) -> None:
    int32 = (torch.int32,)
    check_tensor("cu_seqlens_q", cu_seqlens_q, shape=(None,), dtypes=int32, device=device)
    ends = tuple(cu_seqlens_q.shape)
    check_tensor("cu_seqlens_k", cu_seqlens_k, shape=ends, dtypes=int32, device=device)
    if ends[0] == 0:
        raise FormatError("cu_seqlens_q: got no number, expected num_seqs + 1, the first 0")
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length < 0:
            raise FormatError(f"{name}: got {length}, expected a count of tokens")


def _cuda(
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
    from quantattn.kernels import varlen_attention as kernel
    from quantattn.kernels._attention_call import PackedCall

    call = PackedCall(
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        k_scale=k_scale,
        v_scale=v_scale,
        q_scale=q_scale,
        prob_scale=prob_scale,
        softmax_scale=softmax_scale,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        out_scale=out_scale,
        round_through=round_through,
        out_dtype=out_dtype,
        return_lse=return_lse,
    )
    return kernel.varlen_attention(call)


def _fake(
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
    rows = query.shape[:2]
    dtype = out_dtype if out_scale is None else torch.float8_e4m3fn
    lse = query.new_empty(rows if return_lse else (0,), dtype=torch.float32)
    return query.new_empty((*rows, value.shape[2]), dtype=dtype), lse


register(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? k_scale,"
    " Tensor? v_scale, Tensor? q_scale, Tensor? prob_scale, float softmax_scale, bool causal,"
    " int? sliding_window, float? logits_soft_cap, Tensor? sinks, Tensor? out_scale,"
    " bool round_through, ScalarType out_dtype, bool return_lse) -> (Tensor, Tensor)",
    cpu=reference.varlen_attention,
    cuda=_cuda,
    fake=_fake,
    multiplies=True,
)
