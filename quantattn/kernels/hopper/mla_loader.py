"""The loading role of a Hopper MLA CTA: one warp group that brings latent rows to shared memory.

FP8 codes become float16 numbers on the way, through registers; numbers are copied as they are.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from quantattn.kernels.hopper.memory import reinterpret, tile_layout
from quantattn.kernels.hopper.schedule import sequence_tiles

__all__ = ["load_latents"]


# Four codes to two pairs of float16 numbers.
CONVERT_E4M3: gl.constexpr = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
CONVERT_E5M2: gl.constexpr = gl.constexpr(CONVERT_E4M3.value.replace("e4m3", "e5m2"))


@gluon.constexpr_function
def words_layout() -> gl.BlockedLayout:
    """Registers of rows of words: 16 bytes a thread, which meet no bank of memory twice."""
    return gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])


@gluon.jit
def _positions(tile, SPEC: gl.constexpr) -> gl.tensor:
    layout: gl.constexpr = gl.SliceLayout(1, words_layout())
    return tile * SPEC.block_n + gl.arange(0, SPEC.block_n, layout=layout)


@gluon.jit
def _load_blocks(table, tile, num_keys, SPEC: gl.constexpr) -> gl.tensor:
    """Load the block id of each row of a tile; ids behind the last key may be anything."""
    positions = _positions(tile, SPEC)
    return gl.load(table + positions // SPEC.block_size, mask=positions < num_keys, other=0)


@gluon.jit
def _find_rows(keys, blocks, tile, SPEC: gl.constexpr) -> gl.tensor:
    """Pointers to the rows of a tile, as words of 32 bits."""
    offsets = _positions(tile, SPEC) % SPEC.block_size * SPEC.keys.token_stride
    rows = keys.codes + (blocks.to(gl.int64) * keys.block_stride + offsets)
    return rows.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _pointers(rows, first, COUNT: gl.constexpr) -> gl.tensor:
    words = first + gl.arange(0, COUNT, layout=gl.SliceLayout(0, words_layout()))
    return rows[:, None] + words[None, :]


@gluon.jit
def _store(tile, codes, SPEC: gl.constexpr) -> None:
    """Store words of four codes as numbers."""
    CONVERT: gl.constexpr = CONVERT_E4M3 if SPEC.codes == "e4m3" else CONVERT_E5M2
    low, high = gl.inline_asm_elementwise(
        CONVERT, "=r,=r,r", [codes], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    SHAPE: gl.constexpr = [codes.shape[0], 2 * codes.shape[1]]
    words = reinterpret(tile, gl.int32, SHAPE, tile_layout(SHAPE[1], 32, 2))
    words.store(gl.join(low, high).reshape(SHAPE))


@gluon.jit
def _load_own(rows, stored, slot, SPEC: gl.constexpr) -> gl.tensor:
    """Load the half of a tile that the values of its own group are in."""
    HALF: gl.constexpr = SPEC.values.width // 8
    return gl.load(_pointers(rows, slot * HALF, HALF), mask=stored[:, None], other=0)


@gluon.jit
def _load_rest(rows, stored, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Load the other half and the rotated part."""
    HALF: gl.constexpr = SPEC.values.width // 8
    mask = stored[:, None]
    rest = gl.load(_pointers(rows, HALF - slot * HALF, HALF), mask=mask, other=0)
    rope = gl.load(_pointers(rows, 2 * HALF, SPEC.rope.width // 4), mask=mask, other=0)
    return rest, rope


@gluon.jit
def _convert_tiles(
    keys, table, first, end, num_keys, step, memory, barriers, SPEC: gl.constexpr
) -> None:
    """Bring tiles of FP8 codes as numbers, each part on its way while the one before is stored."""
    halves, ropes = memory[2], memory[3]
    full, rest_full, empty, rest_empty = barriers[0]
    blocks = _load_blocks(table, first, num_keys, SPEC)
    rows = _find_rows(keys, blocks, first, SPEC)
    stored = _positions(first, SPEC) < num_keys
    own = _load_own(rows, stored, step & 1, SPEC)
    rest, rope = _load_rest(rows, stored, step & 1, SPEC)
    blocks = _load_blocks(table, first + 1, num_keys, SPEC)
    for tile in range(first, end):
        slot = step & 1
        phase = ((step >> 1) & 1) ^ 1
        rows = _find_rows(keys, blocks, tile + 1, SPEC)
        stored = _positions(tile + 1, SPEC) < num_keys
        mbarrier.wait(empty.index(slot), phase)
        _store(halves.index(3 * slot), own, SPEC)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        own = _load_own(rows, stored, 1 - slot, SPEC)
        blocks = _load_blocks(table, tile + 2, num_keys, SPEC)
        mbarrier.wait(rest_empty.index(slot), phase)
        _store(halves.index(slot + 1), rest, SPEC)
        _store(ropes.index(slot), rope, SPEC)
        fence_async_shared()
        mbarrier.arrive(rest_full.index(slot), count=1)
        rest, rope = _load_rest(rows, stored, 1 - slot, SPEC)
        step += 1


@gluon.jit
def _copy_tiles(
    keys, table, first, end, num_keys, step, memory, barriers, SPEC: gl.constexpr
) -> None:
    """Copy tiles of numbers, each part to where the one before it was read."""
    HALF: gl.constexpr = SPEC.values.width // 4
    SHAPE: gl.constexpr = [4, SPEC.block_n, HALF]
    ROPE: gl.constexpr = SPEC.rope.width // 2
    ROPE_SHAPE: gl.constexpr = [2, SPEC.block_n, ROPE]
    halves = reinterpret(memory[2], gl.int32, SHAPE, tile_layout(HALF, 32, 2))
    ropes = reinterpret(memory[3], gl.int32, ROPE_SHAPE, tile_layout(ROPE, 32, 2))
    full, rest_full, empty, rest_empty = barriers[0]
    copy: gl.constexpr = async_copy.async_copy_global_to_shared
    blocks = _load_blocks(table, first, num_keys, SPEC)
    for tile in range(first, end):
        slot = step & 1
        phase = ((step >> 1) & 1) ^ 1
        rows = _find_rows(keys, blocks, tile, SPEC)
        mask = (_positions(tile, SPEC) < num_keys)[:, None]
        blocks = _load_blocks(table, tile + 1, num_keys, SPEC)
        mbarrier.wait(empty.index(slot), phase)
        copy(halves.index(3 * slot), _pointers(rows, slot * HALF, HALF), mask=mask)
        async_copy.commit_group()
        mbarrier.wait(rest_empty.index(slot), phase)
        copy(halves.index(slot + 1), _pointers(rows, HALF - slot * HALF, HALF), mask=mask)
        copy(ropes.index(slot), _pointers(rows, 2 * HALF, ROPE), mask=mask)
        async_copy.commit_group()
        async_copy.wait_group(1)
        fence_async_shared()
        mbarrier.arrive(full.index(slot), count=1)
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(rest_full.index(slot), count=1)
        step += 1


@gluon.jit
def load_latents(keys, batch, task, SPEC: gl.constexpr) -> None:
    """Load the tiles of a run, in order: of each the half first that its own group reads."""
    memory, barriers, run, decode_limit = task[0], task[1], task[3], task[4]
    sequence, skip, left = run
    step = 0
    while left > 0:
        _, _, num_keys, first, count = sequence_tiles(batch, sequence, decode_limit, SPEC)
        tiles = gl.minimum(count - skip, left)
        first += skip
        end = first + tiles
        table = batch.block_table + sequence.to(gl.int64) * batch.table_stride
        if tiles > 0:
            if SPEC.codes is None:
                _copy_tiles(keys, table, first, end, num_keys, step, memory, barriers, SPEC)
            else:
                _convert_tiles(keys, table, first, end, num_keys, step, memory, barriers, SPEC)
        step += tiles
        left -= tiles
        skip = 0
        sequence += 1
