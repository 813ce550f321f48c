"""static_quant_fp8 in Triton: code = round(input / scale), one read and one write of memory."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantattn.kernels._tiles import divide, encode_fp8, is_native

__all__ = ["static_quant_fp8"]

TILE = 2048
"""Numbers a program, 16 a thread; measured on an H200, 65,536 x 5120 bf16, 2026-11-30."""


@triton.jit
def _quantize_flat_kernel(
    out_ptr,
    input_ptr,
    scale_ptr,
    num_elements,
    MANTISSA_BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantize contiguous numbers that share one scale.

    Grid: num_elements / BLOCK.
    Layout: input and output contiguous; output bytes.
    Precision: as `divide` and `encode_fp8` say.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    x = tl.load(input_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    codes = encode_fp8(divide(x, tl.load(scale_ptr), NATIVE), MANTISSA_BITS, NATIVE)
    tl.store(out_ptr + offsets, codes, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    out_ptr,
    input_ptr,
    scale_ptr,
    num_rows,
    num_columns,
    input_row_stride,
    GROUP_SIZE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Quantize a tile of rows that are no contiguous block, or whose columns have several scales.

    Grid: one program a tile, the tiles of some rows adjacent.
    Layout: input rows at any stride, unit stride inside; output contiguous bytes. GROUP_SIZE is the
        columns that share a scale, None where all share one.
    Precision: as `divide` and `encode_fp8` say.
    """
    column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    tile = tl.program_id(0)
    rows = (tile // column_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = (tile % column_tiles).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows[:, None] * input_row_stride + columns[None, :]
    x = tl.load(input_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if GROUP_SIZE is None:
        scale = tl.load(scale_ptr)
    else:
        in_row = columns < num_columns
        scale = tl.load(scale_ptr + columns // GROUP_SIZE, mask=in_row, other=1.0)[None, :]
    codes = encode_fp8(divide(x, scale, NATIVE), MANTISSA_BITS, NATIVE)
    tl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], codes, mask=mask)


def static_quant_fp8(
    input: Tensor, scale: Tensor, dtype: torch.dtype, *, native: bool | None = None
) -> Tensor:
    """See `quantattn.ops.static_quant_fp8`.

    `native` chooses between the device's conversion and the one by integers; None: what `is_native`
    says.
    """
    out = torch.empty(input.shape, dtype=dtype, device=input.device)
    if out.numel() == 0:
        return out
    options = {
        "MANTISSA_BITS": 3 if dtype == torch.float8_e4m3fn else 2,
        "NATIVE": is_native(input.device) if native is None else native,
    }
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(input):
        if scale.numel() == 1 and input.is_contiguous():
            _quantize_flat(out.view(torch.uint8).view(-1), input.view(-1), scale, options)
        else:
            _quantize_rows(out, input, scale, options)
    return out


def _quantize_flat(out: Tensor, input: Tensor, scale: Tensor, options: dict[str, Any]) -> None:
    # Where the count is a multiple of 16, Triton masks whole 16-byte accesses, not bytes.
    wide = len(input) // 16 * 16
    for part in (slice(0, wide), slice(wide, None)):
        codes, numbers = out[part], input[part]
        if len(numbers) > 0:
            grid = (triton.cdiv(len(numbers), TILE),)
            _quantize_flat_kernel[grid](codes, numbers, scale, len(numbers), BLOCK=TILE, **options)


def _quantize_rows(out: Tensor, input: Tensor, scale: Tensor, options: dict[str, Any]) -> None:
    rows = input.flatten(1) if input.ndim > 1 else input.reshape(1, -1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows, num_columns = rows.shape
    block_columns = min(TILE, triton.next_power_of_2(num_columns))
    block_rows = min(TILE // block_columns, triton.next_power_of_2(num_rows))
    tiles = triton.cdiv(num_rows, block_rows) * triton.cdiv(num_columns, block_columns)
    _quantize_rows_kernel[(tiles,)](
        out.view(torch.uint8),
        rows,
        scale.contiguous(),
        num_rows,
        num_columns,
        rows.stride(0),
        GROUP_SIZE=num_columns // scale.numel() if scale.numel() > 1 else None,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        **options,
    )
