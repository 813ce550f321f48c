"""paged_attention: schema, checks, fake and dispatch."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.ops._checks import check_batch, check_query, check_scores, model_dtype
from quantattn.ops._library import register
from quantattn.reference import paged_attention as reference
from quantattn.validation import (
    MODEL_DTYPES,
    check_group_scale,
    check_pages,
    check_scale,
    check_tensor,
)

__all__ = ["paged_attention"]


@overload
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    num_kv_heads: int,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    layout: str = "NHD",
    scale_placement: str = "page",
    head_dim_v: int | None = None,
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
def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    num_kv_heads: int,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    layout: str = "NHD",
    scale_placement: str = "page",
    head_dim_v: int | None = None,
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


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    num_kv_heads: int,
    kv_cache_dtype: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    prob_scale: Tensor | None = None,
    layout: str = "NHD",
    scale_placement: str = "page",
    head_dim_v: int | None = None,
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
    """Attend over paged keys and values, prefill and decode mixed freely.

    out = softmax(query K^T * softmax_scale) V, with K and V as if dequantized exactly. Token i of a
    sequence with q_len new tokens sits at position seq_len - q_len + i. What lies in unused slots
    and behind the end of a block table's row never reaches the output.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, fp32, fp16, bf16, or e4m3 with `q_scale`. Rows
            from `cu_seqlens_q[-1]` on are padding: output 0, LSE -inf.
        kv_cache: Pages of one layer, `[num_blocks, page_size]`, as `write_kv` takes them.
        cu_seqlens_q: Prefix sums of the query lengths, `[num_seqs + 1]`, int32, first 0.
        seq_lens: Keys of each sequence, the new ones included, `[num_seqs]`, int32.
        block_table: Block ids, `[num_seqs, max_blocks]`, int32.
        max_seqlen_q: Longest query, tokens.
        num_kv_heads: KV heads; `num_heads` is a multiple.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`), `fp8_e5m2`, `fp8_per_token_head`,
            `int8_per_token_head` or `int4_per_token_head`.
        k_scale: Dequantizing multiplier of K, float32, `[]`, `[1]` or `[num_kv_heads]`; ignored for
            `auto` and where the pages hold the scales.
        v_scale: The same for V.
        q_scale: The same for an e4m3 query.
        prob_scale: The same for the probabilities, which are quantized to e4m3 with it; None: they
            stay float32.
        layout: `NHD` or `HND`.
        scale_placement: `page` or `inline`: where the scales of the formats per token and head lie.
        head_dim_v: Width of a value; None: `head_dim`.
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
        FormatError: A dtype, shape, device, stride, option or the format does not fit.
        ScaleError: A scale is absent or superfluous, or its dtype, shape or device does not fit.

    Example:
        >>> pages = torch.randn(2, 2, 4, 1, 8).flatten(1)
        >>> out = paged_attention(
        ...     torch.randn(3, 2, 8),
        ...     pages,
        ...     cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        ...     seq_lens=torch.tensor([5], dtype=torch.int32),
        ...     block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        ...     max_seqlen_q=3,
        ...     num_kv_heads=1,
        ...     kv_cache_dtype="auto",
        ... )
        >>> out.shape
        torch.Size([3, 2, 8])
    """
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    check_query(query, q_scale, num_kv_heads)
    num_heads, head_dim = query.shape[1:]
    device = query.device
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    check_batch(cu_seqlens_q, seq_lens, block_table, max_seqlen_q, device=device)
    page_layout = PageLayout(num_kv_heads, head_dim, head_dim_v, layout, fmt, scale_placement)
    check_pages(kv_cache, page_layout, fmt, device=device)
    if fmt.uses_layer_scales:
        check_scale("k_scale", k_scale, num_kv_heads, device)
        check_scale("v_scale", v_scale, num_kv_heads, device)
    else:
        k_scale = v_scale = None
    if prob_scale is not None:
        check_scale("prob_scale", prob_scale, num_kv_heads, device)
    if out_scale is not None:
        check_group_scale("out_scale", out_scale, num_heads * head_dim_v, device)
    if sinks is not None:
        check_tensor("sinks", sinks, shape=(num_heads,), dtypes=MODEL_DTYPES, device=device)
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    check_scores(softmax_scale, causal, sliding_window, logits_soft_cap)
    out, lse = torch.ops.quantattn.paged_attention(
        query,
        kv_cache,
        cu_seqlens_q,
        seq_lens,
        block_table,
        max_seqlen_q,
        num_kv_heads,
        head_dim_v,
        fmt.name,
        layout,
        scale_placement,
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


def _cuda(
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
    from quantattn.kernels import paged_attention as kernel
    from quantattn.kernels._attention_call import AttentionCall

    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    head_dim = query.shape[2]
    call = AttentionCall(
        query=query,
        kv_cache=kv_cache,
        layout=PageLayout(num_kv_heads, head_dim, head_dim_v, layout, fmt, scale_placement),
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=block_table,
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
    return kernel.paged_attention(call)


def _fake(
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
    rows = query.shape[:2]
    dtype = out_dtype if out_scale is None else torch.float8_e4m3fn
    lse = query.new_empty(rows if return_lse else (0,), dtype=torch.float32)
    return query.new_empty((*rows, head_dim_v), dtype=dtype), lse


register(
    "paged_attention(Tensor query, Tensor kv_cache, Tensor cu_seqlens_q, Tensor seq_lens,"
    " Tensor block_table, SymInt max_seqlen_q, int num_kv_heads, SymInt head_dim_v,"
    " str kv_cache_dtype, str layout, str scale_placement, Tensor? k_scale,"
    " Tensor? v_scale, Tensor? q_scale, Tensor? prob_scale, float softmax_scale, bool causal,"
    " int? sliding_window, float? logits_soft_cap, Tensor? sinks, Tensor? out_scale,"
    " bool round_through, ScalarType out_dtype, bool return_lse) -> (Tensor, Tensor)",
    cpu=reference.paged_attention,
    cuda=_cuda,
    fake=_fake,
    multiplies=True,
)
