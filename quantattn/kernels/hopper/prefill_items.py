"""What the roles of a Hopper prefill CTA tell each other: items, strips, and tiles of rows.

An item is GROUPS neighbouring strips of one KV head (see `prefill_plan`) and the run of
tiles that their rows see, from the last to the first.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quantattn.kernels._attend_tiles import key_range
from quantattn.kernels.hopper.memory import reinterpret
from quantattn.kernels.hopper.prefill_plan import ENTRY, HEAD, HEADS, first_entry

__all__ = [
    "RECORDS",
    "Item",
    "Strip",
    "boxes_at_once",
    "clear_rows",
    "element",
    "hide_count",
    "load_block_ids",
    "load_query",
    "load_record",
    "load_rows",
    "new_records",
    "pick",
    "read_item",
    "read_strip",
]

RECORDS: gl.constexpr = gl.constexpr(4)
"""Items whose records are in shared memory: one that is loaded, and those still worked on."""
FIELDS: gl.constexpr = gl.constexpr(16)
CHUNK: gl.constexpr = gl.constexpr(16)
"""Rows that are cleared at once."""


class Item(NamedTuple):
    """What a CTA works on.

    Attributes:
        first_tile: First tile that a row sees.
        end_tile: End of these tiles; -1: there are no more items.
        top: Strip of the first consumer; the others have those before it.
        start: First token of the sequence.
        query_len: Its tokens.
        num_keys: Its keys.
        place: Its first key row; with blocks, its row of the block table.
        oldest: First key that a row sees.
        visible: End of the keys that a row sees.
        factor: Turns products into scores in units of log 2.
        headroom: Log 2 of the largest probability.
        v_scale: Scale of the values.
        head: KV head.
    """

    first_tile: Any
    end_tile: Any
    top: Any
    start: Any
    query_len: Any
    num_keys: Any
    place: Any
    oldest: Any
    visible: Any
    factor: Any
    headroom: Any
    v_scale: Any
    head: Any


class Strip(NamedTuple):
    """A consumer's part of an item.

    Attributes:
        first_token: Its first token in the sequence.
        num_tokens: Its tokens; none: there is no such strip.
        head: Query head.
        position: Position of its first token.
        bounds: The four bounds of `key_range`, in keys.
    """

    first_token: Any
    num_tokens: Any
    head: Any
    position: Any
    bounds: Any


@gluon.jit
def element(x, INDEX: gl.constexpr) -> gl.tensor:
    """An element of a vector of which every thread holds all: costs no instruction."""
    return gl.sum(gl.where(gl.arange(0, x.shape[0], layout=x.type.layout) == INDEX, x, 0), 0)


@gluon.jit
def new_records() -> Any:
    """Shared memory of the records of items."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return gl.allocate_shared_memory(gl.int32, [RECORDS, FIELDS], layout)


@gluon.jit
def load_record(plan, index, SPEC: gl.constexpr) -> gl.tensor:
    """Start to load an item, a number a thread; behind the last one, one that says so."""
    fields = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    entry = first_entry(SPEC.num_kv_heads) + index // SPEC.num_kv_heads * ENTRY
    head = HEADS - ENTRY + index % SPEC.num_kv_heads * HEAD
    place = fields + gl.where(fields < ENTRY, entry, head)
    exists = (index < gl.load(plan) * SPEC.num_kv_heads) & (fields < ENTRY + HEAD)
    return gl.load(plan + place, mask=exists, other=-1)


