"""A tile of codes of keys and values as operands of Hopper's tensor cores.

Query and probabilities are two terms a number, see `decode_terms`. Keys of 8 bits are multiplied
where they lie; values are transposed on the way to registers. Two int4 codes share a byte: the even
dims of a row in the low halves of its bytes, the odd ones in the high halves.

The tensor cores keep 13 fraction bits of a sum of e4m3 products: scores are added up in float32
from chains of 64 dims, outputs from tiles. Sums of integers are exact.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from quantattn.kernels.hopper.decode_terms import (
    add_terms,
    pair_tile,
    powers_of_two,
    product_layout,
    store_probabilities,
    sum_type,
)
from quantattn.kernels.hopper.memory import reinterpret, wait_for

__all__ = [
    "code_type",
    "dims_in_order",
    "load_part",
    "mask_values",
    "score_tile",
    "start_part",
    "weigh_values",
]

CHAIN: gl.constexpr = gl.constexpr(64)
"""Dims whose products the tensor cores add up by themselves."""

# Four keys (t, t + 8, t + 1, t + 9) of an even byte and of the odd one after it, from two registers
# that hold pairs of bytes.
UNZIP: gl.constexpr = gl.constexpr("""
prmt.b32 $0, $2, $3, 0x6240;
prmt.b32 $1, $2, $3, 0x7351;""")

# Four bytes to their low halves and their high halves.
HALVE: gl.constexpr = gl.constexpr("""{
.reg .b32 shifted;
shr.b32 shifted, $2, 4;
and.b32 $0, $2, 0x0F0F0F0F;
and.b32 $1, shifted, 0x0F0F0F0F;
}""")

# Four bytes to their low or their high halves, as a byte of the second operand says.
PICK_HALF: gl.constexpr = gl.constexpr("""{
.reg .b32 shift;
and.b32 shift, $2, 7;
shr.b32 shift, $1, shift;
and.b32 $0, shift, 0x0F0F0F0F;
}""")


@gluon.constexpr_function
def code_type(codes) -> gl.dtype:
    """Triton's type of operands that are made of codes."""
    types = {"e4m3": gl.float8e4nv, "e5m2": gl.float8e5, "int8": gl.int8, "int4": gl.int8}
    return types[codes]


