"""int4's rotation on the device, bit by bit as `quantattn.rotation` defines it."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rotate_back_tile", "rotate_tile"]


@triton.jit
def rotate_tile(x, WIDTH: tl.constexpr) -> tl.tensor:
    """Rotate the rows of a float32 tile `[rows, columns]`; columns from WIDTH on stay 0."""
    return _hadamard(x * _signs(x.shape[1])[None, :], WIDTH)


@triton.jit
def rotate_back_tile(x, WIDTH: tl.constexpr) -> tl.tensor:
    """Undo `rotate_tile`; zeros have no sign."""
    return _hadamard(x, WIDTH) * _signs(x.shape[1])[None, :] + 0.0


@triton.jit
def _signs(COLUMNS: tl.constexpr) -> tl.tensor:
    """The Rudin-Shapiro sequence, from that of a column's low three bits and that of the others.

    A thread's columns differ in the low bits only, which leaves it little to compute.
    """
    columns = tl.arange(0, COLUMNS)
    low = columns & 7
    high = columns >> 3
    parity = _pair_parity(low) ^ _pair_parity(high) ^ ((low >> 2) & high)
    return ((parity << 31) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _pair_parity(index) -> tl.tensor:
    """In the lowest bit, whether an odd count of neighbouring pairs of bits are ones."""
    parity = index & (index >> 1)
    for exponent in tl.static_range(3, -1, -1):
        parity ^= parity >> (1 << exponent)
    return parity


@triton.jit
def _hadamard(x, WIDTH: tl.constexpr) -> tl.tensor:
    RUN: tl.constexpr = WIDTH & -WIDTH
    for stage in tl.static_range(16):
        if (1 << stage) < RUN:
            x = _butterfly(x, 1 << stage)
    return x * (RUN**-0.5)


@triton.jit
def _butterfly(x, STRIDE: tl.constexpr) -> tl.tensor:
    """Make numbers i and i + STRIDE their sum and their difference."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    pairs = x.reshape(ROWS, COLUMNS // (2 * STRIDE), 2, STRIDE)
    bits = pairs.to(tl.int32, bitcast=True)
    # What a number XORs with to the XOR of both is its partner: one shuffle, or none in a thread.
    partner = (bits ^ tl.xor_sum(bits, 2, keep_dims=True)).to(tl.float32, bitcast=True)
    sign = (1.0 - 2.0 * tl.arange(0, 2).to(tl.float32))[None, None, :, None]
    return tl.fma(pairs, sign, partner).reshape(ROWS, COLUMNS)
