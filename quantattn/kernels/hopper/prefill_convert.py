"""The loading role of a Hopper prefill whose products are of bf16 or fp16 numbers.

Tiles of numbers are loaded to where the products read them; tiles of codes beside, and converted.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quantattn.kernels.hopper import prefill_int4 as int4
from quantattn.kernels.hopper.memory import reinterpret, tile_layout
from quantattn.kernels.hopper.prefill_items import (
    load_block_ids,
    load_query,
    load_rows,
    pick,
    read_item,
)
from quantattn.kernels.hopper.prefill_numbers import (
    code_columns,
    store_row_numbers,
)

__all__ = ["produce_tiles"]

AT_ONCE: gl.constexpr = gl.constexpr(2048)
"""Codes that are converted at once: 16 a thread."""
CLEARED: gl.constexpr = gl.constexpr(16)
"""Rows that are cleared at once."""
LINE: gl.constexpr = gl.constexpr(128)
"""Bytes of a row that lie side by side in a tile."""


@gluon.constexpr_function
def code_layout(width) -> gl.BlockedLayout:
    """Registers of a tile of codes: 8 of a row a thread, which as numbers are stored at once."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.jit
def _convert(codes, numbers) -> None:
    """Write a tile of codes as numbers: a run of rows, while the next one is loaded."""
    RUN: gl.constexpr = AT_ONCE // codes.shape[1]
    RUNS: gl.constexpr = codes.shape[0] // RUN
    layout: gl.constexpr = code_layout(codes.shape[1])
    following = codes.slice(0, RUN, dim=0).load(layout)
    for run in gl.static_range(RUNS):
        tile = following
        if run + 1 < RUNS:
            following = codes.slice((run + 1) * RUN, RUN, dim=0).load(layout)
        numbers.slice(run * RUN, RUN, dim=0).store(tile.to(numbers.dtype))


