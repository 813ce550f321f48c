"""The loading role of a Hopper decode CTA: one warp that fetches tiles of keys and values."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quantattn.kernels._attend_tiles import key_range
from quantattn.kernels.hopper.decode_row_numbers import box_width, numbers_of_row
from quantattn.kernels.hopper.decode_tiles import part_columns, part_width
from quantattn.kernels.hopper.memory import reinterpret, tile_layout
from quantattn.kernels.hopper.schedule import sequence_tiles

__all__ = ["element", "load_tiles"]


@gluon.jit
def element(x, INDEX: gl.constexpr) -> gl.tensor:
    """An element of a vector of which every lane holds all: costs no instruction."""
    return gl.sum(gl.where(gl.arange(0, x.shape[0], layout=x.type.layout) == INDEX, x, 0), 0)


@gluon.jit
def load_tiles(
    pages,
    row_numbers,
    batch,
    task,
    STAGES: gl.constexpr,
    SPEC: gl.constexpr,
) -> None:
    """Load the tiles of a run, in order, a box of one page after the other."""
    memory, barriers, place, run, decode_limit = task
    full, empty = barriers
    _, head, _ = place
    PART: gl.constexpr = part_columns(SPEC)
    PARTS: gl.constexpr = SPEC.keys.width // part_width(SPEC)
    NUMBERS: gl.constexpr = numbers_of_row(SPEC)
    BOX: gl.constexpr = box_width(SPEC)
    BOXES: gl.constexpr = SPEC.block_n // BOX
    TILES: gl.constexpr = SPEC.block_size // BOX
    PITCH: gl.constexpr = SPEC.keys.token_stride
    VALUE_ROW: gl.constexpr = SPEC.block_size * SPEC.num_kv_heads * PARTS * PART // PITCH
    ROW_BYTES: gl.constexpr = PARTS * PART * pages.dtype.primitive_bitwidth // 8 + 4 * NUMBERS
    BYTES: gl.constexpr = 2 * SPEC.block_n * ROW_BYTES
    SHAPE: gl.constexpr = [STAGES * PARTS * BOXES, 1, BOX, PART]
    box_layout: gl.constexpr = tile_layout(PART, pages.dtype.primitive_bitwidth, 3)
    key_boxes = reinterpret(memory[1], pages.dtype, SHAPE, box_layout)
    value_boxes = reinterpret(memory[2], pages.dtype, SHAPE, box_layout)
    layout: gl.constexpr = gl.BlockedLayout([BOXES], [32], [1], [0])
    boxes = gl.arange(0, BOXES, layout=layout)
    head_row = head * SPEC.keys.head_stride // PITCH
    head_column = head * SPEC.keys.head_stride % PITCH
    sequence, skip, left = run
    step = 0
    _, query_len, num_keys, first, count = sequence_tiles(batch, sequence, decode_limit, SPEC)
    while left > 0:
        _, next_len, next_keys, next_first, next_count = sequence_tiles(
            batch, sequence + 1, decode_limit, SPEC
        )
        tiles = gl.minimum(count - skip, left)
        table = batch.block_table + sequence.to(gl.int64) * batch.table_stride
        oldest, _, _, _, _ = key_range(num_keys - query_len, num_keys - 1, num_keys, SPEC)
        oldest = oldest // SPEC.block_size
        latest = (num_keys - 1) // SPEC.block_size
        for tile in range(first + skip, first + skip + tiles):
            # Ids of blocks that no row sees may be anything: load one again that some row sees.
            entry = gl.maximum(gl.minimum(tile * BOXES // TILES + boxes, latest), oldest)
            blocks = gl.load(table + entry)
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), BYTES)
            for box in gl.static_range(BOXES):
                block = element(blocks, box)
                row = head_row + tile % TILES * BOX
                if NUMBERS > 0:
                    tma.async_copy_global_to_shared(
                        row_numbers,
                        [block, 0, head * NUMBERS, tile % TILES * BOX],
                        full.index(slot),
                        memory[4].index(slot * BOXES + box),
                    )
                for part in gl.static_range(PARTS):
                    at = (slot * PARTS + part) * BOXES + box
                    column = head_column + part * PART
                    tma.async_copy_global_to_shared(
                        pages, [block, row, column], full.index(slot), key_boxes.index(at)
                    )
                    tma.async_copy_global_to_shared(
                        pages,
                        [block, VALUE_ROW + row, column],
                        full.index(slot),
                        value_boxes.index(at),
                    )
            step += 1
        left -= tiles
        skip = 0
        sequence += 1
        query_len, num_keys, first, count = next_len, next_keys, next_first, next_count
