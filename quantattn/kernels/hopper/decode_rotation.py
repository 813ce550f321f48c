"""int4's rotation of query rows on Hopper, as `quantattn.rotation` defines it but for rounding."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["rotate_query"]


@gluon.jit
def _signs(columns) -> gl.tensor:
    """The Rudin-Shapiro sequence."""
    parity = columns & (columns >> 1)
    for exponent in gl.static_range(3, -1, -1):
        parity ^= parity >> (1 << exponent)
    return 1.0 - 2.0 * (parity & 1).to(gl.float32)


@gluon.jit
def _butterfly(x, STRIDE: gl.constexpr) -> gl.tensor:
    """Make numbers i and i + STRIDE their sum and their difference."""
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    pairs = x.reshape([ROWS, WIDTH // (2 * STRIDE), 2, STRIDE])
    along: gl.constexpr = pairs.type.layout
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, along))))[
        None, None, :, None
    ]
    total = gl.expand_dims(gl.sum(pairs, 2), 2)
    return gl.where(which == 0, total, total - 2.0 * pairs).reshape([ROWS, WIDTH])


@gluon.jit
def rotate_query(x) -> gl.tensor:
    """Rotate float32 rows, and put their even dims before the odd ones; the width is 2^n."""
    layout: gl.constexpr = x.type.layout
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    x *= _signs(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)))[None, :] * WIDTH**-0.5
    for stage in gl.static_range(16):
        if (1 << stage) < WIDTH:
            x = _butterfly(x, 1 << stage)
    x = x.reshape([ROWS, WIDTH // 2, 2]).permute((0, 2, 1)).reshape([ROWS, WIDTH])
    return gl.convert_layout(x, layout)