@gluon.constexpr_function
def _half_layout(keys) -> gl.DistributedLinearLayout:
    """Registers of 16 pairs of int4 bytes: two warps keep their low halves, two the high ones."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *([0, 0, i] for i in powers_of_two(8, keys))],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 8, 0], [1, 0, 0]],
        block_bases=[],
        shape=[2, 16, keys],
    )


@gluon.constexpr_function
def value_layout(pairs, keys) -> Any:
    """Registers of V^T as pairs of bytes `[pairs, keys]`, as transposing loads deliver them."""
    if pairs == 16:
        return gl.SliceLayout(0, _half_layout(keys))
    high = [[i, 0] for i in powers_of_two(32, pairs)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *([0, i] for i in powers_of_two(8, keys)), *high],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[pairs, keys],
    )


@gluon.jit
def _halve(bytes) -> gl.tuple:
    """The even dims and the odd dims of int4 codes."""
    return gl.inline_asm_elementwise(
        HALVE, "=r,=r,r", [bytes], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )


@gluon.jit
def _start_scores(query_tile, key_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Start the products of all keys of a tile with all query terms: one sum a chain."""
    PART: gl.constexpr = key_tiles.shape[2]
    PARTS: gl.constexpr = SPEC.keys.width // PART
    layout: gl.constexpr = product_layout(SPEC.block_m)
    zeros = gl.full([SPEC.block_n, 2 * SPEC.block_m], 0, sum_type(SPEC.codes), layout)
    sums = ()
    for chain in gl.static_range(SPEC.keys.width // CHAIN):
        keys = key_tiles.index(slot * PARTS + chain * CHAIN // PART)
        keys = keys.slice(chain * CHAIN % PART, CHAIN, dim=1)
        terms = query_tile.slice(chain * CHAIN, CHAIN, dim=1).permute((1, 0))
        sums += (warpgroup_mma(keys, terms, zeros, use_acc=False, is_async=True),)
    return sums


@gluon.jit
def _start_int4_scores(query_tile, key_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Start the products of all keys of a tile with all query terms, even dims before odd ones."""
    HALF: gl.constexpr = SPEC.keys.width // 2
    layout: gl.constexpr = product_layout(SPEC.block_m)
    even, odd = _halve(key_tiles.index(slot).load(gl.DotOperandLayout(0, layout, 4)))
    sums = gl.full([SPEC.block_n, 2 * SPEC.block_m], 0, gl.int32, layout)
    terms = query_tile.slice(0, HALF, dim=1).permute((1, 0))
    sums = warpgroup_mma(even, terms, sums, use_acc=False, is_async=True)
    terms = query_tile.slice(HALF, HALF, dim=1).permute((1, 0))
    return (warpgroup_mma(odd, terms, sums, is_async=True),)


@gluon.jit
def load_part(tile, SPEC: gl.constexpr) -> gl.tensor:
    """Load a part of V^T as pairs of bytes."""
    WIDTH: gl.constexpr = tile.shape[1]
    SHAPE: gl.constexpr = [SPEC.block_n, WIDTH // 2]
    pairs = reinterpret(tile, gl.int16, SHAPE, pair_tile(WIDTH))
    return pairs.permute((1, 0)).load(value_layout(WIDTH // 2, SPEC.block_n))


@gluon.jit
def _load_values(value_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Load the parts of V^T as pairs of bytes."""
    PART: gl.constexpr = value_tiles.shape[2]
    PARTS: gl.constexpr = SPEC.values.width // PART // (2 if SPEC.codes == "int4" else 1)
    parts = ()
    for part in gl.static_range(PARTS):
        parts += (load_part(value_tiles.index(slot * PARTS + part), SPEC),)
    return parts


@gluon.jit
def mask_values(parts, first_key, oldest, num_keys, SPEC: gl.constexpr) -> gl.tuple:
    """Put 0 where no key is stored: bytes there may be NaN, which no probability of 0 undoes."""
    PAIRS: gl.constexpr = parts[0].shape[0]
    layout: gl.constexpr = gl.SliceLayout(0, value_layout(PAIRS, SPEC.block_n))
    keys = first_key + gl.arange(0, SPEC.block_n, layout=layout)
    stored = ((keys < num_keys) & (keys >= oldest))[None, :]
    return [gl.where(stored, part, 0) for part in parts]


@gluon.jit
def score_tile(query_tile, key_tiles, value_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Multiply the keys of a tile with the query rows, and load its values meanwhile.

    Returns:
        The products `[keys, rows]`, and the values for `weigh_values`.
    """
    if SPEC.codes == "int4":
        sums = _start_int4_scores(query_tile, key_tiles, slot, SPEC)
    else:
        sums = _start_scores(query_tile, key_tiles, slot, SPEC)
    values = _load_values(value_tiles, slot, SPEC)
    sums = wait_for(sums)
    total = sums[0]
    for chain in gl.static_range(1, len(sums)):
        total += sums[chain]
    return add_terms(total), values


@gluon.jit
def _both_halves(codes) -> gl.tensor:
    """The even dims and the odd dims of int4 codes `[pairs, keys]`, as `[2, pairs, keys]`."""
    if codes.shape[0] > 16:
        even, odd = _halve(codes)
        return gl.join(even, odd).permute((2, 0, 1))
    else:
        layout: gl.constexpr = _half_layout(codes.shape[1])
        halves = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        shift = (halves * 4).to(gl.int8)[:, None, None]
        return gl.inline_asm_elementwise(
            PICK_HALF, "=r,r,r", [codes[None, :, :], shift], dtype=gl.int8, is_pure=True, pack=4
        )


@gluon.jit
def _order_rows(even, odd) -> gl.tensor:
    """Rows of V^T from even bytes and odd ones, `[halves, pairs, keys]`.

    Of each half, row 16a + 8 odd + j is byte 16a + 2j + odd.
    """
    HALVES: gl.constexpr = even.shape[0]
    PAIRS: gl.constexpr = even.shape[1]
    KEYS: gl.constexpr = even.shape[2]
    rows = gl.join(even, odd).reshape([HALVES, PAIRS // 8, 8, KEYS // 16, 2, 4, 2, 2])
    return rows.permute((0, 1, 7, 2, 3, 5, 4, 6)).reshape([2 * HALVES * PAIRS, KEYS])


@gluon.jit
def start_part(values, prob_tile, SPEC: gl.constexpr) -> gl.tensor:
    """Start the products of one part of V^T with all terms of the probabilities."""
    layout: gl.constexpr = product_layout(SPEC.block_m)
    even, odd = gl.inline_asm_elementwise(
        UNZIP, "=r,=r,r,r", [values], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    if SPEC.codes == "int4":
        rows = _order_rows(_both_halves(even), _both_halves(odd))
    else:
        whole: gl.constexpr = [1, values.shape[0], SPEC.block_n]
        rows = _order_rows(even.reshape(whole), odd.reshape(whole))
    rows = rows.to(code_type(SPEC.codes), bitcast=True)
    rows = gl.convert_layout(rows, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)
    sums = gl.full([rows.shape[0], 2 * SPEC.block_m], 0, sum_type(SPEC.codes), layout)
    return warpgroup_mma(rows, prob_tile.permute((1, 0)), sums, use_acc=False, is_async=True)


@gluon.jit
def weigh_values(values, prob, prob_tile, SPEC: gl.constexpr) -> gl.tuple:
    """Sums of the values of a tile, each times its probability, a tensor `[dims, rows]` a part."""
    store_probabilities(prob_tile, prob, SPEC)
    sums = wait_for([start_part(part, prob_tile, SPEC) for part in values])
    return [add_terms(part) for part in sums]


@gluon.jit
def dims_in_order(rows, SPEC: gl.constexpr) -> gl.tensor:
    """Bring the rows that `weigh_values` makes into the order of dims."""
    HEIGHT: gl.constexpr = rows.shape[0]
    COLUMNS: gl.constexpr = rows.shape[1]
    if SPEC.codes == "int4":
        rows = rows.reshape([2, HEIGHT // 32, 2, 8, COLUMNS]).permute((1, 3, 2, 0, 4))
    else:
        rows = rows.reshape([HEIGHT // 16, 2, 8, COLUMNS]).permute((0, 2, 1, 3))
    return rows.reshape([HEIGHT, COLUMNS])
