"""A tile of FP8 keys and values as operands of Hopper's tensor cores, the query to match.

e4m3 has 4 significant bits, so Q and P are sent as two e4m3 terms each, x = hi + lo / 32, in
neighbouring columns. A thread holds both sums of such a pair: adding them takes no shuffle. The
tensor cores keep 13 fraction bits of a sum of e4m3 products: scores are added up in float32 from
chains of 64 dims, outputs from tiles.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from quantattn.kernels._hopper_memory import reinterpret, tile_layout, wait_for

__all__ = [
    "add_values",
    "code_type",
    "dims_in_order",
    "mask_values",
    "score_tile",
    "store_query",
    "sum_layout",
]

CHAIN: gl.constexpr = gl.constexpr(64)
"""Dims whose products the tensor cores add up by themselves."""

# Two numbers to the e4m3 pairs of their hi terms (low half) and lo terms, where |x| <= 256. float16
# holds more bits than hi and lo together. The zeros are there for ptxas 12.8, which miscompiles an
# e4m3 pair that is both packed with another pair and unpacked: it unpacks a register that nothing
# wrote. `hi = x.to(float8e4nv)` and `x - hi.to(float32)` fall to it as well.
SPLIT_PAIR: gl.constexpr = gl.constexpr("""{
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

# Four keys (t, t + 8, t + 1, t + 9) of an even dim and of the odd one after it, from two registers
# that hold pairs of dims.
UNZIP: gl.constexpr = gl.constexpr("""
prmt.b32 $0, $2, $3, 0x6240;
prmt.b32 $1, $2, $3, 0x7351;""")


@gluon.constexpr_function
def _bits(first, end) -> list[int]:
    """Powers of two from `first` to below `end`."""
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def value_layout(pairs, keys) -> gl.DistributedLinearLayout:
    """Registers of V^T as pairs of dims `[pairs, keys]`, as transposing loads deliver them."""
    registers = [[0, 1], *([0, i] for i in _bits(8, keys)), *([i, 0] for i in _bits(32, pairs))]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[pairs, keys],
    )


@gluon.constexpr_function
def sum_layout(height, columns) -> gl.DistributedLinearLayout:
    """Registers of sums `[height, columns]` of which the tensor cores made each as hi and lo."""
    registers = [[8, 0], *([0, i] for i in _bits(4, columns)), *([i, 0] for i in _bits(64, height))]
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[height, columns],
    )


