"""How a row gets its scale and its codes, on the device: `quantattn.arithmetic`, bit by bit."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from quantattn.kernels._rotation_tiles import rotate_tile
from quantattn.kernels._tiles import convert, divide, encode_fp8

__all__ = ["code_rows"]

_INT4_LIMIT = tl.constexpr(2.0**110)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Added to a number below 2^22, it leaves the nearest integer, ties to even, in the low bits."""
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_SMALL_TILE = tl.constexpr(512)
"""Up to so many numbers, care takes no longer than to find out whether it is needed."""
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def code_rows(
    rows,
    scale_ptr,
    heads,
    DTYPE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Code rows as a cache's format says.

    Args:
        rows: `[tokens * heads, columns]`; columns from WIDTH on are zeros.
        scale_ptr: The layer's scale, or its scales, one a head; unused where the format has none.
        heads: Which heads the rows are of, `[heads]`.
        DTYPE: What pages of `auto` hold.
        NUM_HEADS: KV heads.
        WIDTH: Numbers of a row.
        FORMAT: Name of the format.
        IS_PER_HEAD: Whether the layer has a scale for each head.
        NATIVE: As for `encode_fp8`.

    Returns:
        A tuple: codes `[tokens * heads, columns]` (int4: words of eight), then what the format
        keeps for each row, float32 `[tokens * heads]`: the scale, and the offset of int4.
    """
    if FORMAT == "auto":
        return (convert(rows, DTYPE, NATIVE),)
    elif FORMAT == "fp8_e4m3":
        scale = _layer_scale(scale_ptr, heads, rows.shape[0], NUM_HEADS, IS_PER_HEAD)
        return (encode_fp8(divide(rows.to(tl.float32), scale, NATIVE), 3, NATIVE),)
    elif FORMAT == "fp8_e5m2":
        scale = _layer_scale(scale_ptr, heads, rows.shape[0], NUM_HEADS, IS_PER_HEAD)
        return (encode_fp8(divide(rows.to(tl.float32), scale, NATIVE), 2, NATIVE),)
    elif FORMAT == "fp8_per_token_head":
        return _code_fp8(rows.to(tl.float32), NATIVE)
    elif FORMAT == "int8_per_token_head":
        return _code_int8(rows.to(tl.float32), NATIVE)
    else:
        return _code_int4(rows.to(tl.float32), WIDTH, NATIVE)


@triton.jit
def _layer_scale(
    scale_ptr, heads, ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, IS_PER_HEAD: tl.constexpr
) -> tl.tensor:
    if IS_PER_HEAD:
        scale = tl.load(scale_ptr + heads, mask=heads < NUM_HEADS, other=1.0)[None, :]
        return tl.broadcast_to(scale, (ROWS // heads.shape[0], heads.shape[0])).reshape(ROWS, 1)
    else:
        return tl.load(scale_ptr)


@triton.jit
def _needs_care(x) -> tl.tensor:
    """Whether a tile has NaN or large numbers, as almost none has, or is too small to find out."""
    if x.numel <= _SMALL_TILE:
        return True
    else:
        return not (tl.sum(tl.sum(tl.abs(x), 1), 0) < 2.0**100)


@triton.jit
def _code_fp8(x, NATIVE: tl.constexpr) -> tl.tensor:
    scale = _row_scale(tl.max(tl.abs(x), 1), 448.0, NATIVE)
    if _needs_care(x):
        scale = _scale_of_finite(x, 448.0, NATIVE)
    return encode_fp8(divide(x, scale[:, None], NATIVE), 3, NATIVE), scale


@triton.jit
def _code_int8(x, NATIVE: tl.constexpr) -> tl.tensor:
    scale = _row_scale(tl.max(tl.abs(x), 1), 127.0, NATIVE)
    if _needs_care(x):
        x = tl.where(x == x, x, 0.0)
        scale = _scale_of_finite(x, 127.0, NATIVE)
        # Infinities become the last code, and nothing else becomes another.
        limit = 126.75 * scale[:, None]
        x = tl.clamp(x, -limit, limit)
    return _nearest(_divide_finite(x, scale[:, None], NATIVE)).to(tl.uint8), scale


@triton.jit
def _code_int4(x, WIDTH: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    if _needs_care(x):
        x = tl.where(x == x, tl.clamp(x, -_INT4_LIMIT, _INT4_LIMIT), 0.0)
    x = rotate_tile(x, WIDTH)
    least = x
    most = x
    if x.shape[1] != WIDTH:
        in_row = (tl.arange(0, x.shape[1]) < WIDTH)[None, :]
        least = tl.where(in_row, x, float("inf"))
        most = tl.where(in_row, x, float("-inf"))
    offset = tl.min(least, 1)
    offset = tl.where(offset == 0.0, 0.0, offset)
    scale = _row_scale(tl.max(most, 1) - offset, 15.0, NATIVE)
    codes = _nearest_product(x - offset[:, None], tl.div_rn(1.0, scale)[:, None])
    for doubling in tl.static_range(3):
        even, odd = tl.split(codes.reshape(x.shape[0], x.shape[1] >> (doubling + 1), 2))
        codes = even + (odd << (4 << doubling))
    return codes, scale, offset


@triton.jit
def _row_scale(extent, STEPS: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    if NATIVE:
        # One correction is right for these STEPS: every float32 was tried.
        reciprocal: tl.constexpr = 1.0 / STEPS
        quotient = extent * reciprocal
        quotient = tl.fma(tl.fma(quotient, -STEPS, extent), reciprocal, quotient)
    else:
        quotient = tl.div_rn(extent, STEPS)
    return tl.where(extent >= STEPS * _SMALLEST_NORMAL, quotient, 1.0)


@triton.jit
def _scale_of_finite(x, STEPS: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    magnitude = tl.abs(tl.where(tl.abs(x) < float("inf"), x, 0.0))
    return _row_scale(tl.max(magnitude, 1), STEPS, NATIVE)


@triton.jit
def _divide_finite(x, scale, NATIVE: tl.constexpr) -> tl.tensor:
    """Divide as `divide` would, but without care for infinities, NaN and -0."""
    if NATIVE:
        boost = tl.where(scale < 1.0, 2.0**64, 2.0**-64)
        negative = x * -boost
        scale *= boost
        reciprocal = -tl.div_rn(1.0, scale)
        quotient = negative * reciprocal
        return tl.fma(tl.fma(quotient, scale, negative), reciprocal, quotient)
    else:
        return tl.div_rn(x, scale)


@triton.jit
def _nearest(x) -> tl.tensor:
    """Round numbers below 2^22 to the nearest integer, ties to even; int32."""
    return (x + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS


@triton.jit
def _nearest_product(x, y) -> tl.tensor:
    """Round products as `_nearest` would, were they exact."""
    if _IS_INTERPRETED:
        # The interpreter has no fused multiply-add.
        product = x.to(tl.float64) * y.to(tl.float64)
        return (product + 1.5 * 2.0**52).to(tl.int64, bitcast=True).to(tl.int32)
    else:
        return tl.fma(x, y, _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
