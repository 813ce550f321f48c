"""Operands of a Hopper prefill whose query, keys, values and probabilities are all e4m3.

FP8 products take both operands with the summed dimension innermost, which keys have and values do
not: the producer transposes values in shared memory, two dims at a time. The tensor cores keep 13
fraction bits of a sum of e4m3 products, so each tile's sums are added up in float32.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quantattn.kernels.hopper.memory import reinterpret, tile_layout
from quantattn.kernels.hopper.prefill_items import (
    boxes_at_once,
    clear_rows,
    hide_count,
    load_block_ids,
    load_query,
    pick,
    read_item,
)
from quantattn.kernels.hopper.prefill_quads import quads, sums_of_rows

__all__ = [
    "ARRIVALS",
    "HEADROOM",
    "SUM_WIDTH",
    "add_values",
    "allocate",
    "in_order",
    "part_width",
    "produce_tiles",
    "query_buffers",
    "score_tile",
    "sum_layout",
]

ARRIVALS: gl.constexpr = gl.constexpr(2)
"""Arrivals that make a tile complete: of what starts to load its keys, and of its V^T."""
SUM_WIDTH: gl.constexpr = gl.constexpr(64)
"""Columns of a part of the weighted sums: the next one is multiplied while one is added up."""
HEADROOM: gl.constexpr = gl.constexpr(8.0)
"""Log 2 of the largest probability, so that small ones stay normal numbers."""

ONE: gl.constexpr = gl.constexpr(0x38)
"""The code of 1.0: ptxas 12.8 gets the conversion of a number that is stored four times wrong."""

# A register holds two dims of two keys: gather the even dims and the odd ones of four keys.
UNZIP: gl.constexpr = gl.constexpr("""
prmt.b32 $0, $2, $3, 0x6420;
prmt.b32 $1, $2, $3, 0x7531;""")


@gluon.constexpr_function
def query_buffers(SPEC) -> int:
    """Items whose query rows are in shared memory: two where there is room."""
    return 1 if SPEC.keys.columns + SPEC.values.columns == 512 else 2


@gluon.constexpr_function
def part_width(side) -> int:
    """Columns of K rows or V rows that lie side by side in a tile: no more can be swizzled."""
    return int(min(128, side.columns))


@gluon.constexpr_function
def score_layout(SPEC) -> gl.NVMMADistributedLayout:
    """Registers of products with the keys of a tile."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SPEC.block_n, 32]
    )


