"""The loading role of a Hopper prefill whose products are of bf16 or fp16 numbers.

Tiles of numbers are loaded to where the products read them; tiles of codes beside, and converted.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quantattn.kernels.hopper.memory import reinterpret, tile_layout
from quantattn.kernels.hopper.prefill_items import (
    load_rows,
    read_item,
)
from quantattn.kernels.hopper.prefill_numbers import (
    store_row_scales,
    stored_width,
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
    PARTS: gl.constexpr = SIDE.columns // PART
    BOX: gl.constexpr = rows.block_shape[1]
    BOXES: gl.constexpr = SPEC.block_n // BOX
    COUNT: gl.constexpr = tiles.shape[0] * tiles.shape[1] * tiles.shape[2] // (BOX * PART)
    SHAPE: gl.constexpr = [COUNT, 1, BOX, 1, PART]
    layout: gl.constexpr = rows.layout
    boxes = reinterpret(tiles, rows.dtype, SHAPE, layout)
    for part in gl.static_range(PARTS):
        first = (index * PARTS + part) * BOXES
        load_rows(rows, boxes, first, barrier, batch, item, tile, part * PART, SPEC)


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
def _convert_side(codes, numbers, stage, SIDE: gl.constexpr) -> None:
    WIDTH: gl.constexpr = stored_width(SIDE)
    for part in gl.static_range(SIDE.columns // WIDTH):
        columns = numbers.index(stage).slice(part * WIDTH, WIDTH, dim=1)
        _convert(codes.index(part), columns)
    # Products read the numbers, and loads write the next codes, by another way to this memory.
    fence_async_shared()


@gluon.jit
def _load_row_scales(numbers, batch, item, tile, SPEC: gl.constexpr) -> gl.tuple:
    """Load the scales of a tile's K rows and V rows; 0 for rows that no query sees."""
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
    return k_scale, gl.load(values + place, mask=seen, other=0.0)


@gluon.jit
def _convert_tiles(
    pages, batch, memory, barriers, record, step, STAGES: gl.constexpr, SPEC: gl.constexpr
) -> Any:
    K_ROWS: gl.constexpr = SPEC.keys
    V_ROWS: gl.constexpr = SPEC.values
    keys, values = pages[0], pages[1]
    _, key_numbers, value_numbers, landed, value_codes, key_codes = memory[:6]
    keys_full, keys_empty, full, empty = barriers[2]
    item = read_item(record)
    tiles = item.end_tile - item.first_tile
    for back in range(gl.where(tiles > 0, tiles + 1, 0)):
        stage = step % STAGES
        parity = (step // STAGES) & 1
        if back > 0:
            mbarrier.wait(keys_empty.index(stage), parity ^ 1)
            if SPEC.has_row_scales:
                mbarrier.wait(empty.index(stage), parity ^ 1)
                item = read_item(record)
                k_scale, v_scale = _load_row_scales(
                    pages[2], batch, item, item.end_tile - back, SPEC
                )
                store_row_scales(memory, stage, k_scale, v_scale, STAGES)
            mbarrier.wait(landed.index(0), step & 1)
            _convert_side(key_codes, key_numbers, stage, K_ROWS)
            mbarrier.arrive(keys_full.index(stage), count=1)
        # Reading it again is cheaper than registers that outlast a conversion.
        item = read_item(record)
        tile = item.end_tile - 1 - back
        if tile >= item.first_tile:
            mbarrier.expect(landed.index(0), SPEC.block_n * SPEC.keys.columns)
            _start_load(keys, key_codes, 0, landed.index(0), batch, item, tile, K_ROWS, SPEC)
        if back > 0:
            if not SPEC.has_row_scales:
                mbarrier.wait(empty.index(stage), parity ^ 1)
            mbarrier.wait(landed.index(1), step & 1)
            _clear_unseen(value_codes, 0, SPEC.values.columns, item, tile + 1, SPEC)
            _convert_side(value_codes, value_numbers, stage, V_ROWS)
            mbarrier.arrive(full.index(stage), count=1)
            step += 1
        item = read_item(record)
        tile = item.end_tile - 1 - back
        if tile >= item.first_tile:
            mbarrier.expect(landed.index(1), SPEC.block_n * SPEC.values.columns)
            _start_load(values, value_codes, 0, landed.index(1), batch, item, tile, V_ROWS, SPEC)
    return step


@gluon.jit
def _load_tiles(
    pages, batch, memory, barriers, record, turn, step, STAGES: gl.constexpr, SPEC: gl.constexpr
) -> Any:
    K_ROWS: gl.constexpr = SPEC.keys
    V_ROWS: gl.constexpr = SPEC.values
    N: gl.constexpr = SPEC.block_n
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
    for back in range(gl.where(tiles > 0, tiles + 1, 0)):
        item = read_item(record)
        tile = item.end_tile - 1 - back
        stage = step % STAGES
        parity = ((step // STAGES) & 1) ^ 1
        if tile >= item.first_tile:
            barrier = keys_full.index(stage)
            mbarrier.wait(keys_empty.index(stage), parity)
            mbarrier.expect(barrier, 2 * N * K_ROWS.columns)
            _start_load(keys, key_numbers, stage, barrier, batch, item, tile, K_ROWS, SPEC)
        is_cut = back == 1
        place = STAGES
        if SPEC.window is not None:
            place = gl.where(back == 1, STAGES, STAGES + 1)
            is_cut = is_cut | (tile < item.first_tile)
        if is_cut:
            before = (step - 1) % STAGES
            mbarrier.wait(full.index(place), turn & 1)
            _clear_unseen(value_numbers, before, 2 * V_ROWS.columns, item, tile + 1, SPEC)
            fence_async_shared()
            mbarrier.arrive(full.index(before), count=1)
        if tile >= item.first_tile:
            place = gl.where(back == 0, STAGES, stage)
            if SPEC.window is not None:
                place = gl.where((tile == item.first_tile) & (back > 0), STAGES + 1, place)
            barrier = full.index(place)
            mbarrier.wait(empty.index(stage), parity)
            mbarrier.expect(barrier, 2 * N * V_ROWS.columns)
            _start_load(values, value_numbers, stage, barrier, batch, item, tile, V_ROWS, SPEC)
            step += 1
    return step


@gluon.jit
def produce_tiles(
    pages, batch, memory, barriers, record, turn, step, STAGES: gl.constexpr, SPEC: gl.constexpr
) -> Any:
    """Load the tiles of item `turn`, the last first, and convert codes; return the steps."""
    if SPEC.codes is None:
        return _load_tiles(pages, batch, memory, barriers, record, turn, step, STAGES, SPEC)
    else:
        return _convert_tiles(pages, batch, memory, barriers, record, step, STAGES, SPEC)
