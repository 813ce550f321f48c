"""Operands of a Hopper prefill whose products are of bf16 or fp16 numbers.

Stored codes become fp16 numbers in shared memory, which hold FP8 codes exactly; probabilities are
rounded to the type of the values. Rows of a bf16 query over codes are brought into fp16's range by
a power of two each; those of an e4m3 query become numbers where they lie. int4 is rotated, and
query and output are rotated here, see `prefill_int4`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quantattn.kernels.hopper import prefill_int4 as int4
from quantattn.kernels.hopper.decode_codes import code_type
from quantattn.kernels.hopper.memory import hide, reinterpret, tile_layout, wait_for
from quantattn.kernels.hopper.prefill_quads import (
    exponentials,
    halves,
    of_rows,
    shrink_rows,
    sums_of_rows,
)
from quantattn.kernels.hopper.rotation import rotate_rows

__all__ = [
    "add_values",
    "allocate",
    "code_columns",
    "scale_products",
    "score_layout",
    "score_tile",
    "start_strip",
    "store_row_numbers",
    "sum_layout",
    "sum_width",
    "value_exponent",
]


QUERY_AT_ONCE: gl.constexpr = gl.constexpr(64 * 128)
"""Numbers of query rows that are worked on at once: 64 a thread."""


@gluon.constexpr_function
def code_columns(side, SPEC) -> int:
    """Bytes of a row of codes in a tile."""
    return int(side.columns // 2 if SPEC.codes == "int4" else side.columns)


@gluon.constexpr_function
def score_layout(SPEC) -> gl.NVMMADistributedLayout:
    """Registers of products with the keys of a tile."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SPEC.block_n, 16]
    )


@gluon.constexpr_function
def sum_width(SPEC) -> int:
    """Columns of a part of the weighted sums of values."""
    return int(min(128, SPEC.values.columns))


@gluon.constexpr_function
def sum_layout(SPEC) -> gl.NVMMADistributedLayout:
    """Registers of a part of the weighted sums of values."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, sum_width(SPEC), 16]
    )


@gluon.jit
def allocate(
    query_type, STAGES: gl.constexpr, STRIPS: gl.constexpr, SPEC: gl.constexpr
) -> gl.tuple:
    """Shared memory of STRIPS strips of query rows, of keys and of values as operands.

    Where they are stored as codes, of a tile of those too, and barriers that these have landed; of
    what `store_row_numbers` stores.
    """
    K_ROWS: gl.constexpr = SPEC.keys
    V_ROWS: gl.constexpr = SPEC.values
    # Rows of 8 bits have room to become numbers of 16.
    BITS: gl.constexpr = query_type.primitive_bitwidth
    WIDTH: gl.constexpr = K_ROWS.columns * 16 // BITS
    query_rows: gl.constexpr = tile_layout(WIDTH, BITS, 2)
    strip: gl.constexpr = [STRIPS, SPEC.block_m, WIDTH]
    query = gl.allocate_shared_memory(query_type, strip, query_rows)
    keys = _allocate_numbers(STAGES, K_ROWS, SPEC)
    values = _allocate_numbers(STAGES, V_ROWS, SPEC)
    if SPEC.codes is None:
        return query, keys, values
    else:
        landed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for side in gl.static_range(2):
            mbarrier.init(landed.index(side), count=1)
        value_codes = _allocate_codes(V_ROWS, SPEC)
        key_codes = _allocate_codes(K_ROWS, SPEC)
        memory = (query, keys, values, landed, value_codes, key_codes)
        if SPEC.has_row_scales:
            flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
            scales: gl.constexpr = [2 * STAGES, SPEC.block_n]
            memory += (gl.allocate_shared_memory(gl.float32, scales, flat),)
            memory += (gl.allocate_shared_memory(gl.int32, [STAGES, 4], flat),)
        if SPEC.codes == "int4":
            memory += (gl.allocate_shared_memory(gl.int32, [2, SPEC.block_n], flat),)
        return memory


@gluon.jit
def store_row_numbers(memory, stage, numbers, STAGES: gl.constexpr, SPEC: gl.constexpr) -> None:
    """Store the scales of a tile's rows; those of values over a power of two, and that.

    Of int4, instead of the values' scales, what code 8 of each key means; values are converted with
    theirs, over a power of two.
    """
    k_scale, v_scale = numbers[:2]
    if SPEC.codes == "int4":
        k_offset, v_offset = numbers[2:]
        exponent = int4.store_value_terms(memory[8], v_scale, v_offset + 8.0 * v_scale)
        memory[6].index(stage).store(k_scale)
        memory[6].index(STAGES + stage).store(k_offset + 8.0 * k_scale)
    else:
        exponent = gl.max(v_scale, 0).to(gl.int32, bitcast=True) & 0x7F800000
        exponent = gl.minimum(gl.maximum(exponent, 27 << 23), 227 << 23)
        memory[6].index(stage).store(k_scale)
        inverse = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
        memory[6].index(STAGES + stage).store(v_scale * inverse)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory[7].index(stage).store(gl.full([4], 0, gl.int32, one) + exponent)


@gluon.jit
def value_exponent(memory, stage) -> gl.tensor:
    """Bits of the power of two that a tile's values, or their scales, are stored over."""
    exponents = memory[7].index(stage).load(gl.BlockedLayout([4], [32], [4], [0]))
    return gl.max(exponents, 0)


