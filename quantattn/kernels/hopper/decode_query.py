"""Query rows of a Hopper decode CTA: loaded to registers, stored as an operand."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantattn.kernels.hopper import decode_numbers as numbers
from quantattn.kernels.hopper import decode_terms as terms
from quantattn.kernels.hopper.decode_tiles import sum_layout
from quantattn.kernels.hopper.rotation import rotate_rows

__all__ = ["load_query", "store_query"]


@gluon.constexpr_function
def query_layout(head_dim) -> gl.BlockedLayout:
    """Registers of a tile of query rows."""
    return gl.BlockedLayout([1, head_dim // 16], [2, 16], [4, 1], [1, 0])


@gluon.jit
def load_query(query, start, query_len, head, first_row, SPEC: gl.constexpr) -> gl.tensor:
    """Load query rows of a sequence and KV head, `[block_m, head_dim]`; 0 where there are none."""
    layout: gl.constexpr = query_layout(SPEC.keys.width)
    rows = first_row + gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, SPEC.keys.width, layout=gl.SliceLayout(0, layout))
    tokens = (start + rows // SPEC.group_size).to(gl.int64)
    heads = head * SPEC.group_size + rows % SPEC.group_size
    places = tokens * query.token_stride + heads * query.head_stride
    exists = rows < query_len * SPEC.group_size
    numbers = gl.load(query.numbers + places[:, None] + dims[None, :], exists[:, None], other=0)
    if numbers.dtype == gl.uint8:
        return numbers.to(gl.float8e4nv, bitcast=True)
    else:
        return numbers


@gluon.jit
def _evens_first(rows) -> gl.tensor:
    """Put the even dims of rows before the odd ones, as int4 codes are taken apart."""
    ROWS: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    rows = rows.reshape([ROWS, WIDTH // 2, 2]).permute((0, 2, 1)).reshape([ROWS, WIDTH])
    return gl.convert_layout(rows, query_layout(WIDTH))


@gluon.jit
def store_query(query_tile, rows, softmax_scale, SPEC: gl.constexpr) -> gl.tuple:
    """Store query rows as an operand.

    Returns:
        What turns each row's products into scores; for int4, then the sum of each stored row.
    """
    # Running maxima are taken of products, so that what these are multiplied by is positive.
    sign = gl.where(softmax_scale < 0.0, -1.0, 1.0)
    columns: gl.constexpr = gl.SliceLayout(0, sum_layout(SPEC.block_n, SPEC))
    if SPEC.codes is None:
        factor = numbers.store_query(query_tile, rows, sign)
    else:
        rows = rows.to(gl.float32)
        if SPEC.codes == "int4":
            rows = _evens_first(rotate_rows(rows, SPEC.keys.width))
        factor, total = terms.store_query(query_tile, rows, sign, SPEC)
    factor = gl.maximum(factor * gl.abs(softmax_scale), 2.0**-126)
    factor = gl.convert_layout(factor, columns)
    if SPEC.codes == "int4":
        return factor, gl.convert_layout(total, columns)
    else:
        return (factor,)
