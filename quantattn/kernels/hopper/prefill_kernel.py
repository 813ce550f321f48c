"""The Hopper prefill kernel: persistent CTAs whose warpgroups load tiles, or attend to them."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantattn.kernels.hopper import prefill_operands as operands
from quantattn.kernels.hopper.prefill_items import (
    RECORDS,
    load_record,
    new_records,
    read_item,
    read_strip,
)
from quantattn.kernels.hopper.prefill_tiles import attend_strip, store_strip

__all__ = ["hopper_prefill_kernel"]


@gluon.jit
def _produce(
    source, shared, STAGES: gl.constexpr, GROUPS: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Claim items, load their query rows and tiles."""
    rows, pages, plan, batch = source
    records, memory, barriers = shared
    query_full, query_empty, _ = barriers
    query = (rows, memory[0], query_full, query_empty)
    gdc_wait()
    index = gl.program_id(0)
    step = 0
    turn = 0
    # ptxas does not keep to the register limit of a role whose loop may be skipped.
    runs = True
    while runs:
        numbers = load_record(plan, index, SPEC)
        record = records.index(turn & (RECORDS - 1))
        record.store(numbers)
        step = operands.produce_tiles(
            query, pages, batch, memory, barriers, record, turn, step, STAGES, GROUPS, SPEC
        )
        runs = read_item(record).end_tile >= 0
        index = gl.atomic_add(plan + 1, 1, mask=runs, sem="relaxed") + gl.num_programs(0)
        turn += 1


@gluon.jit
def _consume(
    GROUP: gl.constexpr,
    output,
    sinks,
    shared,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    SPEC: gl.constexpr,
    OUTPUT: gl.constexpr,
) -> None:
    """Attend with one strip of each item."""
    records, memory, barriers = shared
    query_full, query_empty, _ = barriers
    BUFFERS: gl.constexpr = operands.query_buffers(SPEC)
    WITH_LSE: gl.constexpr = output.lse is not None
    step = 0
    turn = 0
    mbarrier.wait(query_full.index(0), 0)
    item = read_item(records.index(0))
    while item.end_tile >= 0:
        record = records.index(turn & (RECORDS - 1))
        state, step = attend_strip(
            memory, barriers, record, turn, step, WITH_LSE, GROUP, GROUPS, STAGES, SPEC
        )
        item = read_item(record)
        strip = read_strip(item, GROUP, SPEC)
        store_strip(output, sinks, item, strip, state, SPEC, OUTPUT)
        if BUFFERS > 1:
            mbarrier.arrive(query_empty.index(turn % BUFFERS), count=1)
        turn += 1
        mbarrier.wait(query_full.index(turn % BUFFERS), (turn // BUFFERS) & 1)
        item = read_item(records.index(turn & (RECORDS - 1)))


@gluon.jit
def _new_barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """Barriers of two items and of STAGES tiles: that they are there, that they may be replaced."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    query_full = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    query_empty = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    for buffer in gl.static_range(2):
        mbarrier.init(query_full.index(buffer), count=1)
        mbarrier.init(query_empty.index(buffer), count=GROUPS)
    return query_full, query_empty, operands.new_tile_barriers(STAGES, GROUPS, SPEC)


@gluon.jit(do_not_specialize=["batch"])
def hopper_prefill_kernel(
    output,
    query,
    keys,
    values,
    row_scales,
    plan,
    sinks,
    batch,
    SPEC: gl.constexpr,
    OUTPUT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """Attend with the strips that a plan lists.

    Grid: as many CTAs as run at once; each takes item after item, the longest first.
    Layout: the first warpgroup loads. GROUPS others attend with a strip of SPEC.block_m rows each,
        to STAGES tiles of keys and values in shared memory; REGISTERS are those of their threads.
        `keys` and `values` describe where these are, `row_scales` has pointers to the scales of
        their rows and the step between two blocks; where each scale lies behind its row, these
        alone say where rows are.
    Precision: products of e4m3 numbers, added up in float32 from tile to tile; or of bf16 or fp16
        ones, which codes become, see `prefill_operands`. Softmax in float32.
    """
    gdc_launch_dependents()
    barriers = _new_barriers(STAGES, GROUPS, SPEC)
    memory = operands.allocate(query.dtype, STAGES, GROUPS, SPEC)
    fence_async_shared()
    shared = (new_records(), memory, barriers)
    source = (query, (keys, values, row_scales), plan, batch)
    # In the loop that hands out work to the other warps, the loader's addresses would be hoisted.
    if GROUPS == 4:
        gl.warp_specialize(
            [
                (_produce, (source, shared, STAGES, GROUPS, SPEC)),
                (_consume, (0, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
                (_consume, (1, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
                (_consume, (2, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
                (_consume, (3, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_produce, (source, shared, STAGES, GROUPS, SPEC)),
                (_consume, (0, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
                (_consume, (1, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
                (_consume, (2, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_produce, (source, shared, STAGES, GROUPS, SPEC)),
                (_consume, (0, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
                (_consume, (1, output, sinks, shared, STAGES, GROUPS, SPEC, OUTPUT)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )
