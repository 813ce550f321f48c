"""int4's rotation on Hopper, as `quantattn.rotation` defines it but for rounding."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantattn.kernels.hopper.memory import hide

__all__ = ["add_parts", "rotate_back", "rotate_rows"]


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
    COLUMNS: gl.constexpr = x.shape[1]
    pairs = x.reshape([ROWS, COLUMNS // (2 * STRIDE), 2, STRIDE])
    along: gl.constexpr = pairs.type.layout
    which = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, along))))[
        None, None, :, None
    ]
    # What a number XORs with to the XOR of both is its partner.
    bits = pairs.to(gl.int32, bitcast=True)
    partner = bits ^ gl.expand_dims(gl.xor_sum(bits, 2), 2)
    sign = 1.0 - 2.0 * which.to(gl.float32)
    turned = gl.fma(pairs, sign + gl.zeros_like(pairs), partner.to(gl.float32, bitcast=True))
    return turned.reshape([ROWS, COLUMNS])


@gluon.jit
def _times_signs(x, FIRST: gl.constexpr, WIDTH: gl.constexpr) -> gl.tensor:
    """Multiply rows, whose columns begin with FIRST, with the signs over sqrt(a run's length)."""
    layout: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    # Signs that were computed ahead of a loop would be kept in registers.
    columns = hide(FIRST) + gl.arange(0, x.shape[1], layout=layout)
    return x * (_signs(columns) * (WIDTH & -WIDTH) ** -0.5)[None, :]


@gluon.jit
def rotate_rows(x, WIDTH: gl.constexpr) -> gl.tensor:
    """Rotate float32 rows of WIDTH numbers; columns from WIDTH on stay 0."""
    x = _times_signs(x, 0, WIDTH)
    for stage in gl.static_range(16):
        if (1 << stage) < (WIDTH & -WIDTH):
            x = _butterfly(x, 1 << stage)
    return x


@gluon.jit
def add_parts(parts, WIDTH: gl.constexpr) -> gl.tuple:
    """The stage of `rotate_back` between the two parts that rows lie in, where there is one."""
    if len(parts) == 2 and parts[0].shape[1] < (WIDTH & -WIDTH):
        return parts[0] + parts[1], parts[0] - parts[1]
    else:
        return parts


@gluon.jit
def rotate_back(x, FIRST: gl.constexpr, WIDTH: gl.constexpr) -> gl.tensor:
    """Undo `rotate_rows`, for a part of the columns that begins with FIRST, after `add_parts`."""
    for stage in gl.static_range(16):
        if (1 << stage) < min(x.shape[1], WIDTH & -WIDTH):
            x = _butterfly(x, 1 << stage)
    return _times_signs(x, FIRST, WIDTH)