@gluon.jit
def _row_scales(scales, FIRST: gl.constexpr, tile) -> gl.tensor:
    """Scales of a tile's keys `[1, keys / 8, 4, 2]`, from FIRST on, beside `tile`."""
    EIGHTS: gl.constexpr = tile.shape[1]
    keys: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    flat = gl.full([EIGHTS, 4, 2], 0.0, gl.float32, keys).reshape([8 * EIGHTS])
    layout: gl.constexpr = flat.type.layout
    numbers = scales.slice(FIRST, 8 * EIGHTS).load(layout).reshape([EIGHTS, 4, 2])
    return gl.expand_dims(gl.convert_layout(numbers, keys, assert_trivial=True), 0)


@gluon.jit
def scale_products(
    products, row_terms, memory, stage, STAGES: gl.constexpr, SPEC: gl.constexpr
) -> gl.tensor:
    """Multiply products `[rows, keys / 8, 4, 2]` with the keys' scales; add what int4 lacks."""
    products *= _row_scales(memory[6].index(stage), 0, products)
    if SPEC.codes == "int4":
        centre = _row_scales(memory[6].index(STAGES + stage), 0, products)
        products += centre * of_rows(row_terms[1], products)
    return products


@gluon.jit
def _allocate_numbers(STAGES: gl.constexpr, SIDE: gl.constexpr, SPEC: gl.constexpr) -> Any:
    rows: gl.constexpr = tile_layout(SIDE.columns, 16, 2)
    shape: gl.constexpr = [STAGES, SPEC.block_n, SIDE.columns]
    return gl.allocate_shared_memory(SPEC.compute, shape, rows)


