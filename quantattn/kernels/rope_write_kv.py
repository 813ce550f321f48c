"""rope_write_kv in Triton: rotation, writes and quantization of the queries in one launch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._counts import cdiv
from quantattn.kernels._rope_rows import turn_and_write
from quantattn.kernels._row_places import RowPlaces, row_places
from quantattn.kernels._tiles import is_native
from quantattn.kernels._write_rows import FEW_TOKENS, choose_tile
from quantattn.layout import PageLayout

__all__ = ["choose_rope_tile", "rope_write_kv"]


@triton.jit(do_not_specialize=["num_tokens", "max_positions", "num_pages"])
def _rope_write_kv_kernel(
    out_ptr,
    pages_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_mapping_ptr,
    positions_ptr,
    num_tokens,
    max_positions,
    page_stride,
    table_stride,
    query_strides,
    key_strides,
    value_strides,
    num_pages,
    Q_PLACES: tl.constexpr,
    K_PLACES: tl.constexpr,
    V_PLACES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CODE_WIDTH: tl.constexpr,
    CODE_WIDTH_V: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_Q_PER_HEAD: tl.constexpr,
    IS_K_PER_HEAD: tl.constexpr,
    IS_V_PER_HEAD: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """Turn new queries and keys; code and store them and new values.

    Grid: tokens / BLOCK_TOKENS, heads / BLOCK_HEADS of queries, then of keys, then of values.
    Layout: pages as quantattn.layout says and K_PLACES and V_PLACES hand on, in bytes where the
        format is quantized; queries as pages of one token, `[num_tokens, num_heads, head_dim]`. New
        rows at any token and head stride, unit stride inside a head.
    Precision: float32, products and sums each rounded, then the dtype of the input; `code_rows`.
    """
    Q_TILES: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    tile = tl.program_id(1)
    if tile < Q_TILES:
        turn_and_write(
            out_ptr,
            query_ptr,
            table_ptr,
            q_scale_ptr,
            slot_mapping_ptr,
            positions_ptr,
            num_tokens,
            max_positions,
            num_tokens,
            NUM_HEADS * HEAD_DIM,
            table_stride,
            query_strides,
            tile,
            Q_PLACES,
            None,
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            HEAD_DIM,
            ROTARY_DIM,
            IS_INTERLEAVED,
            Q_FORMAT,
            IS_Q_PER_HEAD,
            NATIVE,
            BLOCK_TOKENS,
            BLOCK_HEADS,
        )
    elif tile < Q_TILES + KV_TILES:
        turn_and_write(
            pages_ptr,
            key_ptr,
            table_ptr,
            k_scale_ptr,
            slot_mapping_ptr,
            positions_ptr,
            num_tokens,
            max_positions,
            num_pages,
            page_stride,
            table_stride,
            key_strides,
            tile - Q_TILES,
            K_PLACES,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            CODE_WIDTH,
            ROTARY_DIM,
            IS_INTERLEAVED,
            FORMAT,
            IS_K_PER_HEAD,
            NATIVE,
            BLOCK_TOKENS,
            BLOCK_HEADS,
        )
    else:
        turn_and_write(
            pages_ptr,
            value_ptr,
            table_ptr,
            v_scale_ptr,
            slot_mapping_ptr,
            positions_ptr,
            num_tokens,
            max_positions,
            num_pages,
            page_stride,
            table_stride,
            value_strides,
            tile - (Q_TILES + KV_TILES),
            V_PLACES,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM_V,
            CODE_WIDTH_V,
            None,
            IS_INTERLEAVED,
            FORMAT,
            IS_V_PER_HEAD,
            NATIVE,
            BLOCK_TOKENS,
            BLOCK_HEADS,
        )


def choose_rope_tile(num_tokens: int, layout: PageLayout, itemsize: int) -> dict[str, int]:
    """Choose what a program takes, as `choose_tile` does for writes alone; rows turn whole."""
    tile = choose_tile(num_tokens, layout, itemsize)
    del tile["PARTS"]
    if num_tokens > FEW_TOKENS and not layout.format.has_page_scales:
        tile["num_warps"] = 2
    return tile


def rope_write_kv(
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
    *,
    native: bool | None = None,
) -> Tensor:
    """See `quantattn.ops.rope_write_kv`.

    `native` chooses between the device's FP8 conversion and the one by integers; None: what
    `is_native` says.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, head_dim_v = value.shape[1:]
    out = query.new_empty(query.shape, dtype=None if q_scale is None else torch.float8_e4m3fn)
    fmt = parse_kv_cache_dtype(kv_cache_dtype)
    page_layout = PageLayout(num_kv_heads, head_dim, head_dim_v, layout, fmt, scale_placement)
    page_layout.check_alignment(kv_cache)
    if num_tokens == 0:
        return out
    query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
    table = cos_sin_cache if cos_sin_cache.stride(1) == 1 else cos_sin_cache.contiguous()
    slot_mapping, positions = slot_mapping.contiguous(), positions.contiguous()
    q_scale, k_scale, v_scale = (
        scale if scale is None else scale.contiguous() for scale in (q_scale, k_scale, v_scale)
    )
    block_size = page_layout.block_size(kv_cache)
    k_places, v_places = row_places(page_layout, block_size)
    tile = choose_rope_tile(num_tokens, page_layout, query.dtype.itemsize)
    q_tiles, kv_tiles = (cdiv(n, tile["BLOCK_HEADS"]) for n in (num_heads, num_kv_heads))
    tiles = q_tiles + (2 * kv_tiles if kv_cache.shape[0] > 0 else 0)
    grid = (cdiv(num_tokens, tile["BLOCK_TOKENS"]), tiles)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(query):
        _rope_write_kv_kernel[grid](
            out if q_scale is None else out.view(torch.uint8),
            kv_cache.view(torch.uint8) if fmt.is_quantized else kv_cache,
            query,
            key,
            value,
            table,
            q_scale,
            k_scale,
            v_scale,
            slot_mapping,
            positions,
            num_tokens,
            table.shape[0],
            kv_cache.stride(0),
            table.stride(0),
            query.stride()[:2],
            key.stride()[:2],
            value.stride()[:2],
            kv_cache.shape[0],
            Q_PLACES=RowPlaces(0, 0, head_dim),
            K_PLACES=k_places,
            V_PLACES=v_places,
            BLOCK_SIZE=block_size,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            CODE_WIDTH=fmt.code_width(head_dim),
            CODE_WIDTH_V=fmt.code_width(head_dim_v),
            ROTARY_DIM=table.shape[1],
            IS_INTERLEAVED=interleaved,
            Q_FORMAT="auto" if q_scale is None else "fp8_e4m3",
            FORMAT=fmt.name,
            IS_Q_PER_HEAD=q_scale is not None and q_scale.numel() > 1,
            IS_K_PER_HEAD=k_scale is not None and k_scale.numel() > 1,
            IS_V_PER_HEAD=v_scale is not None and v_scale.numel() > 1,
            NATIVE=is_native(query.device) if native is None else native,
            **tile,
            # A product rounds before it is added to: these roundings are the definition's.
            enable_fp_fusion=False,
        )
    return out
