"""int4 codes as fp16 numbers for the products of a Hopper prefill, in an order of their own.

A byte has an even dim in its low half and the next one in its high half. Words of eight codes
become numbers two at a time, 0 and 4, 1 and 5, 2 and 6, 3 and 7, and stay in this order.

Keys become their codes less 8, which is exact. A value becomes code * scale + offset over a power
of two, one for a tile: its largest is between 2^14 and 2^15, so that numbers down to 2^-28 of that
keep all their bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantattn.kernels.hopper.memory import reinterpret, tile_layout

__all__ = ["convert_rows", "dims_as_stored", "dims_in_order", "store_value_terms"]

TOP: gl.constexpr = gl.constexpr(14)
"""Log 2 of the largest value of a tile."""
LOWEST: gl.constexpr = gl.constexpr((127 - 80) << 23)
"""Smallest power of two, 2^-80: sums of probabilities over it are finite."""
HIGHEST: gl.constexpr = gl.constexpr((127 + 100) << 23)
RUN: gl.constexpr = gl.constexpr(512)
"""Words that are converted at once: four a thread."""

# Eight codes less 8, in pairs: 1024 + n has n in fp16's low bits, and 1024 + 16 n above them.
UNPACK: gl.constexpr = gl.constexpr("""{
.reg .b32 high, a, b, c, d, eight, sixteenth, bias;
mov.b32 eight, 0xE408E408; mov.b32 sixteenth, 0x2C002C00; mov.b32 bias, 0xD480D480;
shr.b32 high, $4, 8;
lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 b, $4, 0x00F000F0, 0x64006400, 0xEA;
lop3.b32 c, high, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 d, high, 0x00F000F0, 0x64006400, 0xEA;
add.rn.f16x2 $0, a, eight; fma.rn.f16x2 $1, b, sixteenth, bias;
add.rn.f16x2 $2, c, eight; fma.rn.f16x2 $3, d, sixteenth, bias;
}""")

SCALE: gl.constexpr = gl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")


@gluon.jit
def dims_as_stored(rows) -> gl.tensor:
    """Bring the dims of query rows into the order of converted codes."""
    ROWS: gl.constexpr = rows.shape[0]
    COLUMNS: gl.constexpr = rows.shape[1]
    rows = rows.reshape([ROWS, COLUMNS // 8, 2, 4]).permute((0, 1, 3, 2))
    return rows.reshape([ROWS, COLUMNS])


@gluon.jit
def dims_in_order(rows) -> gl.tensor:
    """Undo `dims_as_stored`."""
    ROWS: gl.constexpr = rows.shape[0]
    COLUMNS: gl.constexpr = rows.shape[1]
    rows = rows.reshape([ROWS, COLUMNS // 8, 4, 2]).permute((0, 1, 3, 2))
    return rows.reshape([ROWS, COLUMNS])


@gluon.jit
def _pair(x) -> gl.tensor:
    """A number as two of fp16, which may differ: their mean is nearer to it than one can be."""
    first = x.to(gl.float16)
    second = (2.0 * x - first.to(gl.float32)).to(gl.float16)
    low = first.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return low | (second.to(gl.int16, bitcast=True).to(gl.int32) << 16)


@gluon.jit
def store_value_terms(terms, scale, centre) -> gl.tensor:
    """Store what makes values of a tile's codes less 8; returns the bits of the power of two.

    `centre` is the value of code 8.
    """
    bound = gl.maximum(gl.abs(centre - 8.0 * scale), gl.abs(centre + 7.0 * scale))
    exponent = gl.max(bound, 0).to(gl.int32, bitcast=True) & 0x7F800000
    exponent = gl.minimum(gl.maximum(exponent - (TOP << 23), LOWEST), HIGHEST)
    inverse = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
    terms.index(0).store(_pair(scale * inverse))
    terms.index(1).store(_pair(centre * inverse))
    return exponent


@gluon.jit
def _times(codes, factor, summand) -> gl.tensor:
    """Multiply pairs of numbers by the factor of their row, and add its summand."""
    return gl.inline_asm_elementwise(
        SCALE, "=r,r,r,r", [codes, factor, summand], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def convert_rows(codes, numbers, terms) -> None:
    """Write a tile of codes `[keys, bytes]` as numbers `[keys, 2 * bytes]`; values have terms."""
    KEYS: gl.constexpr = codes.shape[0]
    WORDS: gl.constexpr = codes.shape[1] // 4
    ROWS: gl.constexpr = min(KEYS, RUN // WORDS)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WORDS, WORDS], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    code_tile: gl.constexpr = tile_layout(WORDS, 32, 2)
    number_tile: gl.constexpr = tile_layout(4 * WORDS, 32, 2)
    code_words = reinterpret(codes, gl.int32, [KEYS, WORDS], code_tile)
    number_words = reinterpret(numbers, gl.int32, [KEYS, 4 * WORDS], number_tile)
    for run in gl.static_range(0, KEYS, ROWS):
        words = code_words.slice(run, ROWS, dim=0).load(layout)
        first, second, third, fourth = gl.inline_asm_elementwise(
            UNPACK,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        if terms is not None:
            factor = terms.index(0).slice(run, ROWS).load(rows)
            summand = terms.index(1).slice(run, ROWS).load(rows)
            factor, summand = factor[:, None], summand[:, None]
            factor, _ = gl.broadcast(factor, first)
            summand, _ = gl.broadcast(summand, first)
            first = _times(first, factor, summand)
            second = _times(second, factor, summand)
            third = _times(third, factor, summand)
            fourth = _times(fourth, factor, summand)
        pairs = gl.join(gl.join(first, third), gl.join(second, fourth))
        pairs = pairs.reshape([ROWS, 4 * WORDS])
        number_words.slice(run, ROWS, dim=0).store(pairs)