@gluon.constexpr_function
def sum_layout(SPEC) -> gl.NVMMADistributedLayout:
    """Registers of a part of the weighted sums of values."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SUM_WIDTH.value, 32]
    )


@gluon.constexpr_function
def _bits(first, end) -> list[int]:
    return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function
def pair_layout(pairs, keys) -> gl.DistributedLinearLayout:
    """Registers of V^T as pairs of dims `[pairs, keys]`, as transposing loads deliver them."""
    rest = [[i, 0] for i in _bits(8, pairs)] + [[0, i] for i in _bits(16, keys)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], *rest[:-2]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=rest[-2:],
        block_bases=[],
        shape=[pairs, keys],
    )


@gluon.jit
def allocate(dtype, STAGES: gl.constexpr, GROUPS: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """Shared memory of query, keys and V^T; of values as they are stored, and their barriers.

    The last is what adds up probabilities, see `_start_sums`.
    """
    BUFFERS: gl.constexpr = query_buffers(SPEC)
    KEYS: gl.constexpr = part_width(SPEC.keys)
    KEY_PARTS: gl.constexpr = SPEC.keys.columns // KEYS
    VALUES: gl.constexpr = part_width(SPEC.values)
    VALUE_PARTS: gl.constexpr = SPEC.values.columns // VALUES
    N: gl.constexpr = SPEC.block_n
    key_rows: gl.constexpr = tile_layout(KEYS, 8, 2)
    value_rows: gl.constexpr = tile_layout(VALUES, 8, 2)
    turned: gl.constexpr = tile_layout(N, 8, 2)
    query = gl.allocate_shared_memory(
        dtype, [BUFFERS * GROUPS * KEY_PARTS, SPEC.block_m, KEYS], key_rows
    )
    keys = gl.allocate_shared_memory(dtype, [STAGES * KEY_PARTS, N, KEYS], key_rows)
    values = gl.allocate_shared_memory(dtype, [STAGES * VALUE_PARTS, VALUES, N], turned)
    stored = gl.allocate_shared_memory(dtype, [2 * VALUE_PARTS, N, VALUES], value_rows)
    landed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(landed.index(buffer), count=1)
    ones = gl.allocate_shared_memory(dtype, [8, N], turned)
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    first = gl.arange(0, 8, layout=gl.SliceLayout(1, rows))[:, None] == 0
    codes = first.to(gl.int32) * ONE + gl.zeros([8, N], gl.int32, rows)
    reinterpret(ones, gl.int8, [8, N], turned).store(codes.to(gl.int8))
    return query, keys, values, stored, landed, ones


@gluon.jit
def score_tile(memory, query_slot, stage, SPEC: gl.constexpr) -> gl.tensor:
    """Multiply the rows of a strip with the keys of a tile: `[rows, keys]`."""
    PARTS: gl.constexpr = SPEC.keys.columns // part_width(SPEC.keys)
    sums = gl.full([SPEC.block_m, SPEC.block_n], 0.0, gl.float32, score_layout(SPEC))
    for part in gl.static_range(PARTS):
        rows = memory[0].index(query_slot * PARTS + part)
        keys = memory[1].index(stage * PARTS + part).permute((1, 0))
        sums = warpgroup_mma(rows, keys, sums, use_acc=part > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _shrink_and_add(kept, shrink, sums) -> gl.tensor:
    """Multiply rows with `shrink`, and add others."""
    layout: gl.constexpr = kept.type.layout
    EIGHTS: gl.constexpr = [kept.shape[0], kept.shape[1] // 8, 4, 2]
    kept = kept.reshape(EIGHTS)
    quads: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, kept.type.layout))
    shrink = gl.convert_layout(shrink, quads, assert_trivial=True)
    added = kept * shrink[:, None, :, None] + sums.reshape(EIGHTS)
    return gl.convert_layout(added.reshape(sums.shape), layout, assert_trivial=True)


@gluon.jit
def _start_part(prob, memory, stage, PART: gl.constexpr, SPEC: gl.constexpr) -> gl.tensor:
    """Start to multiply rounded probabilities with a part of the values of a tile."""
    WIDTH: gl.constexpr = part_width(SPEC.values)
    FIRST: gl.constexpr = PART * SUM_WIDTH
    values = memory[2].index(stage * (SPEC.values.columns // WIDTH) + FIRST // WIDTH)
    values = values.slice(FIRST % WIDTH, SUM_WIDTH, dim=0).permute((1, 0))
    zeros = gl.full([SPEC.block_m, SUM_WIDTH], 0.0, gl.float32, sum_layout(SPEC))
    return warpgroup_mma(prob, values, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(prob, ones, SPEC: gl.constexpr) -> gl.tensor:
    """Start to add up rounded probabilities: column 0 has the sums of the rows, others have 0."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 32]
    )
    prob = gl.convert_layout(prob, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)
    zeros = gl.full([SPEC.block_m, 8], 0.0, gl.float32, layout)
    return warpgroup_mma(prob, ones.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_values(
    weighted, total, shrink, prob, memory, stage, WITH_LSE: gl.constexpr, SPEC: gl.constexpr
) -> gl.tuple:
    """Shrink sums of weighted values, one a part, and the denominator's shares; add a tile's.

    `prob` is `[rows, keys / 8, 4, 2]`, `shrink` `[rows, 4]`: what each thread of a quad holds. An
    LSE is that of exact probabilities. Without one the denominator is the sum of the rounded ones,
    which costs the threads nothing.
    """
    ROWS: gl.constexpr = SPEC.block_m
    PARTS: gl.constexpr = len(weighted)
    rows: gl.constexpr = total.type.layout
    if WITH_LSE:
        total = total * shrink + sums_of_rows(prob, rows)
    # Values lie in the order in which the threads hold the probabilities: no shuffle.
    prob = prob.to(gl.float8e4nv).reshape([ROWS, SPEC.block_n // 16, 2, 4, 2])
    prob = prob.permute((0, 1, 3, 2, 4)).reshape([ROWS, SPEC.block_n])
    operand: gl.constexpr = gl.DotOperandLayout(0, sum_layout(SPEC), 4)
    prob = gl.convert_layout(prob, operand, assert_trivial=True)
    started = (_start_part(prob, memory, stage, 0, SPEC),)
    added = ()
    for part in gl.static_range(PARTS):
        if part + 1 < PARTS:
            started += (_start_part(prob, memory, stage, part + 1, SPEC),)
            sums = warpgroup_mma_wait(1, deps=[started[part]])
        elif WITH_LSE:
            sums = warpgroup_mma_wait(0, deps=[started[part]])
        else:
            shares = _start_sums(prob, memory[5], SPEC)
            sums, shares = warpgroup_mma_wait(0, deps=[started[part], shares])
            shares = gl.sum(gl.sum(quads(shares), 3), 1)
            total = total * shrink + gl.convert_layout(shares, rows, assert_trivial=True)
        added += (_shrink_and_add(weighted[part], shrink, sums),)
    return added, total


@gluon.jit
def in_order(tile) -> gl.tensor:
    """A part of the weighted sums with its columns in the order of the dims, see `_transpose`."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    tile = tile.reshape([ROWS, COLUMNS // 16, 2, 8]).permute((0, 1, 3, 2))
    return tile.reshape([ROWS, COLUMNS])


@gluon.jit
def _transpose(stored, values, CHUNKS: gl.constexpr) -> None:
    """Write V `[keys, dims]` as V^T `[dims, keys]`, CHUNKS runs of keys one after the other.

    In each 16 keys the order is that in which a thread holds the scores; in each 16 dims the even
    ones come first, so that those which are stored at once lie in different banks.
    """
    N: gl.constexpr = stored.shape[0]
    D: gl.constexpr = stored.shape[1]
    RUN: gl.constexpr = N // CHUNKS
    layout: gl.constexpr = pair_layout(D // 2, RUN)
    PAIRS: gl.constexpr = [N, D // 2]
    TURNED: gl.constexpr = [D, N // 2]
    pairs = reinterpret(stored, gl.int16, PAIRS, tile_layout(D // 2, 16, 2))
    turned = reinterpret(values, gl.int16, TURNED, tile_layout(N // 2, 16, 2))
    for run in gl.static_range(CHUNKS):
        rows = pairs.slice(run * RUN, RUN, dim=0).permute((1, 0)).load(layout)
        rows = gl.inline_asm_elementwise(
            UNZIP, "=r,=r,r,r", [rows], dtype=gl.int16, is_pure=True, pack=4
        )
        rows = rows.reshape([D // 16, 8, RUN // 16, 2, 4, 2]).permute((0, 3, 1, 2, 4, 5))
        turned.slice(run * (RUN // 2), RUN // 2, dim=1).store(rows.reshape([D, RUN // 2]))


@gluon.jit
def _as_boxes(tiles, rows) -> Any:
    """Tiles of rows in shared memory as the boxes in which they are loaded."""
    BOX: gl.constexpr = rows.block_shape[1]
    SHAPE: gl.constexpr = [tiles.shape[0] * (tiles.shape[1] // BOX), 1, BOX, 1, tiles.shape[2]]
    layout: gl.constexpr = rows.layout
    return reinterpret(tiles, rows.dtype, SHAPE, layout)


@gluon.jit
def _load_box(side, COLUMNS: gl.constexpr, box, place) -> None:
    """Start to load a box of a tile, part by part, from its block, token and head."""
    rows, tiles, slot, barrier = side
    BOXES: gl.constexpr = tiles.shape[1] // rows.block_shape[1]
    PART: gl.constexpr = rows.block_shape[3]
    PARTS: gl.constexpr = COLUMNS // PART
    boxes = _as_boxes(tiles, rows)
    block, token, head = place
    for part in gl.static_range(PARTS):
        to = boxes.index((slot * PARTS + part) * BOXES + box)
        tma.async_copy_global_to_shared(rows, [block, token, head, part * PART], barrier, to)


@gluon.jit
def _load_tile(sides, COLUMNS: gl.constexpr, batch, blocks, item, tile, SPEC: gl.constexpr) -> None:
    """Start to load a tile of one side or both.

    `blocks` is what `load_block_ids` returns, where there are blocks.
    """
    for side in gl.static_range(len(sides)):
        mbarrier.expect(sides[side][3], SPEC.block_n * COLUMNS[side])
    if SPEC.block_size is None:
        place = (0, item.place + tile * SPEC.block_n, item.head)
        for side in gl.static_range(len(sides)):
            _load_box(sides[side], COLUMNS[side], 0, place)
    else:
        BOXES: gl.constexpr = SPEC.block_n // sides[0][0].block_shape[1]
        AT_ONCE: gl.constexpr = boxes_at_once(BOXES)
        token = tile * SPEC.block_n % SPEC.block_size
        for first in range(0, hide_count(BOXES, batch), AT_ONCE):
            for box in gl.static_range(AT_ONCE):
                place = (pick(blocks, first + box), token, item.head)
                for side in gl.static_range(len(sides)):
                    _load_box(sides[side], COLUMNS[side], first + box, place)


@gluon.jit
def _free_stage(pages, memory, barriers, step, STAGES: gl.constexpr) -> gl.tuple:
    """Wait until a tile's stage is free; return what is loaded of its keys, and where."""
    full, empty, _, _ = barriers
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    return pages[0], memory[1], stage, full.index(stage)


@gluon.jit
def _start_tile(
    pages,
    batch,
    blocks,
    memory,
    barriers,
    item,
    tile,
    step,
    STAGES: gl.constexpr,
    SPEC: gl.constexpr,
) -> None:
    """Start to load a tile's values; of more than two stages, its keys as well."""
    K_COLUMNS: gl.constexpr = SPEC.keys.columns
    V_COLUMNS: gl.constexpr = SPEC.values.columns
    buffer = step & 1
    values = (pages[1], memory[3], buffer, memory[4].index(buffer))
    if STAGES > 2:
        keys = _free_stage(pages, memory, barriers, step, STAGES)
        _load_tile((keys, values), (K_COLUMNS, V_COLUMNS), batch, blocks, item, tile, SPEC)
    else:
        _load_tile((values,), (V_COLUMNS,), batch, blocks, item, tile, SPEC)


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
    """Load the tiles of item `turn`, the last first, and transpose their values; return the steps.

    A tile is transposed while the next one arrives; of two stages, while its keys and the next
    one's values do. The ids of a tile's blocks are loaded a tile ahead.
    """
    N: gl.constexpr = SPEC.block_n
    K_COLUMNS: gl.constexpr = SPEC.keys.columns
    PART: gl.constexpr = part_width(SPEC.values)
    PARTS: gl.constexpr = SPEC.values.columns // PART
    tile_barriers = barriers[2]
    item = read_item(record)
    tile = item.end_tile - 1
    tiles = item.end_tile - item.first_tile
    blocks = 0
    key_blocks = 0
    if SPEC.block_size is not None:
        blocks = load_block_ids(batch, item, tile, SPEC)
    if tiles > 0:
        _start_tile(pages, batch, blocks, memory, tile_barriers, item, tile, step, STAGES, SPEC)
    load_query(query, item, turn, query_buffers(SPEC), GROUPS, SPEC)
    for back in range(1, gl.maximum(tiles, 0) + 1):
        # Reading it again is cheaper than registers.
        item = read_item(record)
        tile = item.end_tile - back
        if SPEC.block_size is not None:
            key_blocks = blocks
            blocks = load_block_ids(batch, item, tile - 1, SPEC)
        if tile > item.first_tile:
            _start_tile(
                pages, batch, blocks, memory, tile_barriers, item, tile - 1, step + 1, STAGES, SPEC
            )
        if STAGES == 2:
            keys = _free_stage(pages, memory, tile_barriers, step, STAGES)
            _load_tile((keys,), (K_COLUMNS,), batch, key_blocks, item, tile, SPEC)
        stage = step % STAGES
        buffer = step & 1
        mbarrier.wait(memory[4].index(buffer), (step >> 1) & 1)
        # Without a window all rows from the first on are seen.
        first = 0 if SPEC.window is None else item.oldest - tile * N
        for part in gl.static_range(PARTS):
            stored = memory[3].index(buffer * PARTS + part)
            clear_rows(stored, first, item.visible - tile * N)
            _transpose(stored, memory[2].index(stage * PARTS + part), 2 if PART == 128 else 1)
        fence_async_shared()
        mbarrier.arrive(tile_barriers[0].index(stage), count=1)
        step += 1
    return step
