"""One tile of keys whose rows have scales of their own against query rows, on Hopper.

s is a score in units of log 2, v the scale of a V row. A probability is 2^(s - largest), where
`largest` is the running maximum of s + log2 v: what multiplies the codes of values, 2^(s + log2 v),
then fills its operand whatever the scales are. It is relative to the largest of its tile, since two
int8 terms hold no more than 16 bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quantattn.kernels.hopper import decode_codes as codes
from quantattn.kernels.hopper.decode_row_numbers import load_row_numbers
from quantattn.kernels.hopper.decode_terms import largest_exponent
from quantattn.kernels.hopper.decode_tiles import cap_scores, mask_scores, new_state

__all__ = ["attend_row_tile", "finish_row_tiles", "new_row_state"]

SMALLEST: gl.constexpr = gl.constexpr(-100.0)
"""Log 2 of a V scale below which rows are less exact, so that no denominator overflows."""


@gluon.jit
def _log2(x) -> gl.tensor:
    """Log 2 of normal numbers, off by 2^-22: one instruction, of which `gl.log2` takes twenty."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def new_row_state(SPEC: gl.constexpr) -> gl.tuple:
    """As `new_state`; int4 adds shares of the weighted sum of V offsets."""
    largest, shares, weighted = new_state(SPEC)
    if SPEC.codes == "int4":
        return largest, shares, weighted, (shares,)
    else:
        return largest, shares, weighted, ()


@gluon.jit
def _score_rows(products, numbers, factors, SPEC: gl.constexpr) -> gl.tensor:
    """Turn products of query and key codes into scores."""
    scores = products * numbers[0][:, None]
    if SPEC.codes == "int4":
        scores += numbers[2][:, None] * factors[1][None, :]
    scores *= factors[0][None, :]
    if SPEC.soft_cap is not None:
        scores = cap_scores(scores, SPEC.soft_cap)
    return scores


@gluon.jit
def _clear_numbers(numbers, first_key, oldest, num_keys, SPEC: gl.constexpr) -> gl.tuple:
    """Put 1 where no key is stored: numbers there may be NaN, which nothing undoes."""
    layout: gl.constexpr = numbers[0].type.layout
    keys = first_key + gl.arange(0, SPEC.block_n, layout=layout)
    stored = (keys < num_keys) & (keys >= oldest)
    return [gl.where(stored, x, 1.0) for x in numbers]


@gluon.jit
def attend_row_tile(
    state,
    memory,
    slot,
    full,
    empty,
    phase,
    first_key,
    masked,
    factors,
    rows,
    STAGES: gl.constexpr,
    SPEC: gl.constexpr,
) -> gl.tuple:
    """Attend to one tile of keys; its memory is released as soon as it is read.

    Args:
        state: What `new_row_state` made or an earlier call returned.
        memory: As for `attend_tile`, and the numbers of rows.
        slot: Which tile of keys and values.
        full: Barrier that says that it is there.
        empty: Barrier that says that it may be written.
        phase: Phase of `full`.
        first_key: Position of the tile's first key.
        masked: Whether some row does not see all keys.
        factors: What turns each row's products into scores in units of log 2; for int4, then the
            sum of each query row.
        rows: Position of each row; first and end of the keys that are stored for them.
        STAGES: Tiles in shared memory.
        SPEC: See Spec.
    """
    query_tile, key_tiles, value_tiles, prob_tile, number_boxes = memory
    positions, oldest, num_keys = rows
    largest, shares, weighted, offsets = state
    mbarrier.wait(full, phase)
    products, values = codes.score_tile(query_tile, key_tiles, value_tiles, slot, SPEC)
    numbers = load_row_numbers(number_boxes, slot, STAGES, SPEC)
    mbarrier.arrive(empty, count=1)
    scores = _score_rows(products, numbers, factors, SPEC)
    if masked:
        scores = mask_scores(scores, first_key, positions, oldest, num_keys, SPEC)
        numbers = _clear_numbers(numbers, first_key, oldest, num_keys, SPEC)
        if SPEC.codes == "e4m3":
            values = codes.mask_values(values, first_key, oldest, num_keys, SPEC)

    v_size = _log2(numbers[1])[:, None]
    highest = gl.max(scores + gl.maximum(v_size, SMALLEST), 0)
    new_largest = gl.maximum(largest, highest)
    ceiling = gl.where(new_largest == -float("inf"), 0.0, new_largest)
    shrink = gl.exp2(largest - ceiling)
    prob = gl.exp2(scores - ceiling[None, :])
    shares = shares * shrink[None, :] + prob
    if SPEC.codes == "int4":
        offsets = (offsets[0] * shrink[None, :] + prob * numbers[3][:, None],)
    TOP: gl.constexpr = largest_exponent(SPEC.codes)
    base = gl.where(highest == -float("inf"), 0.0, highest) - TOP
    terms = gl.exp2(scores + v_size - base[None, :])
    sums = codes.weigh_values(values, terms, prob_tile, SPEC)
    unit = gl.exp2(highest - TOP - ceiling)
    weighted = _add_sums(weighted, shrink, sums, unit)
    return new_largest, shares, weighted, offsets


@gluon.jit
def _add_sums(weighted, shrink, sums, unit) -> gl.tuple:
    layout: gl.constexpr = gl.SliceLayout(0, sums[0].type.layout)
    shrink = gl.convert_layout(shrink, layout, assert_trivial=True)[None, :]
    unit = gl.convert_layout(unit, layout, assert_trivial=True)[None, :]
    added = ()
    for part in gl.static_range(len(sums)):
        added += (weighted[part] * shrink + sums[part] * unit,)
    return added


@gluon.jit
def _means(sums, total, offsets, SPEC: gl.constexpr) -> gl.tensor:
    sums = codes.dims_in_order(sums, SPEC)
    layout: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    if SPEC.codes == "int4":
        offset = gl.convert_layout(gl.sum(offsets[0], 0), layout, assert_trivial=True)
        sums += offset[None, :]
    total = gl.convert_layout(total, layout, assert_trivial=True)
    return sums / gl.where(total == 0.0, 1.0, total)[None, :]


@gluon.jit
def finish_row_tiles(state, SPEC: gl.constexpr) -> gl.tuple:
    """As `finish_tiles`."""
    largest, shares, weighted, offsets = state
    total = gl.sum(shares, 0)
    means = [_means(sums, total, offsets, SPEC) for sums in weighted]
    total = gl.convert_layout(total, largest.type.layout, assert_trivial=True)
    return means, largest + gl.log2(total)
