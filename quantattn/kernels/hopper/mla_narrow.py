"""The Hopper MLA decode kernel for few query rows over FP8 pages, as fast as these can be read.

As in `decode_tiles`, keys and dims are the M of the products and query rows their N; query and
probabilities are two e4m3 terms a number. The first dims of a row are key and value: what is loaded
of a page serves both products.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents

from quantattn.kernels._attend_tiles import LOG2_E, key_range
from quantattn.kernels.hopper import decode_codes as codes
from quantattn.kernels.hopper import decode_terms as terms
from quantattn.kernels.hopper.decode_kernel import find_run, store_partial
from quantattn.kernels.hopper.decode_tiles import HEADROOM, mask_scores, new_state
from quantattn.kernels.hopper.memory import hide, reinterpret, tile_layout, wait_for
from quantattn.kernels.hopper.mla_boxes import PART, load_latent_boxes
from quantattn.kernels.hopper.schedule import first_partial_row, sequence_tiles

__all__ = ["hopper_mla_narrow_kernel"]

CHAIN: gl.constexpr = gl.constexpr(64)
"""Dims whose products the tensor cores add up by themselves."""


@gluon.jit
def _store_part(
    tile, query, starts, exists, scale, FIRST: gl.constexpr, SPEC: gl.constexpr
) -> gl.tensor:
    """Store columns of the query rows as terms; returns what turns their products into scores."""
    WIDTH: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dims = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    pointers = query.numbers + starts[:, None] + dims[None, :]
    rows = gl.load(pointers, mask=exists[:, None], other=0.0).to(gl.float32)
    sign = gl.where(scale < 0.0, -1.0, 1.0)
    factor, _ = terms.store_query(tile, rows, sign, SPEC)
    factor = gl.maximum(factor * gl.abs(scale), 2.0**-126)
    columns: gl.constexpr = gl.SliceLayout(0, terms.sum_layout(SPEC.block_n, SPEC.block_m))
    return gl.convert_layout(factor, columns)


@gluon.jit
def _store_query(memory, query, start, query_len, place, scale, SPEC: gl.constexpr) -> gl.tuple:
    """Store both halves of the latent part of the query rows, and the rotated part.

    Each has its own range, so that fewer numbers are in registers; returns the factors of all.
    """
    HALF: gl.constexpr = SPEC.values.width // 2
    head, first_row = place[1], place[2]
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    rows = hide(first_row) + gl.arange(0, SPEC.block_m, layout=layout)
    tokens = (start + rows // SPEC.group_size).to(gl.int64)
    heads = head * SPEC.group_size + rows % SPEC.group_size
    starts = tokens * query.token_stride + heads * query.head_stride
    exists = rows < query_len * SPEC.group_size
    halves = memory[0]
    left = _store_part(halves.index(hide(0)), query, starts, exists, scale, 0, SPEC)
    right = _store_part(halves.index(hide(1)), query, starts, exists, scale, HALF, SPEC)
    rope = _store_part(memory[1], query, starts, exists, scale, 2 * HALF, SPEC)
    return left, right, rope


@gluon.jit
def _score_tile(memory, slot, factors, SPEC: gl.constexpr) -> gl.tensor:
    """Scores `[keys, rows]` of a tile of keys, in units of log 2."""
    latents, ropes = memory[2], memory[3]
    PARTS: gl.constexpr = SPEC.values.width // PART
    HALF: gl.constexpr = SPEC.values.width // 2
    layout: gl.constexpr = terms.product_layout(SPEC.block_m)
    zeros = gl.full([SPEC.block_n, 2 * SPEC.block_m], 0.0, gl.float32, layout)
    keys, rows = ropes.index(slot), memory[1].permute((1, 0))
    sums = wait_for((warpgroup_mma(keys, rows, zeros, use_acc=False, is_async=True),))
    scores = terms.add_terms(sums[0]) * factors[2][None, :]
    for half in gl.static_range(2):
        query_tile = memory[0].index(hide(half))
        sums = ()
        for first in gl.static_range(0, HALF, CHAIN):
            keys = latents.index(slot * PARTS + (half * HALF + first) // PART)
            keys = keys.slice(first % PART, CHAIN, dim=1)
            rows = query_tile.slice(first, CHAIN, dim=1).permute((1, 0))
            sums += (warpgroup_mma(keys, rows, zeros, use_acc=False, is_async=True),)
        sums = wait_for(sums)
        total = sums[0]
        for chain in gl.static_range(1, len(sums)):
            total += sums[chain]
        scores += terms.add_terms(total) * factors[half][None, :]
    return scores


@gluon.jit
def _clear_rows(latents, slot, first_key, num_keys, SPEC: gl.constexpr) -> None:
    """Put 0 where no key is stored: bytes there may be NaN, which no probability of 0 undoes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    PARTS: gl.constexpr = SPEC.values.width // PART
    SHAPE: gl.constexpr = [SPEC.block_n, PART]
    keys = first_key + gl.arange(0, SPEC.block_n, layout=gl.SliceLayout(1, layout))
    stored = (keys < num_keys)[:, None]
    for part in range(PARTS):
        tile = latents.index(slot * PARTS + part)
        rows = reinterpret(tile, gl.int8, SHAPE, tile_layout(PART, 8, 2))
        rows.store(gl.where(stored, rows.load(layout), 0))
    fence_async_shared()


