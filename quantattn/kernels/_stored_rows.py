"""Stored K rows and V rows on the device: find them, load them, turn codes into numbers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_fp8", "load_numbers", "load_rows", "locate"]


@triton.jit
def decode_fp8(codes, IS_E4M3: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Read FP8 codes (uint8) as float16, exactly."""
    if not IS_E4M3:
        return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = codes.to(tl.uint16)
        shifted = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        # e4m3's bias is 8 less than float16's.
        numbers = shifted.to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def _decode(codes, SPEC: tl.constexpr) -> tl.tensor:
    if SPEC.codes is None:
        return codes.to(SPEC.compute)
    elif SPEC.codes == "int8":
        # 1024 + n has n in float16's low bits.
        return ((codes.to(tl.uint16) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0).to(
            SPEC.compute
        )
    elif SPEC.codes == "int4":
        pairs = tl.join(codes & 0xF, codes >> 4)
        nibbles = pairs.reshape(codes.shape[0], 2 * codes.shape[1]).to(tl.uint16)
        return ((nibbles ^ 0x6400).to(tl.float16, bitcast=True) - 1032.0).to(SPEC.compute)
    else:
        return decode_fp8(codes, SPEC.codes == "e4m3", SPEC.native).to(SPEC.compute)


@triton.jit
def load_rows(
    codes_ptr,
    block_stride,
    block,
    offset,
    head,
    valid,
    SIDE: tl.constexpr,
    MASKED: tl.constexpr,
    SPEC: tl.constexpr,
) -> tl.tensor:
    """Load some rows, `[block_n, columns]`, as numbers; those that are not valid count as code 0.

    int4 is centred: a number is its code minus 8.
    """
    HALF: tl.constexpr = 2 if SPEC.codes == "int4" else 1
    WIDTH: tl.constexpr = SIDE.width // HALF
    COLUMNS: tl.constexpr = SIDE.columns // HALF
    columns = tl.arange(0, COLUMNS)[None, :]
    starts = block * block_stride + offset * SIDE.token_stride + head * SIDE.head_stride
    pointers = codes_ptr + starts[:, None] + (SIDE.first + columns)
    if MASKED and WIDTH < COLUMNS:
        codes = tl.load(pointers, mask=valid[:, None] & (columns < WIDTH), other=0)
    elif MASKED:
        codes = tl.load(pointers, mask=valid[:, None], other=0)
    elif WIDTH < COLUMNS:
        codes = tl.load(pointers, mask=columns < WIDTH, other=0)
    else:
        codes = tl.load(pointers)
    return _decode(codes, SPEC)


@triton.jit
def load_numbers(
    keys, values, block, offset, head, valid, MASKED: tl.constexpr, SPEC: tl.constexpr
) -> tl.tuple:
    """Load the scales and offsets of some K rows and V rows, 0 where they are not valid.

    Only int4 has offsets; elsewhere they are the scales.
    """
    # In one load, which Triton makes once a program: shorter ones it would repeat for each row.
    KEYS: tl.constexpr = SPEC.keys
    side = tl.arange(0, 2)[:, None, None]
    part = tl.arange(0, 2)[None, :, None]
    starts = block * keys.number_block_stride + offset * KEYS.number_token_stride
    starts = starts[None, None, :] + (head * KEYS.number_head_stride + part * KEYS.offset_stride)
    pointers = tl.where(side == 0, keys.numbers, values.numbers) + starts
    if MASKED:
        numbers = tl.load(pointers, mask=valid[None, None, :], other=0.0)
    else:
        numbers = tl.load(pointers)
    scales, offsets = numbers.permute(2, 0, 1).split()
    k_scale, v_scale = scales.split()
    k_offset, v_offset = offsets.split()
    return k_scale, v_scale, k_offset, v_offset


@triton.jit
def locate(table, positions, valid, MASKED: tl.constexpr, SPEC: tl.constexpr) -> tl.tuple:
    """Block (int64) and place in it of some keys; without blocks, the key itself and 0."""
    if SPEC.block_size is None:
        return table + positions, tl.zeros_like(positions)
    else:
        if MASKED:
            block = tl.load(table + positions // SPEC.block_size, mask=valid, other=0)
        else:
            block = tl.load(table + positions // SPEC.block_size)
        return block.to(tl.int64), positions % SPEC.block_size
