"""The Hopper MLA decode kernel for many query rows: two warp groups compute, and one loads."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from quantattn.kernels._attend_tiles import LOG2_E, key_range
from quantattn.kernels.hopper.decode_kernel import find_run
from quantattn.kernels.hopper.memory import tile_layout
from quantattn.kernels.hopper.mla_loader import load_latents
from quantattn.kernels.hopper.mla_tiles import attend_tiles, store_query, sum_layout
from quantattn.kernels.hopper.schedule import first_partial_row, sequence_tiles

__all__ = ["hopper_mla_kernel"]


@gluon.jit
def _meet(barrier, phase) -> None:
    """Wait for the other computing group."""
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, phase)


@gluon.jit
def _store_half(start, half, num_rows, WIDTH: gl.constexpr) -> None:
    """Store the first rows of a tile, each `WIDTH` numbers behind the last.

    Eight columns are a thread's own, and the others a constant away: no address but one is kept.
    """
    M: gl.constexpr = half.shape[0]
    half = half.reshape([M, half.shape[1] // 8, 8])
    layout: gl.constexpr = half.type.layout
    in_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    in_step: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    in_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    rows = gl.arange(0, M, layout=in_row)[:, None, None]
    steps = gl.arange(0, half.shape[1], layout=in_step)[None, :, None]
    columns = gl.arange(0, 8, layout=in_column)[None, None, :]
    gl.store(start + (rows * WIDTH + columns) + steps * 8, half, mask=rows < num_rows)


@gluon.jit
def _store_partial(
    partials, state, kept, num_rows, GROUP: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Store this group's half of a partial result, whose rows begin at row `kept` of them all."""
    weighted, largest, total = state
    if GROUP == 0:
        rows = gl.arange(0, SPEC.block_m, layout=total.type.layout)
        weights = largest - SPEC.headroom + gl.log2(total)
        gl.store(partials.weights + kept + rows, weights, mask=rows < num_rows)
    WIDTH: gl.constexpr = SPEC.values.width
    layout: gl.constexpr = gl.SliceLayout(1, weighted.type.layout)
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    factor = gl.convert_layout(factor, layout, assert_trivial=True)
    start = partials.rows + kept * WIDTH + GROUP * (WIDTH // 2)
    _store_half(start, weighted * factor[:, None], num_rows, WIDTH)


@gluon.jit
def _compute(
    partials,
    query,
    scales,
    batch,
    softmax_scale,
    task,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    SPEC: gl.constexpr,
) -> None:
    """Attend to the tiles of a run, in order, with half of the output's columns."""
    memory, barriers, place, run, decode_limit = task
    worker, head = place
    layout: gl.constexpr = gl.SliceLayout(1, sum_layout(SPEC.block_n))
    row_tokens = gl.arange(0, SPEC.block_m, layout=layout) // SPEC.group_size
    scale = softmax_scale * LOG2_E
    if scales.key.numbers is not None:
        scale *= gl.load(scales.key.numbers)
    if scales.query.numbers is not None:
        scale *= gl.load(scales.query.numbers)
    # Running maxima are taken of products, so that what these are multiplied by is positive.
    sign = gl.where(scale < 0.0, -1.0, 1.0)
    scale = gl.abs(scale)
    sequence, skip, left = run
    step = 0
    while left > 0:
        start, query_len, num_keys, first, count = sequence_tiles(
            batch, sequence, decode_limit, SPEC
        )
        tiles = gl.minimum(count - skip, left)
        if tiles > 0:
            # Neither group may still read the last sequence's query, or not yet this one's.
            _meet(barriers[2], 0)
            store_query(query, memory, start, query_len, head, sign, GROUP, SPEC)
            _meet(barriers[2], 1)
            shift = num_keys - query_len
            _, _, _, full_end, _ = key_range(shift, num_keys - 1, num_keys, SPEC)
            rows = (shift + row_tokens, num_keys, full_end, scale)
            span = (first + skip, tiles)
            state = attend_tiles(memory, barriers, step, span, rows, GROUP, SPEC)
            step += tiles
            kept = first_partial_row(worker, sequence, head, ROWS, SPEC)
            _store_partial(partials, state, kept, query_len * SPEC.group_size, GROUP, SPEC)
        left -= tiles
        skip = 0
        sequence += 1


@gluon.jit
def _allocate(SPEC: gl.constexpr) -> gl.tuple:
    """Shared memory of query rows, two tiles of latent rows and statistics, and the barriers.

    Half h of tile s is number 2s + h; tile s is group s's own, and of it half s. What is rotated of
    a tile makes room for its probabilities.
    """
    M: gl.constexpr = SPEC.block_m
    N: gl.constexpr = SPEC.block_n
    HALF: gl.constexpr = SPEC.values.width // 2
    ROPE: gl.constexpr = SPEC.rope.width
    TYPE: gl.constexpr = SPEC.compute
    rows: gl.constexpr = tile_layout(HALF, 16, 2)
    query_halves = gl.allocate_shared_memory(TYPE, [2, M, HALF], rows)
    query_ropes = gl.allocate_shared_memory(TYPE, [M, ROPE], rows)
    halves = gl.allocate_shared_memory(TYPE, [4, N, HALF], rows)
    ropes = gl.allocate_shared_memory(TYPE, [2, N, ROPE], rows)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    factors = gl.allocate_shared_memory(gl.float32, [M], flat)
    pairs: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    stats = gl.allocate_shared_memory(gl.float32, [2, M, 2], pairs)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rest_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rest_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    meeting = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(rest_full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
        mbarrier.init(rest_empty.index(slot), count=2)
        mbarrier.init(done.index(slot), count=1)
    mbarrier.init(meeting, count=2)
    memory = (query_halves, query_ropes, halves, ropes, (factors, stats))
    return memory, ((full, rest_full, empty, rest_empty), done, meeting)


@gluon.jit(do_not_specialize=["scales", "batch", "decode_limit"])
def hopper_mla_kernel(
    partials,
    query,
    keys,
    scales,
    batch,
    softmax_scale,
    decode_limit,
    ROWS: gl.constexpr,
    SPEC: gl.constexpr,
    COMPUTING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
) -> None:
    """Attend to one worker's run of tiles with SPEC.block_m query rows.

    Grid: workers * groups of heads; those of a worker are adjacent, since they read the same pages.
    Layout: a row is a token and query head of one group; ROWS of them are kept of a partial result.
    Precision: products in SPEC.compute, sums and softmax in float32.
    """
    worker = gl.program_id(0) // SPEC.num_kv_heads
    head = gl.program_id(0) % SPEC.num_kv_heads
    memory, barriers = _allocate(SPEC)
    gdc_launch_dependents()
    num_workers = gl.num_programs(0) // SPEC.num_kv_heads
    run = find_run(batch, worker, num_workers, decode_limit, SPEC)
    task = (memory, barriers, (worker, head), run, decode_limit)
    # What the loader is handed overwrites the scratch of the sums, which all warps must have read.
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_compute, (partials, query, scales, batch, softmax_scale, task, ROWS, 0, SPEC)),
            (_compute, (partials, query, scales, batch, softmax_scale, task, ROWS, 1, SPEC)),
            (load_latents, (keys, batch, task, SPEC)),
        ],
        [4, 4],
        [COMPUTING_REGISTERS, LOADING_REGISTERS],
    )