@gluon.jit
def read_item(record) -> Item:
    """Read an item that `load_record` loaded, from shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    numbers = record.load(layout)
    return Item(
        element(numbers, 0),
        element(numbers, 1),
        element(numbers, 2),
        element(numbers, 3),
        element(numbers, 4),
        element(numbers, 5),
        element(numbers, 6),
        element(numbers, 7),
        element(numbers, 8),
        element(numbers, 9).to(gl.float32, bitcast=True),
        element(numbers, 10).to(gl.float32, bitcast=True),
        element(numbers, 11).to(gl.float32, bitcast=True),
        element(numbers, 12),
    )


@gluon.jit
def read_strip(item, GROUP: gl.constexpr, SPEC: gl.constexpr) -> Strip:
    """The strip of consumer GROUP."""
    strip = item.top - GROUP
    block = gl.maximum(strip, 0) // SPEC.group_size
    head = item.head * SPEC.group_size + gl.maximum(strip, 0) % SPEC.group_size
    first_token = block * SPEC.block_m
    num_tokens = gl.minimum(item.query_len - first_token, SPEC.block_m)
    num_tokens = gl.where(strip < 0, 0, num_tokens)
    position = item.num_keys - item.query_len + first_token
    _, first, full_first, full_end, end = key_range(
        position, position + num_tokens - 1, item.num_keys, SPEC
    )
    end = gl.where(strip < 0, first, end)
    return Strip(first_token, num_tokens, head, position, (first, full_first, full_end, end))


@gluon.jit
def load_query(
    query, item, turn, BUFFERS: gl.constexpr, GROUPS: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Start to load the query rows of all strips of item `turn`, once their buffer is free.

    `query` describes the rows, and has their shared memory and its barriers: that rows are there,
    that they may be replaced.
    """
    rows, tiles, full, empty = query
    PART: gl.constexpr = rows.block_shape[2]
    PARTS: gl.constexpr = SPEC.keys.columns // PART
    BITS: gl.constexpr = rows.dtype.primitive_bitwidth
    # Rows may have more room than they fill.
    ROOM: gl.constexpr = tiles.shape[0] * tiles.shape[2] // (BUFFERS * GROUPS * PART)
    SHAPE: gl.constexpr = [BUFFERS * GROUPS * ROOM, SPEC.block_m, 1, PART]
    boxes: gl.constexpr = rows.layout
    strips = reinterpret(tiles, rows.dtype, SHAPE, boxes)
    buffer = turn % BUFFERS
    barrier = full.index(buffer)
    mbarrier.wait(empty.index(buffer), ((turn // BUFFERS) & 1) ^ 1)
    # Behind the last item the rows have negative places, and are loaded as 0.
    mbarrier.expect(barrier, GROUPS * SPEC.block_m * SPEC.keys.columns * BITS // 8)
    for group in gl.static_range(GROUPS):
        strip = gl.maximum(item.top - group, 0)
        token = item.start + strip // SPEC.group_size * SPEC.block_m
        head = item.head * SPEC.group_size + strip % SPEC.group_size
        for part in gl.static_range(PARTS):
            slot = strips.index((buffer * GROUPS + group) * ROOM + part)
            place = [token, head, part * PART]
            tma.async_copy_global_to_shared(rows, place, barrier, slot)


@gluon.jit
def load_block_ids(batch, item, tile, SPEC: gl.constexpr) -> gl.tensor:
    """Start to load the ids of the blocks of a tile, in order one a lane, to be read by `pick`.

    0 for a block of which no row sees a key: its id may be anything.
    """
    lane = gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    first = tile * SPEC.block_n // SPEC.block_size
    entry = first + lane
    is_seen = (entry >= 0) & (entry * SPEC.block_size < item.visible)
    if SPEC.window is not None:
        is_seen = is_seen & ((entry + 1) * SPEC.block_size > item.oldest)
    # What all lanes share stays in uniform registers: consumers have none to spare.
    table = batch.block_table + item.place.to(gl.int64) * batch.table_stride + first
    return gl.load(table + lane, mask=is_seen, other=0)


@gluon.jit
def pick(numbers, lane) -> gl.tensor:
    """What a lane holds, where each holds a number of its own."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
        "=r,r,r",
        [numbers, lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def boxes_at_once(count) -> int:
    """How many of a tile's boxes a turn of a loop loads: with more of them it lacks registers."""
    return 2 if count > 2 else 1


@gluon.jit
def hide_count(COUNT: gl.constexpr, batch) -> gl.tensor:
    """A number of boxes, which the compiler must not know: it would unroll the loop over them.

    It depends on an argument of the kernel alone, so a loop counts in uniform registers: consumers
    have no others to spare.
    """
    return gl.minimum(COUNT, COUNT + batch.table_stride)


@gluon.jit
def load_rows(
    rows, boxes, first_box, barrier, batch, item, tile, COLUMN: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Start to load PART columns of a tile of rows, a box of one block after the other.

    Args:
        rows: Describes the rows `[blocks, tokens, heads, width]`, which are loaded in boxes.
        boxes: Shared memory as boxes.
        first_box: The tile's first.
        barrier: Told of the bytes that have arrived.
        batch: See `Batch`.
        item: What the tile belongs to.
        tile: Which tile of the sequence.
        COLUMN: First column.
        SPEC: See Spec.
    """
    if SPEC.block_size is None:
        place = [0, item.place + tile * SPEC.block_n, item.head, COLUMN]
        tma.async_copy_global_to_shared(rows, place, barrier, boxes.index(first_box))
    else:
        BOXES: gl.constexpr = SPEC.block_n // rows.block_shape[1]
        token = tile * SPEC.block_n % SPEC.block_size
        blocks = load_block_ids(batch, item, tile, SPEC)
        AT_ONCE: gl.constexpr = boxes_at_once(BOXES)
        for first in range(0, hide_count(BOXES, batch), AT_ONCE):
            for box in gl.static_range(AT_ONCE):
                place = [pick(blocks, first + box), token, item.head, COLUMN]
                to = boxes.index(first_box + first + box)
                tma.async_copy_global_to_shared(rows, place, barrier, to)


@gluon.jit
def clear_rows(tile, first, end) -> None:
    """Put 0 into the rows of a tile of codes before `first` and from `end` on.

    Bytes where no key is stored may be NaN, which no probability of 0 undoes.
    """
    ROWS: gl.constexpr = tile.shape[0]
    for chunk in range(end // CHUNK, ROWS // CHUNK):
        _clear_chunk(tile, chunk, first, end)
    for chunk in range((first + CHUNK - 1) // CHUNK):
        _clear_chunk(tile, chunk, first, end)


@gluon.jit
def _clear_chunk(tile, chunk, first, end) -> None:
    ROWS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    lanes: gl.constexpr = min(32, WIDTH // 4)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])
    CHUNKS: gl.constexpr = [ROWS // CHUNK, CHUNK, WIDTH]
    tile_rows: gl.constexpr = tile.layout
    part = reinterpret(tile, gl.int8, CHUNKS, tile_rows).index(chunk)
    rows = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    stored = ((rows >= first) & (rows < end))[:, None]
    part.store(gl.where(stored, part.load(layout), 0))
