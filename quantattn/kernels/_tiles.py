"""Helpers that kernels share: on the device, and to choose what runs there."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from quantattn.kernels._devices import capability

__all__ = ["convert", "divide", "divide_by", "divisor", "encode_fp8", "is_native", "row_and_group"]


def is_native(device: torch.device) -> bool:
    """Whether the device itself rounds float32 to FP8.

    Devices before sm_89 have no FP8.
    """
    return capability(device) >= (8, 9)


@triton.jit
def row_and_group(first, num_groups, COUNT: tl.constexpr) -> tl.tensor:
    """Rows and places in them, int64, of COUNT groups from `first` on; a row has num_groups."""
    group = first % num_groups + tl.arange(0, COUNT)
    row = (first // num_groups).to(tl.int64) + group // num_groups
    return row, (group % num_groups).to(tl.int64)


@triton.jit
def divisor(scale, NATIVE: tl.constexpr) -> tl.tuple:
    """What `divide_by` takes of valid scales, which can be computed long before."""
    if NATIVE:
        boost = tl.where(scale < 1.0, 2.0**64, 2.0**-64)
        scale *= boost
        return scale, boost, tl.div_rn(1.0, scale)
    else:
        return (scale,)


@triton.jit
def _divide_scaled(x, scale, reciprocal) -> tl.tensor:
    limit: tl.constexpr = 2.0**30
    quotient = tl.clamp(x * reciprocal, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    remainder = tl.fma(quotient, scale, x * -1.0)
    return tl.fma(remainder, reciprocal * -1.0, quotient)


@triton.jit
def divide_by(x, divisor, NATIVE: tl.constexpr) -> tl.tensor:
    """Divide a float32 tile by scales as `divide` does, by what `divisor` makes of them."""
    if NATIVE:
        scale, boost, reciprocal = divisor
        return _divide_scaled(x * boost, scale, reciprocal)
    else:
        return tl.div_rn(x, divisor[0])


@triton.jit
def divide(x, scale, NATIVE: tl.constexpr) -> tl.tensor:
    """Divide a float32 tile by valid scales, well enough to choose the quotient's FP8 code.

    NATIVE corrects a product with the reciprocal once, by fused multiply-adds (Markstein, 1990), in
    place of a division. The quotient's last bit can be off, but never where a code begins: a test
    tries all scales with every boundary. Powers of two keep remainders exact. Quotients saturate at
    2^30, so that they have remainders, and the remainder's sign keeps the sign of a zero. The
    interpreter has no fused multiply-add.
    """
    if NATIVE:
        # Before the reciprocal: Hopper's prefill has no register for it while it scales rows.
        boost = tl.where(scale < 1.0, 2.0**64, 2.0**-64)
        x *= boost
        scale *= boost
        return _divide_scaled(x, scale, tl.div_rn(1.0, scale))
    else:
        return tl.div_rn(x, scale)


@triton.jit
def encode_fp8(x, MANTISSA_BITS: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Round a float32 tile to FP8 codes (uint8): nearest even, saturating, NaN as 0x7F.

    MANTISSA_BITS names the format: 3 is e4m3, 2 is e5m2. NATIVE uses the device's own conversion;
    otherwise integers do it, the same bits anywhere.
    """
    if NATIVE:
        return _encode_native(x, MANTISSA_BITS)
    else:
        return tl.where(x != x, 0x7F, _encode_software(x, MANTISSA_BITS)).to(tl.uint8)


@triton.jit
def _encode_native(x, MANTISSA_BITS: tl.constexpr) -> tl.tensor:
    # Triton's own cast is the same instruction, but for sm_89, where it rounds to fp16 before.
    FORMAT: tl.constexpr = "e4m3x2" if MANTISSA_BITS == 3 else "e5m2x2"
    CONVERT: tl.constexpr = "cvt.rn.satfinite." + FORMAT + ".f32 "
    if x.numel >= 4 * num_threads():
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; "
            + CONVERT
            + "low, $2, $1; "
            + CONVERT
            + "high, $4, $3; "
            + "mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        pairs = tl.inline_asm_elementwise(
            CONVERT + "$0, $1, $1;", "=h,r", [x], dtype=tl.int16, is_pure=True, pack=1
        )
        return pairs.to(tl.uint8)


@triton.jit
def _encode_software(x, MANTISSA_BITS: tl.constexpr) -> tl.tensor:
    # float32 has 23 mantissa bits and bias 127; FP8 has 7 bits of exponent and mantissa together.
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    BIAS: tl.constexpr = (1 << (6 - MANTISSA_BITS)) - 1
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # Adding 2**23 times the smallest subnormal leaves the code in the low bits, rounded to even.
    SUBNORMAL_OFFSET: tl.constexpr = (128 - BIAS + SHIFT) << 23
    LARGEST_CODE: tl.constexpr = 0x7E if MANTISSA_BITS == 3 else 0x7B

    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    to_even = ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    # A NaN wraps, which debug mode would report.
    rounded = tl.add(magnitude, to_even, sanitize_overflow=False)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
    offset = tl.full(x.shape, SUBNORMAL_OFFSET, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (tl.abs(x) + offset).to(tl.int32, bitcast=True) - SUBNORMAL_OFFSET
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, tl.minimum(normal, LARGEST_CODE))
    return code | ((bits >> 24) & 0x80)


@triton.jit
def convert(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Convert a floating tile to another model dtype, rounding to nearest even.

    Where not NATIVE, integers round to bfloat16: Triton's interpreter only cuts the bits off.
    """
    if NATIVE or tl.bfloat16 != DTYPE or x.dtype == tl.bfloat16:
        return x.to(DTYPE)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        up = 0x7FFF + ((bits >> 16) & 1)
        # A NaN wraps, which debug mode would report.
        rounded = tl.add(bits, up, sanitize_overflow=False)
        rounded = tl.where(x != x, 0x7FC00000, rounded)
        return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