@gluon.jit
def _allocate_codes(SIDE: gl.constexpr, SPEC: gl.constexpr) -> Any:
    # Columns that lie side by side: no more can be swizzled.
    WIDTH: gl.constexpr = min(128, code_columns(SIDE, SPEC))
    rows: gl.constexpr = tile_layout(WIDTH, 8, 2)
    shape: gl.constexpr = [code_columns(SIDE, SPEC) // WIDTH, SPEC.block_n, WIDTH]
    return gl.allocate_shared_memory(code_type(SPEC.codes), shape, rows)


@gluon.jit
def _query_tile(memory, slot, SPEC: gl.constexpr) -> Any:
    """A strip's query rows as an operand."""
    SHAPE: gl.constexpr = [SPEC.block_m, SPEC.keys.columns]
    layout: gl.constexpr = tile_layout(SPEC.keys.columns, 16, 2)
    return reinterpret(memory[0].index(slot), SPEC.compute, SHAPE, layout)


@gluon.jit
def _load_query(memory, slot, RUN: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """A strip's query rows as they were loaded, in runs."""
    COLUMNS: gl.constexpr = SPEC.keys.columns
    LANES: gl.constexpr = min(128, COLUMNS) // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    tile = memory[0].index(slot)
    BITS: gl.constexpr = tile.dtype.primitive_bitwidth
    if BITS == 8:
        SHAPE: gl.constexpr = [2, SPEC.block_m, COLUMNS]
        rows: gl.constexpr = tile_layout(COLUMNS, 8, 2)
        tile = reinterpret(tile, tile.dtype, SHAPE, rows).index(0)
    ROWS: gl.constexpr = SPEC.block_m
    runs = ()
    for first in gl.static_range(0, ROWS, RUN):
        runs += (tile.slice(first, RUN, dim=0).load(layout),)
    if BITS == 8:
        # They become wider where they lie.
        gl.thread_barrier()
    return runs


@gluon.jit
def _store_query(tile, query, SPEC: gl.constexpr) -> gl.tuple:
    """Store query rows over a power of two each, of int4 rotated; its bits, and the row's sum."""
    query = query.to(gl.float32)
    if SPEC.codes == "int4":
        query = int4.dims_as_stored(rotate_rows(query, SPEC.keys.width))
    exponent = gl.max(gl.abs(query), 1).to(gl.int32, bitcast=True) & 0x7F800000
    exponent = gl.minimum(gl.maximum(exponent, 1 << 23), 253 << 23)
    query *= ((254 << 23) - exponent).to(gl.float32, bitcast=True)[:, None]
    tile.store(query.to(SPEC.compute))
    return exponent, gl.sum(query, 1)


@gluon.jit
def _one_after_another(first, second) -> gl.tensor:
    return gl.join(first, second).permute((1, 0)).reshape([2 * first.shape[0]])


@gluon.jit
def _spread(numbers, rows: gl.constexpr, SPEC: gl.constexpr) -> gl.tensor:
    """Numbers of rows as `[rows, 4]`."""
    numbers = gl.convert_layout(numbers, gl.SliceLayout(1, rows))[:, None]
    return gl.full([SPEC.block_m, 4], 1.0, gl.float32, rows) * numbers


@gluon.jit
def start_strip(memory, slot, factor, rows: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """Make a strip's query rows operands of the products, in their range; for int4, rotate them.

    Returns:
        What turns each row's products into scores, `[rows, 4]`: `factor`, times the row's power
        of two; for int4, then the sum of each row.
    """
    BITS: gl.constexpr = memory[0].dtype.primitive_bitwidth
    if SPEC.codes != "int4" and (memory[0].dtype == SPEC.compute or BITS == 8):
        if BITS == 8:
            query = _load_query(memory, slot, SPEC.block_m, SPEC)[0]
            _query_tile(memory, slot, SPEC).store(query.to(SPEC.compute))
            fence_async_shared()
            gl.thread_barrier()
        return (gl.full([SPEC.block_m, 4], 1.0, gl.float32, rows) * factor,)
    else:
        # More numbers at a time are more than registers hold.
        RUN: gl.constexpr = min(SPEC.block_m, QUERY_AT_ONCE // SPEC.keys.columns)
        query = _load_query(memory, slot, RUN, SPEC)
        tile = _query_tile(memory, slot, SPEC)
        exponent, total = _store_query(tile.slice(0, RUN, dim=0), query[0], SPEC)
        if SPEC.block_m > RUN:
            more = _store_query(tile.slice(RUN, RUN, dim=0), query[1], SPEC)
            exponent = _one_after_another(exponent, more[0])
            total = _one_after_another(total, more[1])
        # Before products read it by another way, all warps must have written.
        fence_async_shared()
        gl.thread_barrier()
        # Scores of a row without keys are all -inf, which times 0 is NaN.
        factor = gl.maximum(exponent.to(gl.float32, bitcast=True) * factor, 2.0**-126)
        factor = _spread(factor, rows, SPEC)
        if SPEC.codes == "int4":
            return factor, _spread(total, rows, SPEC)
        else:
            return (factor,)


@gluon.jit
def score_tile(memory, query_slot, stage, SPEC: gl.constexpr) -> gl.tensor:
    """Multiply the rows of a strip with the keys of a tile: `[rows, keys]`."""
    sums = gl.full([SPEC.block_m, SPEC.block_n], 0.0, gl.float32, score_layout(SPEC))
    if SPEC.codes == "int4" and SPEC.keys.columns > 128:
        # Its descriptors, computed ahead, would take the registers that rotate the output.
        query_slot = hide(query_slot)
    query = _query_tile(memory, query_slot, SPEC)
    keys = memory[1].index(stage).permute((1, 0))
    sums = warpgroup_mma(query, keys, sums, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _multiply(
    weighted, prob, values, scales, FIRST: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr
) -> gl.tuple:
    """Start to add to each part the products of probabilities with rows of values, from FIRST."""
    KEYS: gl.constexpr = 8 * prob.shape[1]
    if scales is not None:
        prob *= _row_scales(scales, FIRST, prob)
    prob = prob.to(values.dtype).reshape([prob.shape[0], KEYS])
    prob = gl.convert_layout(prob, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    rows = values.slice(FIRST, KEYS, dim=0)
    sums = ()
    for part in gl.static_range(len(weighted)):
        columns = rows.slice(part * PART, PART, dim=1)
        sums += (warpgroup_mma(prob, columns, weighted[part], is_async=True),)
    return sums


@gluon.jit
def add_values(
    weighted, total, shrink, scores, factor, reference, values, scales, power, barrier, parity
) -> gl.tuple:
    """Shrink sums of weighted values, one a part, and their weights; add a tile's.

    The second half of the probabilities is computed while products with the first half run.
    Where rows have scales of their own, probabilities are those over `power`.
    """
    rows: gl.constexpr = total.type.layout
    layout: gl.constexpr = weighted[0].type.layout
    PART: gl.constexpr = weighted[0].shape[1]
    HALF: gl.constexpr = scores.shape[1] * 4
    sums = ()
    for part in gl.static_range(len(weighted)):
        sums += (shrink_rows(weighted[part], shrink),)
    left, right = halves(scores)
    prob = exponentials(left, factor, reference)
    total = total * shrink + sums_of_rows(prob, rows) * power
    mbarrier.wait(barrier, parity)
    sums = _multiply(sums, prob, values, scales, 0, PART, layout)
    prob = exponentials(right, factor, reference)
    total += sums_of_rows(prob, rows) * power
    return wait_for(_multiply(sums, prob, values, scales, HALF, PART, layout)), total
