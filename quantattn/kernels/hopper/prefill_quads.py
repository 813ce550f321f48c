"""Rows of products as the threads of a Hopper prefill hold them: what each does without a shuffle.

The tensor cores leave columns 8j + 2q + e of two rows with thread q of a quad. Tiles are seen as
`[rows, columns / 8, 4, 2]`, and what belongs to a row as `[rows, 4]`, a number for each of the four
threads.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = [
    "exponentials",
    "halves",
    "largest_of_rows",
    "of_rows",
    "quads",
    "shrink_rows",
    "sums_of_rows",
]

CHAINS: gl.constexpr = gl.constexpr(2)
"""Maxima and sums of a row that a thread works on at a time."""

# Largest of the four threads of a quad, for both rows of each.
QUAD_MAX: gl.constexpr = gl.constexpr("""{ .reg .f32 a, b;
shfl.sync.bfly.b32 a, $2, 1, 31, -1; shfl.sync.bfly.b32 b, $3, 1, 31, -1;
max.f32 $0, $2, a; max.f32 $1, $3, b;
shfl.sync.bfly.b32 a, $0, 2, 31, -1; shfl.sync.bfly.b32 b, $1, 2, 31, -1;
max.f32 $0, $0, a; max.f32 $1, $1, b; }""")


@gluon.jit
def quads(tile) -> gl.tensor:
    """A tile of products as `[rows, columns / 8, 4, 2]`."""
    return tile.reshape([tile.shape[0], tile.shape[1] // 8, 4, 2])


@gluon.jit
def of_rows(numbers, tile) -> gl.tensor:
    """Numbers `[rows, 4]` as those of the rows of a tile `[rows, columns / 8, 4, 2]`."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    return gl.convert_layout(numbers, layout, assert_trivial=True)[:, None, :, None]


@gluon.jit
def largest_of_rows(tile, layout: gl.constexpr) -> gl.tensor:
    """Largest number of each row."""
    ROWS: gl.constexpr = tile.shape[0]
    EIGHTS: gl.constexpr = tile.shape[1]
    largest = gl.max(tile.reshape([ROWS, EIGHTS // CHAINS, CHAINS, 4, 2]), 1)
    largest = gl.max(gl.max(largest, 1), 2)
    largest = gl.inline_asm_elementwise(
        QUAD_MAX, "=&f,=&f,f,f", [largest], dtype=gl.float32, is_pure=False, pack=2
    )
    return gl.convert_layout(largest, layout, assert_trivial=True)


@gluon.jit
def sums_of_rows(tile, layout: gl.constexpr) -> gl.tensor:
    """Each thread's share of the sum of each row."""
    ROWS: gl.constexpr = tile.shape[0]
    EIGHTS: gl.constexpr = tile.shape[1]
    total = gl.sum(tile.reshape([ROWS, EIGHTS // CHAINS, CHAINS, 4, 2]), 1)
    return gl.convert_layout(gl.sum(gl.sum(total, 1), 2), layout, assert_trivial=True)


@gluon.jit
def exponentials(scores, factor, reference) -> gl.tensor:
    """2^(score * factor - reference), with a factor and a reference for each row."""
    return gl.exp2(scores * of_rows(factor, scores) - of_rows(reference, scores))


@gluon.jit
def shrink_rows(tile, shrink) -> gl.tensor:
    """Multiply the rows of a tile of products `[rows, columns]`."""
    layout: gl.constexpr = tile.type.layout
    shrunk = quads(tile)
    shrunk = (shrunk * of_rows(shrink, shrunk)).reshape(tile.shape)
    return gl.convert_layout(shrunk, layout, assert_trivial=True)


@gluon.jit
def halves(tile) -> gl.tuple:
    """The left and the right half of a tile `[rows, columns / 8, 4, 2]`."""
    ROWS: gl.constexpr = tile.shape[0]
    EIGHTS: gl.constexpr = tile.shape[1]
    return tile.reshape([ROWS, 2, EIGHTS // 2, 4, 2]).permute((0, 2, 3, 4, 1)).split()
