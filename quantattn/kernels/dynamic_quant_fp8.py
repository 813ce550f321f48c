"""dynamic_quant_fp8 in Triton: a row is read once, and waits in registers for its scale."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantattn.kernels._counts import cdiv, next_power_of_2
from quantattn.kernels._tiles import divide, encode_fp8, is_native, row_and_group

__all__ = ["dynamic_quant_fp8"]

TILE = 4096
"""Numbers a program, 32 a thread, where rows are no wider."""

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    out_ptr,
    scales_ptr,
    input_ptr,
    num_rows,
    num_heads,
    width,
    token_stride,
    head_stride,
    MANTISSA_BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Quantize whole rows, each with the scale that its largest finite magnitude gives.

    Grid: num_rows / BLOCK_ROWS.
    Layout: input [num_rows / num_heads, num_heads, width], unit stride in a row; outputs
        contiguous, codes as bytes. A row is CHUNKS tiles of BLOCK_COLUMNS.
    Precision: the scale by an IEEE division, codes as `divide` and `encode_fp8` say.
    """
    LARGEST: tl.constexpr = 448.0 if MANTISSA_BITS == 3 else 57344.0
    first = tl.program_id(0).to(num_rows.dtype) * BLOCK_ROWS
    tokens, heads = row_and_group(first, num_heads, BLOCK_ROWS)
    rows = first.to(tl.int64) + tl.arange(0, BLOCK_ROWS)
    is_row = tl.arange(0, BLOCK_ROWS) < num_rows - first
    columns = tl.arange(0, BLOCK_COLUMNS)
    source = input_ptr + (tokens * token_stride + heads * head_stride)[:, None]
    target = out_ptr + (rows * width)[:, None]

    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        column = (chunk * BLOCK_COLUMNS + columns)[None, :]
        mask = is_row[:, None] & (column < width)
        x = tl.load(source + column, mask=mask, other=0.0)
        chunks = chunks + (x,)  # type: ignore[assignment]  # noqa: RUF005

    amax = _largest_finite(chunks, NATIVE)
    scale = tl.where(amax >= LARGEST * _SMALLEST_NORMAL, tl.div_rn(amax, LARGEST), 1.0)
    tl.store(scales_ptr + rows, scale, mask=is_row)

    for chunk in tl.static_range(CHUNKS):
        column = (chunk * BLOCK_COLUMNS + columns)[None, :]
        quotient = divide(chunks[chunk].to(tl.float32), scale[:, None], NATIVE)
        codes = encode_fp8(quotient, MANTISSA_BITS, NATIVE)
        tl.store(target + column, codes, mask=is_row[:, None] & (column < width))


@triton.jit
def _largest_finite(chunks, NATIVE: tl.constexpr) -> tl.tensor:
    """Largest finite magnitude of each row."""
    largest = tl.zeros(chunks[0].shape, tl.float32)
    for chunk in tl.static_range(len(chunks)):
        x = chunks[chunk].to(tl.float32)
        if NATIVE:
            # An infinity becomes NaN, which a device's maximum ignores.
            largest = tl.maximum(largest, tl.abs(tl.fma(x, 0.0, x)))
        else:
            largest = tl.maximum(largest, tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0))
    return tl.max(largest, 1)


def dynamic_quant_fp8(
    input: Tensor, granularity: str, dtype: torch.dtype, *, native: bool | None = None
) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.dynamic_quant_fp8`.

    `native` chooses between the device's conversion and the one by integers; None: what `is_native`
    says.
    """
    rows = input.flatten(1)[:, None] if granularity == "token" else input
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    num_tokens, num_heads, width = rows.shape
    scales = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=input.device)
    out = torch.empty(input.shape, dtype=dtype, device=input.device)
    num_rows = num_tokens * num_heads
    if num_rows > 0:
        block_rows, block_columns, num_warps = _block_sizes(num_rows, width)
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(input):
            _quantize_rows_kernel[(cdiv(num_rows, block_rows),)](
                out.view(torch.uint8),
                scales,
                rows,
                num_rows,
                num_heads,
                width,
                rows.stride(0),
                rows.stride(1),
                MANTISSA_BITS=3 if dtype == torch.float8_e4m3fn else 2,
                NATIVE=is_native(input.device) if native is None else native,
                BLOCK_ROWS=block_rows,
                BLOCK_COLUMNS=block_columns,
                CHUNKS=cdiv(width, block_columns),
                num_warps=num_warps,
            )
    return out, scales if granularity == "token_head" else scales.view(-1)


def _block_sizes(num_rows: int, width: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps, for up to 128 numbers a thread.

    Measured on an H200, bf16, widths 128 to 28,672, 2026-12-01; more warps for a row wait longer
    for each other, and more numbers a thread than this leave few warps.
    """
    num_warps = 4 if width <= 16_384 else min(32, next_power_of_2(width) // 2048)
    columns = min(256 * num_warps, next_power_of_2(width))
    rows = max(1, TILE // (columns * cdiv(width, columns)))
    return min(rows, next_power_of_2(num_rows)), columns, num_warps
