"""One tile of keys against the query rows of a KV head, on Hopper: masks and online softmax.

S^T = K Q^T and O^T = V^T P^T: keys and dims are the M of the products and query rows their N, so
that few rows waste nothing. How operands are made of what the pages hold is `decode_codes`' and
`decode_numbers`' (bf16, fp16) part. `decode_row_tiles` does the same for rows that have scales of
their own.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quantattn.kernels._attend_tiles import LOG2_E
from quantattn.kernels.hopper import decode_codes as codes
from quantattn.kernels.hopper import decode_numbers as numbers
from quantattn.kernels.hopper import decode_terms as terms

__all__ = [
    "attend_tile",
    "cap_scores",
    "finish_tiles",
    "mask_scores",
    "new_state",
    "part_columns",
    "part_width",
    "sum_layout",
]

HEADROOM: gl.constexpr = gl.constexpr(8.0)
"""Log 2 of the largest probability, so that small ones stay normal numbers."""


@gluon.constexpr_function
def sum_layout(height, SPEC) -> Any:
    """Registers of products `[height, SPEC.block_m]`."""
    operands = numbers if SPEC.codes is None else terms
    return operands.sum_layout(height, SPEC.block_m)


@gluon.constexpr_function
def part_width(SPEC) -> int:
    """Dims that lie side by side in a tile of keys or values: no more than can be swizzled."""
    bits = {None: 16, "int4": 4}.get(SPEC.codes, 8)
    return int(min(1024 // bits, SPEC.keys.width))


@gluon.constexpr_function
def part_columns(SPEC) -> int:
    """Elements of pages that hold so many dims."""
    return int(part_width(SPEC) // (2 if SPEC.codes == "int4" else 1))


@gluon.jit
def new_state(SPEC: gl.constexpr) -> gl.tuple:
    """Of no tile yet: running maximum, shares of the denominator, weighted sums of values."""
    scores: gl.constexpr = sum_layout(SPEC.block_n, SPEC)
    sums: gl.constexpr = sum_layout(part_width(SPEC), SPEC)
    largest = gl.full([SPEC.block_m], -float("inf"), gl.float32, gl.SliceLayout(0, scores))
    shares = gl.full([SPEC.block_n, SPEC.block_m], 0.0, gl.float32, scores)
    weighted = ()
    for _ in gl.static_range(SPEC.values.width // part_width(SPEC)):
        weighted += (gl.full([part_width(SPEC), SPEC.block_m], 0.0, gl.float32, sums),)
    return largest, shares, weighted


@gluon.jit
def cap_scores(scores, SOFT_CAP: gl.constexpr) -> gl.tensor:
    """Cap scores, which are in units of log 2; tanh(x) = 1 - 2 / (e^2x + 1) overflows nowhere."""
    power = gl.exp2(scores * (2.0 / SOFT_CAP))
    return (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (power + 1.0))


@gluon.jit
def mask_scores(scores, first_key, positions, oldest, num_keys, SPEC: gl.constexpr) -> gl.tensor:
    """Replace the scores of keys that a row does not see, or that are not stored, by -inf."""
    layout: gl.constexpr = gl.SliceLayout(1, sum_layout(SPEC.block_n, SPEC))
    keys = first_key + gl.arange(0, SPEC.block_n, layout=layout)
    visible = ((keys < num_keys) & (keys >= oldest))[:, None]
    if SPEC.causal:
        visible = visible & (keys[:, None] <= positions[None, :])
    if SPEC.window is not None:
        visible = visible & (keys[:, None] > (positions - SPEC.window)[None, :])
    return gl.where(visible, scores, -float("inf"))


@gluon.jit
def attend_tile(
    state, memory, slot, full, empty, phase, first_key, masked, factor, rows, SPEC: gl.constexpr
) -> gl.tuple:
    """Attend to one tile of keys; its memory is released as soon as it is read.

    Args:
        state: What `new_state` made or an earlier call returned.
        memory: Shared memory of query, keys, values and probabilities.
        slot: Which tile of keys and values.
        full: Barrier that says that it is there.
        empty: Barrier that says that it may be written.
        phase: Phase of `full`.
        first_key: Position of the tile's first key.
        masked: Whether some row does not see all keys.
        factor: What turns each row's products into scores in units of log 2.
        rows: Position of each row; first and end of the keys that are stored for them.
        SPEC: See Spec.
    """
    query_tile, key_tiles, value_tiles, prob_tile = memory
    positions, oldest, num_keys = rows
    largest, shares, weighted = state
    IS_FP8: gl.constexpr = SPEC.codes is not None
    mbarrier.wait(full, phase)
    if IS_FP8:
        scores, values = codes.score_tile(query_tile, key_tiles, value_tiles, slot, SPEC)
        mbarrier.arrive(empty, count=1)
    else:
        scores, values = numbers.score_tile(query_tile, key_tiles, value_tiles, slot, SPEC)
    if SPEC.soft_cap is not None:
        scores = cap_scores(scores * factor[None, :], SPEC.soft_cap)
        factor = gl.full_like(factor, 1.0)
    if masked:
        scores = mask_scores(scores, first_key, positions, oldest, num_keys, SPEC)
        if IS_FP8:
            values = codes.mask_values(values, first_key, oldest, num_keys, SPEC)
        else:
            numbers.clear_values(values, first_key, oldest, num_keys, SPEC)

    new_largest = gl.maximum(largest, gl.max(scores, 0) * factor)
    ceiling = gl.where(new_largest == -float("inf"), 0.0, new_largest)
    shrink = gl.exp2(largest - ceiling)
    prob = gl.exp2(scores * factor[None, :] - (ceiling - HEADROOM)[None, :])
    shares = shares * shrink[None, :] + prob
    if IS_FP8:
        sums = codes.weigh_values(values, prob, prob_tile, SPEC)
        weighted = _add_sums(weighted, shrink, sums)
    else:
        weighted = numbers.add_values(weighted, shrink, values, prob, prob_tile, SPEC)
        mbarrier.arrive(empty, count=1)
    return new_largest, shares, weighted


@gluon.jit
def _add_sums(weighted, shrink, sums) -> gl.tuple:
    """Shrink sums of weighted values, one a part, and add those of a tile."""
    layout: gl.constexpr = gl.SliceLayout(0, sums[0].type.layout)
    shrink = gl.convert_layout(shrink, layout, assert_trivial=True)[None, :]
    added = ()
    for part in gl.static_range(len(sums)):
        added += (weighted[part] * shrink + sums[part],)
    return added


@gluon.jit
def _divide(sums, total, SPEC: gl.constexpr) -> gl.tensor:
    if SPEC.codes is not None:
        sums = codes.dims_in_order(sums, SPEC)
    layout: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    total = gl.convert_layout(total, layout, assert_trivial=True)
    return sums / gl.where(total == 0.0, 1.0, total)[None, :]


@gluon.jit
def finish_tiles(state, SPEC: gl.constexpr) -> gl.tuple:
    """Weighted means of values, a tuple of parts `[dims, rows]`, and log 2 of each denominator."""
    largest, shares, weighted = state
    total = gl.sum(shares, 0)
    means = [_divide(sums, total, SPEC) for sums in weighted]
    total = gl.convert_layout(total, largest.type.layout, assert_trivial=True)
    return means, largest - HEADROOM + gl.log2(total)