@gluon.jit
def _attend_tile(
    state, memory, slot, barriers, phase, first_key, masked, factors, rows, SPEC: gl.constexpr
) -> gl.tuple:
    """Attend to one tile of keys; its memory is released as soon as it is read."""
    latents, prob_tile = memory[2], memory[4].index(hide(0))
    first_row, shift, num_keys = rows
    largest, shares, weighted = state
    mbarrier.wait(barriers[0].index(slot), phase)
    scores = _score_tile(memory, slot, factors, SPEC)
    if masked:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        tokens = hide(first_row) + gl.arange(0, SPEC.block_m, layout=columns)
        positions = shift + tokens // SPEC.group_size
        scores = mask_scores(scores, first_key, positions, 0, num_keys, SPEC)
        _clear_rows(latents, slot, first_key, num_keys, SPEC)
    new_largest = gl.maximum(largest, gl.max(scores, 0))
    ceiling = gl.where(new_largest == -float("inf"), 0.0, new_largest)
    shrink = gl.exp2(largest - ceiling)
    prob = gl.exp2(scores - (ceiling - HEADROOM)[None, :])
    shares = shares * shrink[None, :] + prob
    terms.store_probabilities(prob_tile, prob, SPEC)
    in_part: gl.constexpr = gl.SliceLayout(0, weighted[0].type.layout)
    shrink = gl.convert_layout(shrink, in_part, assert_trivial=True)[None, :]
    added = ()
    PARTS: gl.constexpr = len(weighted)
    for part in gl.static_range(PARTS):
        values = codes.load_part(latents.index(slot * PARTS + hide(part)), SPEC)
        if part == PARTS - 1:
            mbarrier.arrive(barriers[1].index(slot), count=1)
        sums = wait_for((codes.start_part(values, prob_tile, SPEC),))
        added += (weighted[part] * shrink + terms.add_terms(sums[0]),)
    return new_largest, shares, added


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
    worker, head, first_row = place
    scale = softmax_scale * LOG2_E * gl.load(scales.key.numbers)
    if scales.query.numbers is not None:
        scale *= gl.load(scales.query.numbers)
    sequence, skip, left = run
    step = 0
    while left > 0:
        start, query_len, num_keys, first, count = sequence_tiles(
            batch, sequence, decode_limit, SPEC
        )
        tiles = gl.minimum(count - skip, left)
        if tiles > 0:
            shift = num_keys - query_len
            _, _, _, full_end, _ = key_range(shift, num_keys - 1, num_keys, SPEC)
            factors = _store_query(memory, query, start, query_len, place, scale, SPEC)
            rows = (first_row, shift, num_keys)
            state = new_state(SPEC)
            for tile in range(first + skip, first + skip + tiles):
                slot = step % STAGES
                phase = (step // STAGES) & 1
                key = tile * SPEC.block_n
                masked = key >= full_end
                state = _attend_tile(
                    state, memory, slot, barriers, phase, key, masked, factors, rows, SPEC
                )
                step += 1
            kept = first_partial_row(worker, sequence, head, ROWS, SPEC) + first_row
            store_partial(partials, state, kept, query_len * SPEC.group_size - first_row, SPEC)
        left -= tiles
        skip = 0
        sequence += 1


@gluon.jit
def _allocate(dtype: gl.constexpr, STAGES: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """Shared memory of query, latent rows and probabilities, and barriers of each stage."""
    M: gl.constexpr = 2 * SPEC.block_m
    N: gl.constexpr = SPEC.block_n
    WIDTH: gl.constexpr = SPEC.values.width
    ROPE: gl.constexpr = SPEC.rope.width
    TERM: gl.constexpr = terms.term_type(SPEC.codes)
    halves = gl.allocate_shared_memory(TERM, [2, M, WIDTH // 2], tile_layout(WIDTH // 2, 8, 2))
    rope_tile = gl.allocate_shared_memory(TERM, [M, ROPE], tile_layout(ROPE, 8, 2))
    count: gl.constexpr = STAGES * (WIDTH // PART)
    latents = gl.allocate_shared_memory(dtype, [count, N, PART], tile_layout(PART, 8, 2))
    ropes = gl.allocate_shared_memory(dtype, [STAGES, N, ROPE], tile_layout(ROPE, 8, 2))
    prob_tile = gl.allocate_shared_memory(TERM, [1, M, N], tile_layout(N, 8, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return (halves, rope_tile, latents, ropes, prob_tile), (full, empty)


@gluon.jit(do_not_specialize=["scales", "batch", "decode_limit"])
def hopper_mla_narrow_kernel(
    partials,
    query,
    latent_pages,
    rope_pages,
    scales,
    batch,
    softmax_scale,
    decode_limit,
    ROWS: gl.constexpr,
    SPEC: gl.constexpr,
    STAGES: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
) -> None:
    """Attend to one worker's run of tiles with SPEC.block_m query rows.

    Grid: workers * groups of heads; those of a worker are adjacent, since they read the same pages.
    Layout: a row is a token and query head of one group; ROWS of them are kept of a partial result.
        `latent_pages` and `rope_pages` describe the same pages, in boxes of different widths.
    Precision: query and probabilities as two e4m3 terms each; sums and softmax in float32.
    """
    GROUPS: gl.constexpr = (ROWS + SPEC.block_m - 1) // SPEC.block_m
    SHARING: gl.constexpr = SPEC.num_kv_heads * GROUPS
    worker = gl.program_id(0) // SHARING
    head = gl.program_id(0) % SHARING // GROUPS
    first_row = gl.program_id(0) % GROUPS * SPEC.block_m
    memory, barriers = _allocate(latent_pages.dtype, STAGES, SPEC)
    gdc_launch_dependents()
    run = find_run(batch, worker, gl.num_programs(0) // SHARING, decode_limit, SPEC)
    task = (memory, barriers, (worker, head, first_row), run, decode_limit)
    # What the loader is handed overwrites the scratch of the sums, which all warps must have read.
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_compute, (partials, query, scales, batch, softmax_scale, task, ROWS, STAGES, SPEC)),
            (load_latent_boxes, (latent_pages, rope_pages, batch, task, STAGES, SPEC)),
        ],
        [1],
        [LOADER_REGISTERS],
    )
