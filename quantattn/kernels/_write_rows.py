"""Quantize new rows and store them in their pages, in Triton: what write_kv and write_latent do."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantattn.kernels._tiles import convert, divide, encode_fp8, is_native
from quantattn.layout import PageLayout

__all__ = ["write_rows"]

TILE = 2048
FEW_TOKENS = 256
"""Up to here a program takes one token, so that more of the device works at once."""

_MANTISSA_BITS = {"auto": None, "fp8_e4m3": 3, "fp8_e5m2": 2}


@triton.jit
def _write_side(
    pages_ptr,
    new_ptr,
    scale_ptr,
    slot_mapping_ptr,
    num_tokens,
    page_stride,
    token_stride,
    head_stride,
    START: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_HND: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Write some columns of some tokens' K rows, or V rows."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    heads = columns // WIDTH
    in_row = columns < NUM_KV_HEADS * WIDTH
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    mask = (slots >= 0)[:, None] & in_row[None, :]

    source = columns if IS_PACKED else heads * head_stride + columns % WIDTH
    x = tl.load(new_ptr + tokens[:, None] * token_stride + source[None, :], mask=mask, other=0.0)
    blocks = slots // BLOCK_SIZE
    rows = slots - blocks * BLOCK_SIZE
    if IS_HND:
        target = (heads * BLOCK_SIZE * WIDTH + columns % WIDTH)[None, :] + (rows * WIDTH)[:, None]
    else:
        target = columns[None, :] + (rows * (NUM_KV_HEADS * WIDTH))[:, None]
    target += (blocks * page_stride)[:, None] + START

    if MANTISSA_BITS is None:
        stored = convert(x, pages_ptr.dtype.element_ty, NATIVE)
    else:
        if IS_PER_HEAD:
            scale = tl.load(scale_ptr + heads, mask=in_row, other=1.0)[None, :]
        else:
            scale = tl.load(scale_ptr)
        stored = encode_fp8(divide(x.to(tl.float32), scale, NATIVE), MANTISSA_BITS, NATIVE)
    tl.store(pages_ptr + target, stored, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _write_rows_kernel(
    pages_ptr,
    key_ptr,
    value_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_mapping_ptr,
    num_tokens,
    page_stride,
    key_strides,
    value_strides,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    IS_HND: tl.constexpr,
    IS_K_PACKED: tl.constexpr,
    IS_V_PACKED: tl.constexpr,
    IS_K_PER_HEAD: tl.constexpr,
    IS_V_PER_HEAD: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Quantize new keys and values and store them by slot; a negative slot is skipped.

    Grid: tokens / BLOCK_TOKENS, columns / BLOCK_COLUMNS, side (0: K, 1: V).
    Layout: pages as quantattn.layout says; bytes where MANTISSA_BITS names an FP8 format (3: e4m3,
        2: e5m2), the pages' own dtype where it is None. New rows at any token and head stride, unit
        stride inside a head.
    Precision: float32 division, rounded to nearest; FP8 as `encode_fp8` says.
    """
    if tl.program_id(2) == 0:
        _write_side(
            pages_ptr,
            key_ptr,
            k_scale_ptr,
            slot_mapping_ptr,
            num_tokens,
            page_stride,
            key_strides[0],
            key_strides[1],
            0,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            IS_HND,
            IS_K_PACKED,
            IS_K_PER_HEAD,
            MANTISSA_BITS,
            NATIVE,
            BLOCK_TOKENS,
            BLOCK_COLUMNS,
        )
    else:
        _write_side(
            pages_ptr,
            value_ptr,
            v_scale_ptr,
            slot_mapping_ptr,
            num_tokens,
            page_stride,
            value_strides[0],
            value_strides[1],
            BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM_V,
            IS_HND,
            IS_V_PACKED,
            IS_V_PER_HEAD,
            MANTISSA_BITS,
            NATIVE,
            BLOCK_TOKENS,
            BLOCK_COLUMNS,
        )


def write_rows(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    kv_cache_dtype: str,
    layout: PageLayout,
    native: bool | None,
) -> None:
    """Launch the write of new rows, `[num_tokens, num_kv_heads, width]`, into one layer's pages.

    `native` chooses between the device's FP8 conversion and the one by integers; None: what
    `is_native` says.
    """
    num_tokens = key.shape[0]
    if num_tokens == 0 or kv_cache.shape[0] == 0:
        return
    mantissa_bits = _MANTISSA_BITS[kv_cache_dtype]
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    widest = layout.num_kv_heads * max(layout.head_dim, layout.head_dim_v)
    block_columns = min(TILE, triton.next_power_of_2(widest))
    block_tokens = TILE // block_columns if num_tokens > FEW_TOKENS else 1
    num_sides = 2 if layout.head_dim_v else 1
    grid = (
        triton.cdiv(num_tokens, block_tokens),
        triton.cdiv(widest, block_columns),
        num_sides,
    )
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(key):
        _write_rows_kernel[grid](
            kv_cache if mantissa_bits is None else kv_cache.view(torch.uint8),
            key,
            value,
            k_scale,
            k_scale if v_scale is None else v_scale,
            slot_mapping,
            num_tokens,
            kv_cache.stride(0),
            key.stride()[:2],
            value.stride()[:2],
            BLOCK_SIZE=layout.block_size(kv_cache),
            NUM_KV_HEADS=layout.num_kv_heads,
            HEAD_DIM=layout.head_dim,
            HEAD_DIM_V=value.shape[2],
            IS_HND=layout.order == "HND",
            IS_K_PACKED=key.stride(1) == layout.head_dim,
            IS_V_PACKED=value.stride(1) == value.shape[2],
            IS_K_PER_HEAD=k_scale is not None and k_scale.numel() > 1,
            IS_V_PER_HEAD=v_scale is not None and v_scale.numel() > 1,
            MANTISSA_BITS=mantissa_bits,
            NATIVE=is_native(key.device) if native is None else native,
            BLOCK_TOKENS=block_tokens,
            BLOCK_COLUMNS=block_columns,
        )
