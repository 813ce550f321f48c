"""mla_attention: schema, checks, fake and dispatch."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from quantattn.errors import FormatError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.ops._checks import check_batch, check_query, model_dtype
from quantattn.ops._library import register
from quantattn.reference import mla_attention as reference
from quantattn.validation import check_group_scale, check_pages, check_scale, latent_format

__all__ = ["mla_attention"]


@overload
def mla_attention(
    query: Tensor,
    kv_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    latent_dim: int,
    rope_dim: int,
    kv_cache_dtype: str,
    softmax_scale: float,
    scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def mla_attention(
    query: Tensor,
    kv_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    latent_dim: int,
    rope_dim: int,
    kv_cache_dtype: str,
    softmax_scale: float,
    scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def mla_attention(
    query: Tensor,
    kv_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_q: int,
    latent_dim: int,
    rope_dim: int,
    kv_cache_dtype: str,
    softmax_scale: float,
    scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    round_through: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a paged latent cache (MLA), causal, prefill and decode mixed freely.

    A cached row is a key as a whole, and a value by its first `latent_dim` numbers; one scale
    serves both products. Positions, padding and unused slots are as in `paged_attention`.

    Args:
        query: Absorbed query, `[num_tokens, num_heads, latent_dim + rope_dim]`, fp32, fp16, bf16,
            or e4m3 with `q_scale`.
        kv_cache: Pages of one layer, `[num_blocks, block_size * (latent_dim + rope_dim)]`, as
            `write_latent` takes them.
        cu_seqlens_q: Prefix sums of the query lengths, `[num_seqs + 1]`, int32, first 0.
        seq_lens: Keys of each sequence, the new ones included, `[num_seqs]`, int32.
        block_table: Block ids, `[num_seqs, max_blocks]`, int32.
        max_seqlen_q: Longest query, tokens.
        latent_dim: Width of the latent.
        rope_dim: Width of the rotated key part behind it.
        kv_cache_dtype: `auto`, `fp8` (= `fp8_e4m3`) or `fp8_e5m2`.
        softmax_scale: Multiplier of the logits.
        scale: Dequantizing multiplier of the cache, float32, `[]` or `[1]`; ignored for `auto`.
        q_scale: The same for an e4m3 query.
        out_scale: float32, `[]`, `[1]` or `[num_groups]`: the output is quantized to e4m3 with it,
            as `static_quant_fp8` does, from float32.
        round_through: Round to the model's dtype before quantizing the output.
        out_dtype: The model's dtype; None: the query's, bf16 for an e4m3 query.
        return_lse: Also return the log of the denominator.

    Returns:
        Output `[num_tokens, num_heads, latent_dim]`, model dtype or e4m3. With `return_lse` also
        the natural-log LSE `[num_tokens, num_heads]`, float32; a row that sees no key gives 0 and
        -inf.

    Raises:
        FormatError: A dtype, shape, device, stride, option or the format does not fit.
        ScaleError: A scale is absent or superfluous, or its dtype, shape or device does not fit.

    Example:
        >>> out = mla_attention(
        ...     torch.randn(1, 2, 6),
        ...     torch.randn(2, 4 * 6),
        ...     cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([5], dtype=torch.int32),
        ...     block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        ...     max_seqlen_q=1,
        ...     latent_dim=4,
        ...     rope_dim=2,
        ...     kv_cache_dtype="auto",
        ...     softmax_scale=0.4,
        ... )
        >>> out.shape
        torch.Size([1, 2, 4])
    """
    fmt = latent_format(kv_cache_dtype)
    check_query(query, q_scale, 1)
    num_heads, width = query.shape[1:]
    if latent_dim < 1 or rope_dim < 0 or width != latent_dim + rope_dim:
        raise FormatError(
            f"query: got rows of {width}, expected latent_dim {latent_dim} + rope_dim {rope_dim}"
        )
    if not -math.inf < softmax_scale < math.inf:
        raise FormatError(f"softmax_scale: got {softmax_scale}, expected a finite number")
    check_batch(cu_seqlens_q, seq_lens, block_table, max_seqlen_q, device=query.device)
    check_pages(kv_cache, PageLayout(1, width, 0, format=fmt), fmt, device=query.device)
    if fmt.uses_layer_scales:
        check_scale("scale", scale, 1, query.device)
    else:
        scale = None
    if out_scale is not None:
        check_group_scale("out_scale", out_scale, num_heads * latent_dim, query.device)
    out, lse = torch.ops.quantattn.mla_attention(
        query,
        kv_cache,
        cu_seqlens_q,
        seq_lens,
        block_table,
        max_seqlen_q,
        latent_dim,
        fmt.name,
        scale,
        q_scale,
        softmax_scale,
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
    from quantattn.kernels import mla_attention as kernel
    from quantattn.kernels._attention_call import LatentCall

    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    call = LatentCall(
        query=query,
        kv_cache=kv_cache,
        layout=PageLayout(1, query.shape[2], 0, format=fmt),
        latent_dim=latent_dim,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=block_table,
        max_seqlen_q=max_seqlen_q,
        k_scale=scale,
        v_scale=scale,
        q_scale=q_scale,
        prob_scale=None,
        softmax_scale=softmax_scale,
        causal=True,
        sliding_window=None,
        logits_soft_cap=None,
        sinks=None,
        out_scale=out_scale,
        round_through=round_through,
        out_dtype=out_dtype,
        return_lse=return_lse,
    )
    return kernel.mla_attention(call)


def _fake(
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
    rows = query.shape[:2]
    dtype = out_dtype if out_scale is None else torch.float8_e4m3fn
    lse = query.new_empty(rows if return_lse else (0,), dtype=torch.float32)
    return query.new_empty((*rows, latent_dim), dtype=dtype), lse


register(
    "mla_attention(Tensor query, Tensor kv_cache, Tensor cu_seqlens_q, Tensor seq_lens,"
    " Tensor block_table, SymInt max_seqlen_q, SymInt latent_dim, str kv_cache_dtype,"
    " Tensor? scale, Tensor? q_scale, float softmax_scale, Tensor? out_scale,"
    " bool round_through, ScalarType out_dtype, bool return_lse) -> (Tensor, Tensor)",
    cpu=reference.mla_attention,
    cuda=_cuda,
    fake=_fake,
    multiplies=True,
)