@gluon.constexpr_function
def code_type(codes) -> gl.dtype:
    """Triton's type of the codes of keys and values."""
    return {"e4m3": gl.float8e4nv, "e5m2": gl.float8e5}[codes]


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
def store_query(query_tile, rows, sign) -> gl.tensor:
    """Store query rows times `sign` as neighbouring rows of hi and lo terms.

    Returns:
        What each row must be multiplied by, a power of two.
    """
    HEIGHT: gl.constexpr = rows.shape[0]
    WIDTH: gl.constexpr = rows.shape[1]
    rows = rows.to(gl.float32)
    # The largest number of a row is brought to [128, 256), exactly; hi stays below 448.
    exponent = (gl.max(gl.abs(rows), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF
    exponent = gl.minimum(gl.maximum(exponent, 8), 254)
    up = ((261 - exponent) << 23).to(gl.float32, bitcast=True) * sign
    terms = gl.inline_asm_elementwise(
        SPLIT_PAIR, "=r,r,r", [rows * up[:, None]], dtype=gl.int16, is_pure=True, pack=2
    )
    hi, lo = terms.reshape([HEIGHT, WIDTH // 2, 2]).split()
    terms = gl.join(hi, lo).permute((0, 2, 1)).reshape([2 * HEIGHT, WIDTH // 2])
    SHAPE: gl.constexpr = [2 * HEIGHT, WIDTH // 2]
    reinterpret(query_tile, gl.int16, SHAPE, pair_tile(WIDTH)).store(terms)
    fence_async_shared()
    return ((exponent - 7) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _start_scores(query_tile, key_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Start the products of all keys of a tile with all query terms: one sum a chain."""
    PART: gl.constexpr = min(128, SPEC.keys.width)
    PARTS: gl.constexpr = SPEC.keys.width // PART
    layout: gl.constexpr = product_layout(SPEC.block_m)
    zeros = gl.full([SPEC.block_n, 2 * SPEC.block_m], 0.0, gl.float32, layout)
    sums = ()
    for chain in gl.static_range(SPEC.keys.width // CHAIN):
        keys = key_tiles.index(slot * PARTS + chain * CHAIN // PART)
        keys = keys.slice(chain * CHAIN % PART, CHAIN, dim=1)
        terms = query_tile.slice(chain * CHAIN, CHAIN, dim=1).permute((1, 0))
        sums += (warpgroup_mma(keys, terms, zeros, use_acc=False, is_async=True),)
    return sums


@gluon.jit
def _load_values(value_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Load the parts of V^T as pairs of dims."""
    PART: gl.constexpr = min(128, SPEC.values.width)
    PARTS: gl.constexpr = SPEC.values.width // PART
    SHAPE: gl.constexpr = [SPEC.block_n, PART // 2]
    parts = ()
    for part in gl.static_range(PARTS):
        tile = value_tiles.index(slot * PARTS + part)
        pairs = reinterpret(tile, gl.int16, SHAPE, pair_tile(PART))
        parts += (pairs.permute((1, 0)).load(value_layout(PART // 2, SPEC.block_n)),)
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
def _add_terms(sums) -> gl.tensor:
    """Add the products with hi and with lo terms."""
    HEIGHT: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1] // 2
    layout: gl.constexpr = sum_layout(HEIGHT, COLUMNS)
    hi, lo = sums.reshape([HEIGHT, COLUMNS, 2]).split()
    hi = gl.convert_layout(hi, layout, assert_trivial=True)
    lo = gl.convert_layout(lo, layout, assert_trivial=True)
    return lo * 0.03125 + hi


@gluon.jit
def score_tile(query_tile, key_tiles, value_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Multiply the keys of a tile with the query rows, and load its values meanwhile.

    Returns:
        The products `[keys, rows]`, and the values for `add_values`.
    """
    sums = _start_scores(query_tile, key_tiles, slot, SPEC)
    values = _load_values(value_tiles, slot, SPEC)
    sums = wait_for(sums)
    total = sums[0]
    for chain in gl.static_range(1, len(sums)):
        total += sums[chain]
    return _add_terms(total), values


@gluon.jit
def _store_probabilities(prob_tile, prob, SPEC: gl.constexpr) -> None:
    """Store probabilities as hi and lo terms, in the order of keys that UNZIP gives V."""
    KEYS: gl.constexpr = SPEC.block_n
    terms = gl.inline_asm_elementwise(
        SPLIT_PAIR, "=r,r,r", [prob], dtype=gl.int16, is_pure=True, pack=2
    )
    # Rows 16b + c and 16b + 8 + c of `terms` are the hi and lo pairs of the keys with these
    # numbers, which go to places 16b + 2c and 16b + 2c + 1.
    terms = terms.reshape([KEYS // 16, 2, 8, SPEC.block_m]).permute((0, 2, 3, 1))
    terms = terms.reshape([KEYS // 2, 2 * SPEC.block_m])
    SHAPE: gl.constexpr = [2 * SPEC.block_m, KEYS // 2]
    reinterpret(prob_tile, gl.int16, SHAPE, pair_tile(KEYS)).permute((1, 0)).store(terms)
    fence_async_shared()


@gluon.jit
def _start_part(values, prob_tile, SPEC: gl.constexpr) -> gl.tensor:
    """Start the products of one part of V^T with all terms of the probabilities."""
    KEYS: gl.constexpr = SPEC.block_n
    PART: gl.constexpr = 2 * values.shape[0]
    layout: gl.constexpr = product_layout(SPEC.block_m)
    even, odd = gl.inline_asm_elementwise(
        UNZIP, "=r,=r,r,r", [values], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    # Row 16a + 8 odd + j is dim 16a + 2j + odd.
    rows = gl.join(even, odd).reshape([PART // 16, 8, KEYS // 16, 2, 4, 2, 2])
    rows = rows.permute((0, 6, 1, 2, 4, 3, 5)).reshape([PART, KEYS])
    rows = rows.to(code_type(SPEC.codes), bitcast=True)
    rows = gl.convert_layout(rows, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)
    zeros = gl.full([PART, 2 * SPEC.block_m], 0.0, gl.float32, layout)
    return warpgroup_mma(rows, prob_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_values(weighted, shrink, values, prob, prob_tile, SPEC: gl.constexpr) -> gl.tuple:
    """Shrink sums of weighted values, one a part, and add the values of a tile."""
    _store_probabilities(prob_tile, prob, SPEC)
    layout: gl.constexpr = weighted[0].type.layout
    shrink = gl.convert_layout(shrink, gl.SliceLayout(0, layout), assert_trivial=True)[None, :]
    sums = wait_for([_start_part(part, prob_tile, SPEC) for part in values])
    added = ()
    for part in gl.static_range(len(values)):
        added += (weighted[part] * shrink + _add_terms(sums[part]),)
    return added


@gluon.jit
def dims_in_order(rows) -> gl.tensor:
    """Bring the rows that `add_values` makes into the order of dims."""
    PART: gl.constexpr = rows.shape[0]
    COLUMNS: gl.constexpr = rows.shape[1]
    rows = rows.reshape([PART // 16, 2, 8, COLUMNS]).permute((0, 2, 1, 3))
    return rows.reshape([PART, COLUMNS])
