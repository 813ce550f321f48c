"""The Hopper decode kernel: which tiles a CTA attends to, and its two roles, loading and computing.

Runs of tiles are those of `schedule`; `merge` merges the partial results.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quantattn.kernels._attend_tiles import LOG2_E, key_range
from quantattn.kernels.hopper.decode_loader import load_tiles
from quantattn.kernels.hopper.decode_query import load_query, store_query
from quantattn.kernels.hopper.decode_row_numbers import box_width, numbers_of_row
from quantattn.kernels.hopper.decode_row_tiles import (
    attend_row_tile,
    finish_row_tiles,
    new_row_state,
)
from quantattn.kernels.hopper.decode_terms import term_type
from quantattn.kernels.hopper.decode_tiles import (
    attend_tile,
    finish_tiles,
    new_state,
    part_columns,
    part_width,
    sum_layout,
)
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.schedule import (
    SEQUENCES,
    first_partial_row,
    first_tile_of,
    sequence_tiles,
)

__all__ = ["find_run", "hopper_decode_kernel", "store_partial"]


@gluon.jit
def _add(a, b) -> gl.tensor:
    return a + b


@gluon.jit
def find_run(batch, worker, num_workers, decode_limit, SPEC: gl.constexpr) -> gl.tuple:
    """A worker's run: its first sequence, the first tile of that, and the number of tiles."""
    layout: gl.constexpr = gl.BlockedLayout([SEQUENCES // 128], [32], [4], [0])
    indices = gl.arange(0, SEQUENCES, layout=layout)
    _, _, _, _, counts = sequence_tiles(batch, indices, decode_limit, SPEC)
    total = gl.sum(counts, 0)
    for first in range(SEQUENCES, batch.num_seqs, SEQUENCES):
        _, _, _, _, more = sequence_tiles(batch, first + indices, decode_limit, SPEC)
        total += gl.sum(more, 0)
    tile = first_tile_of(worker, total, num_workers)
    end = first_tile_of(worker + 1, total, num_workers)
    is_before = gl.associative_scan(counts, 0, _add) <= tile
    sequence = gl.sum(is_before.to(gl.int32), 0)
    seen = gl.sum(gl.where(is_before, counts, 0), 0)
    for first in range(SEQUENCES, batch.num_seqs, SEQUENCES):
        _, _, _, _, more = sequence_tiles(batch, first + indices, decode_limit, SPEC)
        is_before = (seen + gl.associative_scan(more, 0, _add) <= tile) & (sequence == first)
        sequence += gl.sum(is_before.to(gl.int32), 0)
        seen += gl.sum(gl.where(is_before, more, 0), 0)
    return sequence, tile - seen, end - tile


@gluon.jit
def _times_scale(factor, scale, head) -> gl.tensor:
    """Multiply by the scale of a KV head, if there is one."""
    if scale.numbers is None:
        return factor
    else:
        return factor * gl.load(scale.numbers + head * scale.head_stride)


@gluon.jit
def _store_means(rows_ptr, means, num_rows, SPEC: gl.constexpr) -> None:
    layout: gl.constexpr = means.type.layout
    rows = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(0, layout))
    dims = gl.arange(0, means.shape[0], layout=gl.SliceLayout(1, layout))
    places = rows[None, :] * SPEC.values.width + dims[:, None]
    gl.store(rows_ptr + places, means, mask=(rows < num_rows)[None, :])


@gluon.jit
def store_partial(partials, state, first_row, num_rows, SPEC: gl.constexpr) -> None:
    """Store a partial result, whose rows begin at row `first_row` of all partial results."""
    if SPEC.has_row_scales:
        means, weights = finish_row_tiles(state, SPEC)
    else:
        means, weights = finish_tiles(state, SPEC)
    for part in gl.static_range(len(means)):
        start = first_row * SPEC.values.width + part * part_width(SPEC)
        _store_means(partials.rows + start, means[part], num_rows, SPEC)
    rows = gl.arange(0, SPEC.block_m, layout=weights.type.layout)
    gl.store(partials.weights + first_row + rows, weights, mask=rows < num_rows)


@gluon.jit
def _attend(
    state,
    memory,
    slot,
    full,
    empty,
    phase,
    key,
    masked,
    factors,
    rows,
    STAGES: gl.constexpr,
    SPEC: gl.constexpr,
) -> gl.tuple:
    if SPEC.has_row_scales:
        return attend_row_tile(
            state, memory, slot, full, empty, phase, key, masked, factors, rows, STAGES, SPEC
        )
    else:
        return attend_tile(
            state, memory, slot, full, empty, phase, key, masked, factors[0], rows, SPEC
        )


@gluon.jit
def _compute(
    partials,
    query,
    scales,
    batch,
    softmax_scale,
    task,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    SPEC: gl.constexpr,
) -> None:
    """Attend to the tiles of a run, in order."""
    memory, barriers, place, run, decode_limit = task
    full, empty = barriers
    worker, head, first_row = place
    columns: gl.constexpr = gl.SliceLayout(0, sum_layout(SPEC.block_n, SPEC))
    row_tokens = (first_row + gl.arange(0, SPEC.block_m, layout=columns)) // SPEC.group_size
    scale = _times_scale(softmax_scale * LOG2_E, scales.query, head)
    scale = _times_scale(scale, scales.key, head)
    sequence, skip, left = run
    step = 0
    start, query_len, num_keys, first, count = sequence_tiles(batch, sequence, decode_limit, SPEC)
    rows = load_query(query, start, query_len, head, first_row, SPEC)
    while left > 0:
        # What the next sequence needs is on its way during this one.
        next_start, next_len, next_keys, next_first, next_count = sequence_tiles(
            batch, sequence + 1, decode_limit, SPEC
        )
        next_rows = load_query(query, next_start, next_len, head, first_row, SPEC)
        tiles = gl.minimum(count - skip, left)
        if tiles > 0:
            shift = num_keys - query_len
            oldest, _, full_first, full_end, _ = key_range(shift, num_keys - 1, num_keys, SPEC)
            factors = store_query(memory[0], rows, scale, SPEC)
            state = new_row_state(SPEC) if SPEC.has_row_scales else new_state(SPEC)
            for tile in range(first + skip, first + skip + tiles):
                slot = step % STAGES
                key = tile * SPEC.block_n
                state = _attend(
                    state,
                    memory,
                    slot,
                    full.index(slot),
                    empty.index(slot),
                    (step // STAGES) & 1,
                    key,
                    (key < full_first) | (key >= full_end),
                    factors,
                    (shift + row_tokens, oldest, num_keys),
                    STAGES,
                    SPEC,
                )
                step += 1
            kept = first_partial_row(worker, sequence, head, ROWS, SPEC) + first_row
            store_partial(partials, state, kept, query_len * SPEC.group_size - first_row, SPEC)
        left -= tiles
        skip = 0
        sequence += 1
        start, query_len, num_keys = next_start, next_len, next_keys
        first, count, rows = next_first, next_count, next_rows


@gluon.jit
def _allocate(dtype: gl.constexpr, STAGES: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """Shared memory, and barriers of each stage.

    The memory is that of query, keys, values, probabilities and, where they have some, the numbers
    of rows.
    """
    PART: gl.constexpr = part_columns(SPEC)
    BITS: gl.constexpr = dtype.primitive_bitwidth
    COUNT: gl.constexpr = STAGES * SPEC.keys.width // part_width(SPEC)
    TERMS: gl.constexpr = SPEC.block_m * (1 if SPEC.codes is None else 2)
    OPERAND: gl.constexpr = dtype if SPEC.codes is None else term_type(SPEC.codes)
    N: gl.constexpr = SPEC.block_n
    rows: gl.constexpr = tile_layout(PART, BITS, 2)
    query_rows: gl.constexpr = tile_layout(SPEC.keys.width, BITS, 2)
    keys = gl.allocate_shared_memory(dtype, [COUNT, N, PART], rows)
    values = gl.allocate_shared_memory(dtype, [COUNT, N, PART], rows)
    query_tile = gl.allocate_shared_memory(OPERAND, [TERMS, SPEC.keys.width], query_rows)
    prob_tile = gl.allocate_shared_memory(OPERAND, [TERMS, N], tile_layout(N, BITS, 2))
    memory = (query_tile, keys, values, prob_tile)
    if SPEC.has_row_scales:
        BOX: gl.constexpr = box_width(SPEC)
        SHAPE: gl.constexpr = [STAGES * N // BOX, 1, 2, numbers_of_row(SPEC), BOX]
        in_order: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=4)
        memory += (gl.allocate_shared_memory(gl.float32, SHAPE, in_order),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return memory, (full, empty)


@gluon.jit(do_not_specialize=["scales", "batch", "decode_limit"])
def hopper_decode_kernel(
    partials,
    query,
    pages,
    row_numbers,
    scales,
    batch,
    softmax_scale,
    decode_limit,
    ROWS: gl.constexpr,
    SPEC: gl.constexpr,
    STAGES: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
) -> None:
    """Attend to one worker's run of tiles, for one KV head and SPEC.block_m of its rows.

    Grid: workers * KV heads * groups of rows; those of a worker are adjacent, since they read the
        same pages: with NHD pages, neighbouring parts of the same rows.
    Layout: a row is a token and query head of one KV head; ROWS of them are kept of a partial
        result. `pages` describes each page as a matrix, K above V, whose rows are all heads of a
        token (NHD) or one of them (HND). `row_numbers` describes the float32 numbers of a page's
        rows; None: they have none.
    Precision: codes: query and probabilities as two terms each, see `decode_terms`; numbers:
        probabilities in the pages' type. Softmax in float32, sums too but for exact ones of int8.
    """
    GROUPS: gl.constexpr = (ROWS + SPEC.block_m - 1) // SPEC.block_m
    SHARING: gl.constexpr = SPEC.num_kv_heads * GROUPS
    worker = gl.program_id(0) // SHARING
    head = gl.program_id(0) % SHARING // GROUPS
    first_row = gl.program_id(0) % GROUPS * SPEC.block_m
    memory, barriers = _allocate(pages.dtype, STAGES, SPEC)
    gdc_launch_dependents()
    run = find_run(batch, worker, gl.num_programs(0) // SHARING, decode_limit, SPEC)
    task = (memory, barriers, (worker, head, first_row), run, decode_limit)
    # What the loader is handed overwrites the scratch of the sums, which all warps must have read.
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_compute, (partials, query, scales, batch, softmax_scale, task, ROWS, STAGES, SPEC)),
            (load_tiles, (pages, row_numbers, batch, task, STAGES, SPEC)),
        ],
        [1],
        [LOADER_REGISTERS],
    )
    # Beside a prefill: what waits for this kernel's end waits for that one's too.
    gdc_wait()
