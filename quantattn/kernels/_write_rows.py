"""Quantize new rows and store them in their pages, in Triton: what write_kv and write_latent do."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantattn.kernels._counts import cdiv, next_power_of_2
from quantattn.kernels._row_codes import code_rows
from quantattn.kernels._row_places import row_places
from quantattn.kernels._row_tiles import load_rows, store_rows
from quantattn.kernels._tiles import is_native
from quantattn.layout import PageLayout

__all__ = ["FEW_TOKENS", "choose_tile", "write_rows"]

FEW_TOKENS = 256
"""Up to here a program takes one token, so that more of the device works at once."""
SOME_TOKENS = 8192
"""Up to here programs that rotate rows take half of what they take of more tokens."""


@triton.jit
def _write_side(
    pages_ptr,
    new_ptr,
    scale_ptr,
    slot_mapping_ptr,
    num_tokens,
    num_pages,
    page_stride,
    strides,
    PLACES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CODE_WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """Write some heads of some tokens' K rows, or V rows."""
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    rows = load_rows(new_ptr, tokens, heads, strides, num_tokens, NUM_HEADS, WIDTH, PARTS)
    coded = code_rows(
        rows,
        scale_ptr,
        heads,
        pages_ptr.dtype.element_ty,
        NUM_HEADS,
        WIDTH,
        FORMAT,
        IS_PER_HEAD,
        NATIVE,
    )
    store_rows(
        pages_ptr,
        coded,
        slots,
        heads,
        num_pages,
        page_stride,
        PLACES,
        BLOCK_SIZE,
        NUM_HEADS,
        CODE_WIDTH,
        PARTS,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
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
    num_pages,
    K_PLACES: tl.constexpr,
    V_PLACES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CODE_WIDTH: tl.constexpr,
    CODE_WIDTH_V: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_K_PER_HEAD: tl.constexpr,
    IS_V_PER_HEAD: tl.constexpr,
    NATIVE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """Quantize new keys and values and store them by slot; a negative slot is skipped.

    Grid: tokens / BLOCK_TOKENS, heads / BLOCK_HEADS, side (0: K, 1: V).
    Layout: pages as quantattn.layout says and K_PLACES and V_PLACES hand on, in bytes where the
        format is quantized. New rows at any token and head stride, unit stride inside a head.
    Precision: `code_rows`.
    """
    if tl.program_id(2) == 0:
        _write_side(
            pages_ptr,
            key_ptr,
            k_scale_ptr,
            slot_mapping_ptr,
            num_tokens,
            num_pages,
            page_stride,
            key_strides,
            K_PLACES,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            CODE_WIDTH,
            FORMAT,
            IS_K_PER_HEAD,
            NATIVE,
            PARTS,
            BLOCK_TOKENS,
            BLOCK_HEADS,
        )
    else:
        _write_side(
            pages_ptr,
            value_ptr,
            v_scale_ptr,
            slot_mapping_ptr,
            num_tokens,
            num_pages,
            page_stride,
            value_strides,
            V_PLACES,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM_V,
            CODE_WIDTH_V,
            FORMAT,
            IS_V_PER_HEAD,
            NATIVE,
            PARTS,
            BLOCK_TOKENS,
            BLOCK_HEADS,
        )


def choose_tile(num_tokens: int, layout: PageLayout, itemsize: int) -> dict[str, int]:
    """Choose what a program takes: few numbers while few tokens leave much of the device idle.

    Measured on an H200, 1 to 65,536 tokens of 8 heads x 128, bf16. A row whose scale must be found
    stays in one warp, cut into parts for eight threads, or for four where it is rotated: fewer
    threads need fewer shuffles, but have more work each.
    """
    fmt = layout.format
    is_few = num_tokens <= FEW_TOKENS
    if not fmt.has_page_scales:
        numbers, num_warps, most_heads = 1024 if is_few else 2048, 4, 16
    elif fmt.is_rotated and num_tokens > SOME_TOKENS:
        numbers, num_warps, most_heads = 2048, 1, 4
    else:
        numbers, num_warps, most_heads = 512 if is_few else 1024, 1, 4
    rows = max(1, numbers // next_power_of_2(max(layout.head_dim, layout.head_dim_v)))
    heads = min(rows, next_power_of_2(layout.num_kv_heads), most_heads)
    tokens = 1 if is_few else rows // heads
    parts = 1
    if fmt.has_page_scales:
        narrower = next_power_of_2(min(layout.head_dim, layout.head_dim_v))
        threads = 4 if fmt.is_rotated and not is_few else 8
        # A thread gets 16 bytes of the rows, or of their codes, if those are more numbers. One part
        # of all rows fills the warp: were the parts of a row spread over threads with other rows
        # between them, Triton 3.6 would reduce the wrong ones.
        loaded = 16 // itemsize
        held = loaded if fmt.is_rotated else 16
        parts = max(
            1, min(narrower // (threads * loaded), narrower * heads * tokens // (32 * held))
        )
    return {
        "PARTS": parts,
        "BLOCK_TOKENS": tokens,
        "BLOCK_HEADS": heads,
        "num_warps": num_warps,
    }


def write_rows(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    layout: PageLayout,
    native: bool | None,
) -> None:
    """Launch the write of new rows, `[num_tokens, num_kv_heads, width]`, into one layer's pages.

    `native` chooses between the device's FP8 conversion and the one by integers; None: what
    `is_native` says.

    Raises:
        FormatError: Scales in the pages would lie off multiples of 4 bytes.
    """
    layout.check_alignment(kv_cache)
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0 or kv_cache.shape[0] == 0:
        return
    fmt, head_dim_v = layout.format, value.shape[2]
    slot_mapping = slot_mapping.contiguous()
    k_scale, v_scale = (t if t is None else t.contiguous() for t in (k_scale, v_scale))
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    block_size = layout.block_size(kv_cache)
    k_places, v_places = row_places(layout, block_size)
    tile = choose_tile(num_tokens, layout, key.dtype.itemsize)
    grid = (
        cdiv(num_tokens, tile["BLOCK_TOKENS"]),
        cdiv(num_heads, tile["BLOCK_HEADS"]),
        2 if layout.head_dim_v else 1,
    )
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(key):
        _write_rows_kernel[grid](
            kv_cache.view(torch.uint8) if fmt.is_quantized else kv_cache,
            key,
            value,
            k_scale,
            k_scale if v_scale is None else v_scale,
            slot_mapping,
            num_tokens,
            kv_cache.stride(0),
            key.stride()[:2],
            value.stride()[:2],
            kv_cache.shape[0],
            K_PLACES=k_places,
            V_PLACES=v_places,
            BLOCK_SIZE=block_size,
            NUM_KV_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            CODE_WIDTH=fmt.code_width(head_dim),
            CODE_WIDTH_V=fmt.code_width(head_dim_v),
            FORMAT=fmt.name,
            IS_K_PER_HEAD=k_scale is not None and k_scale.numel() > 1,
            IS_V_PER_HEAD=v_scale is not None and v_scale.numel() > 1,
            NATIVE=is_native(key.device) if native is None else native,
            **tile,
            # A product rounds before it is added to: these roundings are the format's.
            enable_fp_fusion=False,
        )