@gluon.jit
def _start_load(
    rows, tiles, index, barrier, batch, item, tile, SIDE: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Start to load a tile of K rows or V rows to `tiles`, as the one with this index."""
    PART: gl.constexpr = rows.block_shape[3]
    PARTS: gl.constexpr = code_columns(SIDE, SPEC) // PART
    BOX: gl.constexpr = rows.block_shape[1]
    BOXES: gl.constexpr = SPEC.block_n // BOX
    COUNT: gl.constexpr = tiles.shape[0] * tiles.shape[1] * tiles.shape[2] // (BOX * PART)
    SHAPE: gl.constexpr = [COUNT, 1, BOX, 1, PART]
    layout: gl.constexpr = rows.layout
    boxes = reinterpret(tiles, rows.dtype, SHAPE, layout)
    mbarrier.expect(barrier, SPEC.block_n * PARTS * PART * rows.dtype.primitive_bitwidth // 8)
    for part in gl.static_range(PARTS):
        first = (index * PARTS + part) * BOXES
        load_rows(rows, boxes, first, barrier, batch, item, tile, part * PART, SPEC)


@gluon.jit
def _copy_rows(
    codes, numbers, block_stride, batch, item, tile, SIDE: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Start to copy the rows that queries see, of which each has its scale behind its codes.

    Their words begin at multiples of 4 bytes, the engine's boxes only at multiples of 16.

    Args:
        codes: Shared memory of a tile of rows; those that no query sees become 0.
        numbers: Pointer to the scale of the first row.
        block_stride: Words between two blocks.
        batch: See `Batch`.
        item: What the tile belongs to.
        tile: Which tile of the sequence.
        SIDE: See SideSpec.
        SPEC: See Spec.
    """
    PARTS: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    WORDS: gl.constexpr = codes.shape[2] // 4
    OWN: gl.constexpr = SIDE.width // (8 if SPEC.codes == "int4" else 4)
    SHAPE: gl.constexpr = [PARTS, N, WORDS]
    word_tile: gl.constexpr = tile_layout(WORDS, 32, 2)
    words_of_tile = reinterpret(codes, gl.float32, SHAPE, word_tile)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WORDS, WORDS], [4, 1], [1, 0])
    rows = tile * N + gl.arange(0, N, layout=gl.SliceLayout(1, layout))
    words = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))
    seen = (rows >= item.oldest) & (rows < item.visible)
    blocks = gl.zeros_like(rows) + load_block_ids(batch, item, tile, SPEC)
    block = pick(blocks, rows // SPEC.block_size - tile * N // SPEC.block_size)
    place = block.to(gl.int64) * block_stride + rows % SPEC.block_size * SIDE.number_token_stride
    first = numbers + item.head * SIDE.number_head_stride - OWN
    for part in gl.static_range(PARTS):
        columns = part * WORDS + words
        mask = seen[:, None] & (columns < OWN)[None, :]
        places = first + place[:, None] + columns[None, :]
        async_copy.async_copy_global_to_shared(words_of_tile.index(part), places, mask)


@gluon.jit
def _start_codes(pages, memory, batch, item, tile, SIDE: gl.constexpr, SPEC: gl.constexpr) -> None:
    """Start to load the codes of a tile of K (side 0) or V (side 1), if the item has this tile."""
    ROWS: gl.constexpr = SPEC.values if SIDE else SPEC.keys
    codes = memory[5 - SIDE]
    if SPEC.has_inline_scales:
        if tile >= item.first_tile:
            _copy_rows(codes, pages[2][SIDE], pages[2][2], batch, item, tile, ROWS, SPEC)
        async_copy.commit_group()
    else:
        barrier = memory[3].index(SIDE)
        if tile >= item.first_tile:
            _start_load(pages[SIDE], codes, 0, barrier, batch, item, tile, ROWS, SPEC)


@gluon.jit
def _wait_for_codes(memory, step, SIDE: gl.constexpr, SPEC: gl.constexpr) -> None:
    """Wait for the codes of K or V whose loading was started before the last one."""
    if SPEC.has_inline_scales:
        async_copy.wait_group(1)
    else:
        mbarrier.wait(memory[3].index(SIDE), step & 1)


@gluon.jit
def _clear_unseen(tiles, index, BYTES: gl.constexpr, item, tile, SPEC: gl.constexpr) -> None:
    """Put 0 into V rows, of so many bytes, that hold no value, or none that a row sees.

    Their numbers may be NaN, which no probability of 0 undoes.
    """
    N: gl.constexpr = SPEC.block_n
    WIDTH: gl.constexpr = min(LINE, BYTES)
    PARTS: gl.constexpr = BYTES // WIDTH
    BITS: gl.constexpr = tiles.dtype.primitive_bitwidth
    SIZE: gl.constexpr = tiles.shape[0] * tiles.shape[1] * tiles.shape[2] * BITS // 8
    SHAPE: gl.constexpr = [SIZE // (N * WIDTH), N, WIDTH // 4]
    words: gl.constexpr = tile_layout(WIDTH // 4, 32, 2)
    lines = reinterpret(tiles, gl.int32, SHAPE, words)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    first, end = item.oldest - tile * N, item.visible - tile * N
    if (first > 0) | (end < N):
        for part in gl.static_range(PARTS):
            line = lines.index(index * PARTS + part)
            for run in gl.static_range(0, N, CLEARED):
                rows = run + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, layout))
                stored = ((rows >= first) & (rows < end))[:, None]
                words_of_run = line.slice(run, CLEARED, dim=0)
                words_of_run.store(gl.where(stored, words_of_run.load(layout), 0))


@gluon.jit
def _convert_side(memory, stage, SIDE: gl.constexpr, SPEC: gl.constexpr) -> None:
    """Convert the codes of a tile of K (side 0) or V (side 1)."""
    codes, numbers = memory[5 - SIDE], memory[1 + SIDE].index(stage)
    if SPEC.codes == "int4":
        int4.convert_rows(codes.index(0), numbers, memory[8] if SIDE else None)
    else:
        PARTS: gl.constexpr = codes.shape[0]
        WIDTH: gl.constexpr = codes.shape[2]
        for part in gl.static_range(PARTS):
            columns = numbers.slice(part * WIDTH, WIDTH, dim=1)
            _convert(codes.index(part), columns)
    # Products read the numbers, and loads write the next codes, by another way to this memory.
    fence_async_shared()


@gluon.jit
def _load_row_numbers(numbers, batch, item, tile, SPEC: gl.constexpr) -> gl.tuple:
    """Load the scales of a tile's K rows and V rows, of int4 then their offsets.

    They are 0 for rows that no query sees.
    """
    N: gl.constexpr = SPEC.block_n
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rows = tile * N + gl.arange(0, N, layout=layout)
    seen = (rows >= item.oldest) & (rows < item.visible)
    table = batch.block_table + item.place.to(gl.int64) * batch.table_stride
    block = gl.load(table + rows // SPEC.block_size, mask=seen, other=0).to(gl.int64)
    keys, values, block_stride = numbers
    place = block * block_stride + rows % SPEC.block_size * SPEC.keys.number_token_stride
    place += item.head * SPEC.keys.number_head_stride
    k_scale = gl.load(keys + place, mask=seen, other=0.0)
    v_scale = gl.load(values + place, mask=seen, other=0.0)
    if SPEC.codes == "int4":
        place += SPEC.keys.offset_stride
        k_offset = gl.load(keys + place, mask=seen, other=0.0)
        return k_scale, v_scale, k_offset, gl.load(values + place, mask=seen, other=0.0)
    else:
        return k_scale, v_scale


@gluon.jit
def _convert_tiles(
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
    keys_full, keys_empty, full, empty = barriers[2]
    item = read_item(record)
    tile = item.end_tile - 1
    tiles = item.end_tile - item.first_tile
    # Behind copies of rows it would lack registers.
    if SPEC.has_inline_scales:
        load_query(query, item, turn, 1, GROUPS, SPEC)
    _start_codes(pages, memory, batch, item, tile, 0, SPEC)
    _start_codes(pages, memory, batch, item, tile, 1, SPEC)
    if not SPEC.has_inline_scales:
        load_query(query, item, turn, 1, GROUPS, SPEC)
    for back in range(1, gl.maximum(tiles, 0) + 1):
        stage = step % STAGES
        parity = (step // STAGES) & 1
        mbarrier.wait(keys_empty.index(stage), parity ^ 1)
        if SPEC.has_row_scales:
            mbarrier.wait(empty.index(stage), parity ^ 1)
            item = read_item(record)
            numbers = _load_row_numbers(pages[2], batch, item, item.end_tile - back, SPEC)
            store_row_numbers(memory, stage, numbers, STAGES, SPEC)
        _wait_for_codes(memory, step, 0, SPEC)
        _convert_side(memory, stage, 0, SPEC)
        mbarrier.arrive(keys_full.index(stage), count=1)
        # Reading it again is cheaper than registers that outlast a conversion.
        item = read_item(record)
        tile = item.end_tile - back
        _start_codes(pages, memory, batch, item, tile - 1, 0, SPEC)
        if not SPEC.has_row_scales:
            mbarrier.wait(empty.index(stage), parity ^ 1)
        _wait_for_codes(memory, step, 1, SPEC)
        # Unseen values of int4 are 0 times a code, which is finite; copied ones are 0.
        if SPEC.codes != "int4" and not SPEC.has_inline_scales:
            _clear_unseen(memory[4], 0, SPEC.values.columns, item, tile, SPEC)
        _convert_side(memory, stage, 1, SPEC)
        mbarrier.arrive(full.index(stage), count=1)
        step += 1
        item = read_item(record)
        tile = item.end_tile - back
        _start_codes(pages, memory, batch, item, tile - 1, 1, SPEC)
    return step


@gluon.jit
def _load_tiles(
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
    K_ROWS: gl.constexpr = SPEC.keys
    V_ROWS: gl.constexpr = SPEC.values
    keys, values = pages[0], pages[1]
    _, key_numbers, value_numbers = memory
    keys_full, keys_empty, full, empty = barriers[2]
    item = read_item(record)
    tiles = item.end_tile - item.first_tile
    # Values of the last tile, with a window also of the first, are complete once cleared: that they
    # have landed is told to barriers of their own, once an item.
    mbarrier.arrive(full.index(STAGES), count=1, pred=tiles < 1)
    if SPEC.window is not None:
        mbarrier.arrive(full.index(STAGES + 1), count=1, pred=tiles < 2)
    tile = item.end_tile - 1
    if tiles > 0:
        stage = step % STAGES
        parity = ((step // STAGES) & 1) ^ 1
        mbarrier.wait(keys_empty.index(stage), parity)
        barrier = keys_full.index(stage)
        _start_load(keys, key_numbers, stage, barrier, batch, item, tile, K_ROWS, SPEC)
        mbarrier.wait(empty.index(stage), parity)
        barrier = full.index(STAGES)
        _start_load(values, value_numbers, stage, barrier, batch, item, tile, V_ROWS, SPEC)
    load_query(query, item, turn, 1, GROUPS, SPEC)
    for back in range(1, gl.maximum(tiles, 0) + 1):
        item = read_item(record)
        tile = item.end_tile - back
        after = step + 1
        next_stage = after % STAGES
        parity = ((after // STAGES) & 1) ^ 1
        if tile > item.first_tile:
            mbarrier.wait(keys_empty.index(next_stage), parity)
            barrier = keys_full.index(next_stage)
            _start_load(keys, key_numbers, next_stage, barrier, batch, item, tile - 1, K_ROWS, SPEC)
        is_cut = back == 1
        place = STAGES
        if SPEC.window is not None:
            place = gl.where(back == 1, STAGES, STAGES + 1)
            is_cut = is_cut | (tile == item.first_tile)
        if is_cut:
            stage = step % STAGES
            mbarrier.wait(full.index(place), turn & 1)
            _clear_unseen(value_numbers, stage, 2 * V_ROWS.columns, item, tile, SPEC)
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)
        if tile > item.first_tile:
            place = next_stage
            if SPEC.window is not None:
                place = gl.where(tile - 1 == item.first_tile, STAGES + 1, place)
            mbarrier.wait(empty.index(next_stage), parity)
            _start_load(
                values,
                value_numbers,
                next_stage,
                full.index(place),
                batch,
                item,
                tile - 1,
                V_ROWS,
                SPEC,
            )
        step = after
    return step


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
    """Load the tiles of item `turn`, the last first, and convert codes; return the steps."""
    if SPEC.codes is None:
        return _load_tiles(
            query, pages, batch, memory, barriers, record, turn, step, STAGES, GROUPS, SPEC
        )
    else:
        return _convert_tiles(
            query, pages, batch, memory, barriers, record, turn, step, STAGES, GROUPS, SPEC
        )
