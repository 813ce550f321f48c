"""Attention of one tile of query rows over a run of stored keys: score, online softmax.

Scores are in units of log 2: p = 2^(score - largest). Keys and values stay codes in the products;
their scales join the scores, the probabilities and the output in float32.

Where rows have scales of their own, a probability is multiplied by its row's v_scale over the
largest v_scale so far, so that it fits in float16 whatever the scales are.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from quantattn.kernels._attend_spec import Spec
from quantattn.kernels._stored_rows import decode_fp8, load_numbers, load_rows, locate
from quantattn.kernels._tiles import divide, encode_fp8

__all__ = ["LOG2_E", "Spec", "attend_keys", "key_range"]

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-100)


@triton.jit
def key_range(lowest, highest, num_keys, SPEC: tl.constexpr) -> tl.tuple:
    """Which keys the rows from position `lowest` to `highest` see.

    Returns:
        The oldest visible key, then four bounds of tiles, in keys: first, first that every row sees
        whole, end of those, end.
    """
    N: tl.constexpr = SPEC.block_n
    oldest = 0
    full_first = 0
    end = num_keys
    full_end = num_keys
    if SPEC.causal:
        end = tl.minimum(num_keys, highest + 1)
        full_end = tl.minimum(num_keys, lowest + 1)
    if SPEC.window is not None:
        oldest = tl.maximum(0, lowest - SPEC.window + 1)
        full_first = tl.maximum(0, highest - SPEC.window + 1)
    first = oldest // N * N
    end = tl.maximum(first, tl.cdiv(tl.maximum(end, 0), N) * N)
    full_first = tl.minimum(tl.cdiv(full_first, N) * N, end)
    full_end = tl.maximum(full_first, tl.maximum(full_end, 0) // N * N)
    return oldest, first, full_first, full_end, end


@triton.jit
def _scores(products, query_sum, factor, k_scale, k_offset, SPEC: tl.constexpr) -> tl.tensor:
    """Turn products of query and key codes into scores."""
    if SPEC.codes == "int4":
        centre = k_offset + 8.0 * k_scale
        products = products * k_scale[None, :] + query_sum[:, None] * centre[None, :]
    elif SPEC.has_row_scales:
        products = products * k_scale[None, :]
    if SPEC.soft_cap is None:
        return products * factor[:, None]
    else:
        # tanh(x) = 1 - 2 / (e^2x + 1), which overflows nowhere.
        power = tl.exp2(products * (factor * (2.0 / SPEC.soft_cap))[:, None])
        return (SPEC.soft_cap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))


@triton.jit
def _attend_tile(
    state, rows, stored, first_key, MASKED: tl.constexpr, SPEC: tl.constexpr
) -> tl.tuple:
    KEYS: tl.constexpr = SPEC.keys
    VALUES: tl.constexpr = SPEC.values
    ROPE: tl.constexpr = SPEC.rope
    weighted, largest, total, offsets, reference = state
    query, query_sum, factor, prob_scale, row_positions = rows
    keys, values, table, head, oldest, num_keys = stored
    positions = first_key + tl.arange(0, SPEC.block_n)
    valid = (positions < num_keys) & (positions >= oldest)
    block, offset = locate(table, positions, valid, MASKED, SPEC)
    stride = keys.block_stride
    key = load_rows(keys.codes, stride, block, offset, head, valid, KEYS, MASKED, SPEC)
    k_scale = 1.0
    k_offset = 0.0
    if SPEC.has_row_scales:
        k_scale, v_scale, k_offset, v_offset = load_numbers(
            keys, values, block, offset, head, valid, MASKED, SPEC
        )

    products = tl.dot(query[0], tl.trans(key), input_precision="ieee")
    if ROPE is not None:
        rope = load_rows(keys.codes, stride, block, offset, head, valid, ROPE, MASKED, SPEC)
        products = tl.dot(query[1], tl.trans(rope), products, input_precision="ieee")
    scores = _scores(products, query_sum, factor, k_scale, k_offset, SPEC)
    if MASKED:
        visible = valid[None, :]
        if SPEC.causal:
            visible = visible & (positions[None, :] <= row_positions[:, None])
        if SPEC.window is not None:
            visible = visible & (positions[None, :] > row_positions[:, None] - SPEC.window)
        scores = tl.where(visible, scores, float("-inf"))

    new_largest = tl.maximum(largest, tl.max(scores, 1))
    ceiling = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink = tl.exp2(largest - ceiling)
    prob = tl.exp2(scores - (ceiling - SPEC.headroom)[:, None])
    total = total * shrink + tl.sum(prob, 1)
    if SPEC.rounds_prob:
        code = encode_fp8(divide(prob, prob_scale, SPEC.native), 3, SPEC.native)
        prob = decode_fp8(code, True, SPEC.native).to(tl.float32) * prob_scale
    if SPEC.codes == "int4":
        centre = v_offset + 8.0 * v_scale
        offsets = offsets * shrink + tl.sum(prob * centre[None, :], 1)
    if SPEC.has_row_scales:
        new_reference = tl.maximum(reference, tl.max(v_scale, 0))
        prob *= (v_scale / new_reference)[None, :]
        shrink *= reference / new_reference
        reference = new_reference
    if ROPE is None:
        # K and V share their blocks, and then one calculation of where these are.
        stride = values.block_stride if SPEC.block_size is None else stride
        value = load_rows(values.codes, stride, block, offset, head, valid, VALUES, MASKED, SPEC)
    else:
        value = key
    weighted = tl.dot(
        prob.to(SPEC.compute),
        value,
        weighted * shrink[:, None],
        input_precision="ieee",
    )
    return weighted, new_largest, total, offsets, reference


@triton.jit
def attend_keys(rows, stored, bounds, SPEC: tl.constexpr) -> tl.tuple:
    """Attend to some tiles of one sequence's keys.

    Args:
        rows: The query's tiles, sums and factors, see `load_query`; what `load_prob_scale`
            returned; and each row's position in the sequence.
        stored: The K rows' Side and the V rows'; a pointer to the sequence's block ids, without
            blocks its first row; the KV head; the first key to be loaded and the end of those.
        bounds: The four bounds of `key_range`, or those of a part of the tiles.
        SPEC: See Spec.

    Returns:
        Sum of values `[rows, columns]`, each times 2^(score - largest), not yet times the layer's
        v_scale; `largest` of each row, -inf where it saw no key; sum of 2^(score - largest).
    """
    ROWS: tl.constexpr = SPEC.block_m
    COLUMNS: tl.constexpr = SPEC.values.columns
    weighted = tl.zeros((ROWS, COLUMNS), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    zeros = tl.zeros((ROWS,), tl.float32)
    state = weighted, largest, zeros, zeros, SMALLEST_SCALE + 0.0
    first, full_first, full_end, end = bounds
    for start in tl.range(full_first, full_end, SPEC.block_n):
        state = _attend_tile(state, rows, stored, start, False, SPEC)
    before = full_first - first
    for step in tl.range(0, before + end - full_end, SPEC.block_n):
        start = step + tl.where(step < before, first, full_end - before)
        state = _attend_tile(state, rows, stored, start, True, SPEC)
    weighted, largest, total, offsets, reference = state
    if SPEC.has_row_scales:
        weighted = weighted * reference + offsets[:, None]
    return weighted, largest - SPEC.headroom, total
