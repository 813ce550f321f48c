"""Helpers that kernels share: on the device, and to choose what runs there."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["convert", "divide", "encode_fp8", "is_native"]


def is_native(device: torch.device) -> bool:
    """Whether the device itself rounds float32 to FP8 correctly.

    Devices before sm_89 have no FP8, sm_89 rounds twice, and Triton's interpreter, which takes
    tensors of the CPU, rounds ties away from zero.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def divide(x, scale, NATIVE: tl.constexpr) -> tl.tensor:
    """Divide a float32 tile by valid scales, rounded to nearest.

    NATIVE multiplies by the reciprocal and corrects twice with fused multiply-adds, which rounds
    correctly where reciprocal and quotient are normal (Markstein, 1990) and costs a third of a
    division. The interpreter has no fused multiply-add.
    """
    if NATIVE:
        reciprocal = tl.div_rn(1.0, scale)
        product = x * reciprocal
        quotient = tl.fma(tl.fma(-product, scale, x), reciprocal, product)
        quotient = tl.fma(tl.fma(-quotient, scale, x), reciprocal, quotient)
        # An infinite product has no remainder, and a corrected -0 would be 0.
        return tl.where(tl.abs(quotient) > 0.0, quotient, product)
    else:
        return tl.div_rn(x, scale)


@triton.jit
def encode_fp8(x, MANTISSA_BITS: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Round a float32 tile to FP8 codes (uint8): nearest even, saturating, NaN as 0x7F.

    MANTISSA_BITS names the format: 3 is e4m3, 2 is e5m2. NATIVE uses the device's own conversion,
    which must round once, as sm_90 and later do, and which saturates and keeps NaN by itself;
    otherwise integers do it, the same bits anywhere.
    """
    if NATIVE and MANTISSA_BITS == 3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif NATIVE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return tl.where(x != x, 0x7F, _encode_software(x, MANTISSA_BITS)).to(tl.uint8)


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
    normal = ((magnitude + to_even) >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
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
        rounded = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
