"""rope_write_kv: schema, checks, fake and dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantattn.cache_writes import note_write
from quantattn.errors import FormatError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.ops._library import register
from quantattn.ops._write_checks import check_write, used_scales
from quantattn.reference import rope_write_kv as reference
from quantattn.validation import MODEL_DTYPES, check_scale, check_tensor

__all__ = ["rope_write_kv"]


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str = "NHD",
    scale_placement: str = "page",
    interleaved: bool = False,
    q_scale: Tensor | None = None,
) -> Tensor:
    """Rotate new queries and keys, store keys and values in their pages, quantize the queries.

    Gives the bits of a rotation in float32 that is rounded to the dtype of its input, then
    `write_kv`, then `static_quant_fp8` where there is a `q_scale`. A pair (a, b) becomes
    (a * cos - b * sin, b * cos + a * sin), products and sums each rounded.

    A token that has a slot, but a position outside the table, gets NaN as query and key, so that it
    cannot pass for a right one; a padding token there is rotated as the nearest position.

    Args:
        query: New queries, `[num_tokens, num_heads, head_dim]`, fp32, fp16 or bf16.
        key: New keys, `[num_tokens, num_kv_heads, head_dim]`, dtype of `query`.
        value: New values, `[num_tokens, num_kv_heads, head_dim_v]`, dtype of `query`.
        kv_cache: Pages of one layer, `[num_blocks, page_size]`, as for `write_kv`; written in
            place.
        slot_mapping: Slot of each token, `[num_tokens]`, int64; slot = block * block_size + offset.
            A slot may not be there twice: what it would hold is undefined.
            Negative: the token is padding; its query is rotated, its key and value are skipped.
            Slots behind the last page are an IndexError on the CPU, and checked on a GPU with
            TRITON_DEBUG=1 only.
        positions: Position of each token in its sequence, `[num_tokens]`, int64.
        cos_sin_cache: A position's cosines, then its sines, `[max_positions, rotary_dim]`, fp32,
            fp16 or bf16. Only the first `rotary_dim` numbers of a head turn; the others stay.
        k_scale: Dequantizing multiplier of K, float32, `[]`, `[1]` or `[num_kv_heads]`; may be
            None where the format ignores it.
        v_scale: The same for V.
        kv_cache_dtype: Any that `write_kv` takes.
        layout: `NHD` or `HND`.
        scale_placement: `page` or `inline`: where the scales of the formats per token and head lie.
        interleaved: Which numbers are pairs: (2 i, 2 i + 1), or (i, i + rotary_dim / 2).
        q_scale: Dequantizing multiplier of the queries, float32, `[]`, `[1]` or `[num_kv_heads]`; a
            query head takes its KV head's. None: they are not quantized.

    Returns:
        Rotated queries, `[num_tokens, num_heads, head_dim]`, contiguous, dtype of `query`; e4m3
        with `q_scale`.

    Raises:
        FormatError: A dtype, shape, device, stride or the format does not fit.
        ScaleError: A scale is absent, or its dtype, shape or device does not fit.

    Example:
        >>> query, key, value = (
        ...     torch.tensor([[[3.0, 4.0]]]),
        ...     torch.ones(1, 1, 2),
        ...     torch.ones(1, 1, 1),
        ... )
        >>> pages = torch.zeros(1, 2 * 1 * 3)
        >>> rope_write_kv(
        ...     query,
        ...     key,
        ...     value,
        ...     pages,
        ...     torch.tensor([1]),
        ...     positions=torch.tensor([0]),
        ...     cos_sin_cache=torch.tensor([[0.0, 1.0]]),
        ...     k_scale=None,
        ...     v_scale=None,
        ...     kv_cache_dtype="auto",
        ... )
        tensor([[[-4.,  3.]]])
        >>> pages
        tensor([[ 0.,  0., -1.,  1.,  0.,  1.]])
    """
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    _check_rows(query, key)
    _check_angles(positions, cos_sin_cache, query)
    check_write(key, value, kv_cache, slot_mapping, fmt, layout, scale_placement)
    k_scale, v_scale = used_scales(key, k_scale, v_scale, fmt)
    if q_scale is not None:
        check_scale("q_scale", q_scale, key.shape[1], query.device)
    out: Tensor = torch.ops.quantattn.rope_write_kv(
        query,
        key,
        value,
        kv_cache,
        slot_mapping,
        k_scale,
        v_scale,
        fmt.name,
        layout,
        scale_placement,
        positions,
        cos_sin_cache,
        interleaved,
        q_scale,
    )
    return out


def _check_rows(query: Tensor, key: Tensor) -> None:
    check_tensor("query", query, shape=(None, None, None), dtypes=MODEL_DTYPES)
    num_tokens, num_heads, head_dim = query.shape
    dtypes, device = (query.dtype,), query.device
    check_tensor("key", key, shape=(num_tokens, None, head_dim), dtypes=dtypes, device=device)
    num_kv_heads = key.shape[1]
    if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        raise FormatError(
            f"query: {num_heads} heads do not share the {num_kv_heads} KV heads of key evenly;"
            " expected a multiple of them"
        )


def _check_angles(positions: Tensor, cos_sin_cache: Tensor, query: Tensor) -> None:
    num_tokens, _, head_dim = query.shape
    device = query.device
    check_tensor("positions", positions, shape=(num_tokens,), dtypes=(torch.int64,), device=device)
    shape = (None, None)
    check_tensor("cos_sin_cache", cos_sin_cache, shape=shape, dtypes=MODEL_DTYPES, device=device)
    max_positions, rotary_dim = cos_sin_cache.shape
    if max_positions < 1 or rotary_dim % 2 != 0 or not 2 <= rotary_dim <= head_dim:
        raise FormatError(
            f"cos_sin_cache: got shape {list(cos_sin_cache.shape)}, expected a row for each"
            f" position, of cosines and as many sines, together 2 to head_dim {head_dim} numbers"
        )


def _cpu(*arguments: Any) -> Tensor:
    return _noted(reference.rope_write_kv, *arguments)


def _cuda(*arguments: Any) -> Tensor:
    from quantattn.kernels import rope_write_kv as kernel

    return _noted(kernel.rope_write_kv, *arguments)


def _noted(
    implementation: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *others: Any,
) -> Tensor:
    out = implementation(query, key, value, kv_cache, slot_mapping, k_scale, v_scale, *others)
    for scale in (k_scale, v_scale):
        if scale is not None and len(key) > 0:
            note_write(scale, kv_cache)
    return out


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: str,
    scale_placement: str,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
    q_scale: Tensor | None,
) -> Tensor:
    dtype = query.dtype if q_scale is None else torch.float8_e4m3fn
    return query.new_empty(query.shape, dtype=dtype)


register(
    "rope_write_kv(Tensor query, Tensor key, Tensor value, Tensor(a!) kv_cache,"
    " Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, str kv_cache_dtype, str layout,"
    " str scale_placement, Tensor positions, Tensor cos_sin_cache, bool interleaved,"
    " Tensor? q_scale) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
