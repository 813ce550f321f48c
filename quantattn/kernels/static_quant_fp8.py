"""static_quant_fp8 in Triton: code = round(input / scale), one read and one write of memory."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantattn.kernels._counts import cdiv, next_power_of_2
from quantattn.kernels._tiles import divide, encode_fp8, is_native, row_and_group

__all__ = ["static_quant_fp8"]

FLAT_TILE = 2048
TILE = 4096
"""Numbers a program, of 128 threads. Measured on an H200, bf16, 1 to 65,536 rows, 2026-12-01: where
places cost as little as in the flat kernel, more programs are worth more than few instructions."""


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


@triton.jit(do_not_specialize=["num_runs"])
def _quantize_runs_kernel(
    out_ptr,
    input_ptr,
    scale_ptr,
    num_runs,
    num_groups,
    width,
    row_stride,
    MANTISSA_BITS: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Quantize runs: numbers of one row that lie side by side and share a scale.

    Grid: one program a tile; the tiles of some runs are adjacent.
    Layout: input rows of num_groups runs, at any stride; output contiguous bytes. A run has width
        numbers.
    Precision: as `divide` and `encode_fp8` say.
    """
    tiles = tl.cdiv(width, BLOCK_COLUMNS)
    tile = tl.program_id(0)
    first = (tile // tiles).to(num_runs.dtype) * BLOCK_RUNS
    rows, groups = row_and_group(first, num_groups, BLOCK_RUNS)
    columns = (tile % tiles).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_run = tl.arange(0, BLOCK_RUNS) < num_runs - first
    mask = is_run[:, None] & (columns < width)[None, :]
    source = (rows * row_stride + groups * width)[:, None] + columns[None, :]
    x = tl.load(input_ptr + source, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + groups, mask=is_run, other=1.0)[:, None]
    codes = encode_fp8(divide(x, scale, NATIVE), MANTISSA_BITS, NATIVE)
    target = ((first.to(tl.int64) + tl.arange(0, BLOCK_RUNS)) * width)[:, None] + columns[None, :]
    tl.store(out_ptr + target, codes, mask=mask)


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
            _quantize_runs(out.view(torch.uint8), input, scale.contiguous(), options)
    return out


def _quantize_flat(out: Tensor, input: Tensor, scale: Tensor, options: dict[str, Any]) -> None:
    # Where the count is a multiple of 16, Triton masks whole 16-byte accesses, not bytes.
    wide = len(input) // 16 * 16
    for part in (slice(0, wide), slice(wide, None)):
        codes, numbers = out[part], input[part]
        if len(numbers) > 0:
            grid = (cdiv(len(numbers), FLAT_TILE),)
            _quantize_flat_kernel[grid](
                codes, numbers, scale, len(numbers), BLOCK=FLAT_TILE, **options
            )


def _quantize_runs(out: Tensor, input: Tensor, scale: Tensor, options: dict[str, Any]) -> None:
    rows = input.flatten(1) if input.ndim > 1 else input.reshape(1, -1)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_groups = scale.numel()
    num_runs, width = rows.shape[0] * num_groups, rows.shape[1] // num_groups
    block_columns = _block_columns(width)
    block_runs = min(TILE // block_columns, next_power_of_2(num_runs))
    tiles = cdiv(num_runs, block_runs) * cdiv(width, block_columns)
    _quantize_runs_kernel[(tiles,)](
        out,
        rows,
        scale,
        num_runs,
        num_groups,
        width,
        rows.stride(0),
        BLOCK_RUNS=block_runs,
        BLOCK_COLUMNS=block_columns,
        **options,
    )


def _block_columns(width: int) -> int:
    """The widest tile that wastes at most a sixteenth of itself, within reason."""
    columns = min(TILE, next_power_of_2(width))
    while columns > 128 and cdiv(width, columns) * columns * 15 > width * 16:
        columns //= 2
    return int(columns)
