"""Which operands a Hopper prefill multiplies: e4m3 numbers throughout, or bf16 and fp16 ones."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quantattn.kernels.hopper import prefill_convert as convert
from quantattn.kernels.hopper import prefill_fp8 as fp8
from quantattn.kernels.hopper import prefill_numbers as numbers
from quantattn.kernels.hopper.prefill_int4 import dims_in_order
from quantattn.kernels.hopper.prefill_quads import exponentials, quads
from quantattn.kernels.hopper.rotation import add_parts, rotate_back

__all__ = [
    "add_values",
    "allocate",
    "finish_sums",
    "headroom",
    "new_tile_barriers",
    "output_part",
    "pass_on",
    "produce_tiles",
    "query_buffers",
    "score_layout",
    "score_tile",
    "start_strip",
    "sum_layout",
    "sum_parts",
    "sum_width",
]


@gluon.constexpr_function
def arrivals(SPEC) -> int:
    """Arrivals that make a tile complete."""
    return int(fp8.ARRIVALS.value) if SPEC.rounds_prob else 1


@gluon.constexpr_function
def query_buffers(SPEC) -> int:
    """Items whose query rows are in shared memory."""
    return int(fp8.query_buffers(SPEC)) if SPEC.rounds_prob else 1


@gluon.constexpr_function
def score_layout(SPEC) -> gl.NVMMADistributedLayout:
    """Registers of products with the keys of a tile."""
    return fp8.score_layout(SPEC) if SPEC.rounds_prob else numbers.score_layout(SPEC)


@gluon.constexpr_function
def sum_width(SPEC) -> int:
    """Columns of a part of the weighted sums of values."""
    return int(fp8.SUM_WIDTH.value if SPEC.rounds_prob else numbers.sum_width(SPEC))


@gluon.constexpr_function
def sum_parts(SPEC) -> int:
    """Parts of the weighted sums of values."""
    return int(-(-SPEC.values.width // sum_width(SPEC)))


@gluon.constexpr_function
def sum_layout(SPEC) -> gl.NVMMADistributedLayout:
    """Registers of a part of the weighted sums of values."""
    return fp8.sum_layout(SPEC) if SPEC.rounds_prob else numbers.sum_layout(SPEC)


@gluon.jit
def allocate(
    query_type, STAGES: gl.constexpr, GROUPS: gl.constexpr, SPEC: gl.constexpr
) -> gl.tuple:
    """Shared memory of the operands; the query's comes first."""
    if SPEC.rounds_prob:
        return fp8.allocate(query_type, STAGES, GROUPS, SPEC)
    else:
        return numbers.allocate(query_type, STAGES, GROUPS, SPEC)


@gluon.jit
def new_tile_barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """Barriers of each stage: that keys and values are there, and that they may be replaced.

    With e4m3 operands one pair is for both sides, and both have it. Of bf16 and fp16 values, two
    more tell the loader that rows have landed of which it clears some.
    """
    full, empty = _new_pair(STAGES, STAGES, arrivals(SPEC), GROUPS)
    if SPEC.rounds_prob:
        return full, empty, full, empty
    else:
        values_full, values_empty = _new_pair(STAGES + 2, STAGES, arrivals(SPEC), GROUPS)
        return full, empty, values_full, values_empty


@gluon.jit
def _new_pair(
    FULL: gl.constexpr, EMPTY: gl.constexpr, ARRIVALS: gl.constexpr, GROUPS: gl.constexpr
) -> gl.tuple:
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [FULL, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [EMPTY, 1], layout)
    for stage in gl.static_range(FULL):
        mbarrier.init(full.index(stage), count=ARRIVALS)
    for stage in gl.static_range(EMPTY):
        mbarrier.init(empty.index(stage), count=GROUPS)
    return full, empty


