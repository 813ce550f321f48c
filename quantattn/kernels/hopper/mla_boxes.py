"""The loading role of a Hopper MLA CTA for few rows: one warp that fetches boxes of latent rows."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quantattn.kernels.hopper.decode_loader import element
from quantattn.kernels.hopper.memory import reinterpret, tile_layout
from quantattn.kernels.hopper.schedule import sequence_tiles

__all__ = ["PART", "load_latent_boxes"]

PART: gl.constexpr = gl.constexpr(128)
"""Dims of a part of the latent: as many as can be swizzled."""


@gluon.jit
def load_latent_boxes(
    latent_pages, rope_pages, batch, task, STAGES: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Load the tiles of a run, in order, a box of one page after the other."""
    memory, barriers, run, decode_limit = task[0], task[1], task[3], task[4]
    full, empty = barriers
    dtype: gl.constexpr = latent_pages.dtype
    PARTS: gl.constexpr = SPEC.values.width // PART
    ROPE: gl.constexpr = SPEC.rope.width
    BOX: gl.constexpr = min(SPEC.block_size, SPEC.block_n)
    BOXES: gl.constexpr = SPEC.block_n // BOX
    TILES: gl.constexpr = SPEC.block_size // BOX
    SHAPE: gl.constexpr = [STAGES * PARTS * BOXES, 1, BOX, PART]
    ROPE_SHAPE: gl.constexpr = [STAGES * BOXES, 1, BOX, ROPE]
    latents = reinterpret(memory[2], dtype, SHAPE, tile_layout(PART, 8, 3))
    ropes = reinterpret(memory[3], dtype, ROPE_SHAPE, tile_layout(ROPE, 8, 3))
    boxes = gl.arange(0, BOXES, layout=gl.BlockedLayout([BOXES], [32], [1], [0]))
    sequence, skip, left = run
    step = 0
    while left > 0:
        _, _, num_keys, first, count = sequence_tiles(batch, sequence, decode_limit, SPEC)
        tiles = gl.minimum(count - skip, left)
        table = batch.block_table + sequence.to(gl.int64) * batch.table_stride
        latest = (num_keys - 1) // SPEC.block_size
        for tile in range(first + skip, first + skip + tiles):
            # Ids of blocks that no row sees may be anything: load one again that some row sees.
            blocks = gl.load(table + gl.minimum(tile * BOXES // TILES + boxes, latest))
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), SPEC.block_n * (SPEC.values.width + ROPE))
            for box in gl.static_range(BOXES):
                block = element(blocks, box)
                row = tile % TILES * BOX
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        latent_pages,
                        [block, row, part * PART],
                        full.index(slot),
                        latents.index((slot * PARTS + part) * BOXES + box),
                    )
                tma.async_copy_global_to_shared(
                    rope_pages,
                    [block, row, SPEC.values.width],
                    full.index(slot),
                    ropes.index(slot * BOXES + box),
                )
            step += 1
        left -= tiles
        skip = 0
        sequence += 1
