"""int4's rotation on the device, as `quantattn.rotation` defines it, but for the sign of a zero.

Signs change no rounding, so they are where they cost least. A butterfly B of numbers first and
second gives first + second and first - second. Here both are x + sign * partner, one operation,
with the sign (-1)^b_t in a stage of stride 2^t, where b are the bits of x's column: that gives
second - first, which is owed a sign. And the Rudin-Shapiro signs S, which come before the
butterflies, are moved behind them: B S = S (S B S), where S B S is a butterfly whose sign has the
factor (-1)^(b_(t-1) + b_(t+1)), by which S of x and of partner differ. All that is owed, and the
last factor, is multiplied with once.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rotate_back_tile", "rotate_tile"]


@triton.jit
def rotate_tile(x, WIDTH: tl.constexpr) -> tl.tensor:
    """Rotate the rows of a float32 tile `[rows, columns]`; columns from WIDTH on stay 0."""
    return _rotate(x, WIDTH, True)


@triton.jit
def rotate_back_tile(x, WIDTH: tl.constexpr) -> tl.tensor:
    """Undo `rotate_tile`; zeros have no sign."""
    return _rotate(x, WIDTH, False) + 0.0


@triton.jit
def _rotate(x, WIDTH: tl.constexpr, IS_SIGNED_FIRST: tl.constexpr) -> tl.tensor:
    RUN: tl.constexpr = WIDTH & -WIDTH
    columns = tl.arange(0, x.shape[1])
    owed = columns & 0
    for place in tl.static_range(16):
        if (1 << place) < RUN:
            x = _butterfly(x, columns, place, IS_SIGNED_FIRST)
            owed ^= _bit(columns, place)
        if (2 << place) < x.shape[1]:
            owed ^= _bit(columns, place) & _bit(columns, place + 1)
    return x * (_sign(owed) * (RUN**-0.5))[None, :]


@triton.jit
def _butterfly(x, columns, PLACE: tl.constexpr, IS_SIGNED_FIRST: tl.constexpr) -> tl.tensor:
    """Make a number and its partner, 2^PLACE columns away, their sum and their difference."""
    STRIDE: tl.constexpr = 1 << PLACE
    bits = x.to(tl.int32, bitcast=True)
    bits = bits.reshape(x.shape[0], x.shape[1] // (2 * STRIDE), 2, STRIDE)
    # What a number XORs with to the XOR of both is its partner: one shuffle, or none in a thread.
    partner = (bits ^ tl.xor_sum(bits, 2, keep_dims=True)).to(tl.float32, bitcast=True)
    parity = _bit(columns, PLACE)
    if IS_SIGNED_FIRST:
        parity ^= _bit(columns, PLACE + 1)
        if PLACE > 0:
            parity ^= _bit(columns, PLACE - 1)
    return tl.fma(partner.reshape(x.shape[0], x.shape[1]), _sign(parity)[None, :], x)


@triton.jit
def _bit(columns, PLACE: tl.constexpr) -> tl.tensor:
    return (columns >> PLACE) & 1


@triton.jit
def _sign(parity) -> tl.tensor:
    """-1.0 where the parity is 1, else 1.0."""
    return ((parity << 31) ^ 0x3F800000).to(tl.float32, bitcast=True)