@gluon.jit
def start_strip(memory, query_slot, item, rows: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """What turns products with the rows of a strip into scores, `[rows, 4]`; of int4, their sum."""
    if SPEC.rounds_prob:
        return (gl.full([SPEC.block_m, 4], 1.0, gl.float32, rows) * item.factor,)
    else:
        return numbers.start_strip(memory, query_slot, item.factor, rows, SPEC)


@gluon.jit
def score_tile(
    memory, barriers, query_slot, row_terms, step, STAGES: gl.constexpr, SPEC: gl.constexpr
) -> gl.tensor:
    """Multiply the rows of a strip with the keys of a tile, and release these.

    Returns:
        Products `[rows, keys / 8, 4, 2]`, see `prefill_quads`.
    """
    full, empty, _, _ = barriers
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    if SPEC.rounds_prob:
        return quads(fp8.score_tile(memory, query_slot, stage, SPEC))
    else:
        products = quads(numbers.score_tile(memory, query_slot, stage, SPEC))
        if SPEC.has_row_scales:
            products = numbers.scale_products(products, row_terms, memory, stage, STAGES, SPEC)
        mbarrier.arrive(empty.index(stage), count=1)
        return products


@gluon.jit
def finish_sums(weighted, SPEC: gl.constexpr) -> gl.tuple:
    """What `output_part` makes parts of the output of, from the weighted sums of values."""
    if SPEC.codes == "int4":
        return add_parts(weighted, SPEC.values.width)
    else:
        return weighted


@gluon.jit
def output_part(sums, FIRST: gl.constexpr, SPEC: gl.constexpr) -> gl.tensor:
    """A part of the output, its first column FIRST, from its sums of values."""
    if SPEC.rounds_prob:
        return fp8.in_order(sums)
    elif SPEC.codes == "int4":
        return rotate_back(dims_in_order(sums), FIRST, SPEC.values.width)
    else:
        return sums


@gluon.jit
def headroom(item, memory, step, STAGES: gl.constexpr, SPEC: gl.constexpr) -> gl.tensor:
    """How much less than the scores of a tile, at most, what their exponents refer to may be."""
    if SPEC.has_row_scales:
        exponent = numbers.value_exponent(memory, step % STAGES) >> 23
        return item.headroom - (exponent - 127).to(gl.float32)
    else:
        return item.headroom


@gluon.jit
def add_values(
    state,
    shrink,
    scores,
    factor,
    memory,
    barriers,
    step,
    WITH_LSE: gl.constexpr,
    STAGES: gl.constexpr,
    SPEC: gl.constexpr,
) -> gl.tuple:
    """Shrink sums of weighted values, and their weights; add a tile's, and release it."""
    _, _, full, empty = barriers
    reference, total, weighted = state
    stage = step % STAGES
    if SPEC.rounds_prob:
        prob = exponentials(scores, factor, reference)
        weighted, total = fp8.add_values(
            weighted, total, shrink, prob, memory, stage, WITH_LSE, SPEC
        )
    else:
        values = memory[2].index(stage)
        parity = (step // STAGES) & 1
        scales = None
        power = 1.0
        base = reference
        if SPEC.has_row_scales:
            if SPEC.codes != "int4":
                scales = memory[6].index(STAGES + stage)
            exponent = numbers.value_exponent(memory, stage)
            power = ((254 << 23) - exponent).to(gl.float32, bitcast=True)
            base = reference - ((exponent >> 23) - 127).to(gl.float32)
        weighted, total = numbers.add_values(
            weighted,
            total,
            shrink,
            scores,
            factor,
            base,
            values,
            scales,
            power,
            full.index(stage),
            parity,
        )
    mbarrier.arrive(empty.index(stage), count=1)
    return reference, total, weighted


@gluon.jit
def pass_on(barriers, step, STAGES: gl.constexpr, SPEC: gl.constexpr) -> None:
    """Release a tile that the strip does not see."""
    keys_full, keys_empty, full, empty = barriers
    stage = step % STAGES
    parity = (step // STAGES) & 1
    if not SPEC.rounds_prob:
        mbarrier.wait(keys_full.index(stage), parity)
        mbarrier.arrive(keys_empty.index(stage), count=1)
    mbarrier.wait(full.index(stage), parity)
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def produce_tiles(
    query,
    pages,
    batch,
    memory,
    barriers,
    record,
    turn,
    step,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    SPEC: gl.constexpr,
) -> Any:
    """Load the tiles of item `turn`, the last first, and its query; return the steps.

    The query comes behind the first tile, which need not wait for the end of the item before.
    """
    if SPEC.rounds_prob:
        return fp8.produce_tiles(
            query, pages, batch, memory, barriers, record, turn, step, STAGES, GROUPS, SPEC
        )
    else:
        return convert.produce_tiles(
            query, pages, batch, memory, barriers, record, turn, step, STAGES, GROUPS, SPEC
        )
