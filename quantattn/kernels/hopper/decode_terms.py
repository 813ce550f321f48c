"""Query rows and probabilities as operands beside codes of keys and values: two terms a number.

The tensor cores take both operands in one type, and a code's type holds few bits, so that each
number is sent as two terms in neighbouring columns. A thread holds both sums of such a pair: adding
them takes no shuffle.

- FP8 codes: x = hi + lo / 32, both e4m3, which has 4 significant bits.
- integer codes: x = 256 hi + lo, both int8, after rounding x to an integer of 16 bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quantattn.kernels.hopper.memory import reinterpret, tile_layout

__all__ = [
    "add_terms",
    "largest_exponent",
    "pair_tile",
    "powers_of_two",
    "product_layout",
    "store_probabilities",
    "store_query",
    "sum_layout",
    "sum_type",
    "term_type",
]

# Two numbers to the e4m3 pairs of their hi terms (low half) and lo terms, where |x| <= 256. float16
# holds more bits than hi and lo together. The zeros are there for ptxas 12.8, which miscompiles an
# e4m3 pair that is both packed with another pair and unpacked: it unpacks a register that nothing
# wrote. `hi = x.to(float8e4nv)` and `x - hi.to(float32)` fall to it as well.
SPLIT_FP8: gl.constexpr = gl.constexpr("""{
.reg .b16 hi, lo, zero; .reg .b32 pair, read, shift, packed_hi, packed_lo;
mov.b32 shift, 0x50005000;
mov.b16 zero, 0;
cvt.rn.f16x2.f32 pair, $2, $1;
cvt.rn.satfinite.e4m3x2.f16x2 hi, pair;
mov.b32 packed_hi, {hi, zero};
cvt.rn.f16x2.e4m3x2 read, hi;
sub.f16x2 pair, pair, read;
mul.f16x2 pair, pair, shift;
cvt.rn.satfinite.e4m3x2.f16x2 lo, pair;
mov.b32 packed_lo, {lo, zero};
prmt.b32 $0, packed_hi, packed_lo, 0x5410;
}""")

# The same for int8 terms, where |x| <= 32639. Added to x, 1.5 * 2^23 + 128 leaves the nearest
# integer plus 128 in the low bits: hi is their second byte, lo the first but for its sign.
SPLIT_INTEGERS: gl.constexpr = gl.constexpr("""{
.reg .f32 first, second; .reg .b32 bytes;
add.rn.f32 first, $1, 0f4B400080;
add.rn.f32 second, $2, 0f4B400080;
prmt.b32 bytes, first, second, 0x4051;
xor.b32 $0, bytes, 0x80800000;
}""")


@gluon.constexpr_function
def powers_of_two(first, end) -> list[int]:
    """Powers of two from `first` to below `end`."""
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def _is_fp8(codes) -> bool:
    return codes in ("e4m3", "e5m2")


@gluon.constexpr_function
def term_type(codes) -> gl.dtype:
    """Triton's type of terms beside such codes."""
    return gl.float8e4nv if _is_fp8(codes) else gl.int8


@gluon.constexpr_function
def sum_type(codes) -> gl.dtype:
    """Triton's type of sums of products with such codes."""
    return gl.float32 if _is_fp8(codes) else gl.int32


@gluon.constexpr_function
def largest_exponent(codes) -> float:
    """Log 2 of the largest number that two terms hold, with some room for errors."""
    return 8.0 if _is_fp8(codes) else 14.98


@gluon.constexpr_function
def sum_layout(height, columns) -> gl.DistributedLinearLayout:
    """Registers of sums `[height, columns]` of which the tensor cores made each as hi and lo."""
    rows = [[i, 0] for i in powers_of_two(64, height)]
    registers = [[8, 0], *([0, i] for i in powers_of_two(4, columns)), *rows]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[height, columns],
    )


@gluon.constexpr_function
def product_layout(columns) -> gl.NVMMADistributedLayout:
    """Registers of products with hi and lo terms of `columns` columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * columns, 32]
    )


@gluon.constexpr_function
def pair_tile(width) -> gl.NVMMASharedLayout:
    """Shared memory of rows of `width` codes, read as 16-bit pairs."""
    return tile_layout(width // 2, 16, 2)


@gluon.jit
def _split(x, SPEC: gl.constexpr) -> gl.tensor:
    """Split neighbouring numbers: the pair of their hi terms, and after it that of lo terms."""
    SPLIT: gl.constexpr = SPLIT_FP8 if _is_fp8(SPEC.codes) else SPLIT_INTEGERS
    return gl.inline_asm_elementwise(SPLIT, "=r,r,r", [x], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def store_query(query_tile, rows, sign, SPEC: gl.constexpr) -> gl.tuple:
    """Store float32 query rows times `sign` as neighbouring rows of hi and lo terms.

    Returns:
        What each row must be multiplied by, a power of two, and the sum of each row.
    """
    HEIGHT: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    # The largest number of a row is brought to [2^TOP, 2^(TOP + 1)), exactly.
    TOP: gl.constexpr = 7 if _is_fp8(SPEC.codes) else 13
    exponent = (gl.max(gl.abs(rows), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF
    exponent = gl.minimum(gl.maximum(exponent, TOP + 1), 254)
    up = ((254 + TOP - exponent) << 23).to(gl.float32, bitcast=True) * sign
    rows *= up[:, None]
    terms = _split(rows, SPEC).reshape([HEIGHT, WIDTH // 2, 2])
    hi, lo = terms.split()
    terms = gl.join(hi, lo).permute((0, 2, 1)).reshape([2 * HEIGHT, WIDTH // 2])
    SHAPE: gl.constexpr = [2 * HEIGHT, WIDTH // 2]
    reinterpret(query_tile, gl.int16, SHAPE, pair_tile(WIDTH)).store(terms)
    fence_async_shared()
    return ((exponent - TOP) << 23).to(gl.float32, bitcast=True), gl.sum(rows, 1)


@gluon.jit
def store_probabilities(prob_tile, prob, SPEC: gl.constexpr) -> None:
    """Store probabilities as hi and lo terms, in the order of keys that V's operand has."""
    KEYS: gl.constexpr = SPEC.block_n
    terms = _split(prob, SPEC)
    # Rows 16b + c and 16b + 8 + c of `terms` are the hi and lo pairs of the keys with these
    # numbers, which go to places 16b + 2c and 16b + 2c + 1.
    terms = terms.reshape([KEYS // 16, 2, 8, SPEC.block_m]).permute((0, 2, 3, 1))
    terms = terms.reshape([KEYS // 2, 2 * SPEC.block_m])
    SHAPE: gl.constexpr = [2 * SPEC.block_m, KEYS // 2]
    reinterpret(prob_tile, gl.int16, SHAPE, pair_tile(KEYS)).permute((1, 0)).store(terms)
    fence_async_shared()


@gluon.jit
def add_terms(sums) -> gl.tensor:
    """Add the products with hi and with lo terms; float32."""
    HEIGHT: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1] // 2
    layout: gl.constexpr = sum_layout(HEIGHT, COLUMNS)
    hi, lo = sums.reshape([HEIGHT, COLUMNS, 2]).split()
    hi = gl.convert_layout(hi, layout, assert_trivial=True)
    lo = gl.convert_layout(lo, layout, assert_trivial=True)
    if sums.dtype == gl.int32:
        return (hi * 256 + lo).to(gl.float32)
    else:
        return lo * 0.03125 + hi
