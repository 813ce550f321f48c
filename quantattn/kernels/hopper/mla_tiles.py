"""Tiles of latent rows against query rows, on Hopper, by two warp groups that share the work.

Each group has half of the output's columns. Of two tiles, one is each group's own: it computes the
probabilities of that tile and gives them to the other group.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quantattn.kernels.hopper.memory import hide

__all__ = ["attend_tiles", "store_query", "sum_layout"]


@gluon.constexpr_function
def sum_layout(columns) -> gl.NVMMADistributedLayout:
    """Registers of products `[rows, columns]`."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def _load_part(query, starts, exists, FIRST: gl.constexpr, WIDTH: gl.constexpr) -> gl.tensor:
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    pointers = query.numbers + starts[:, None] + columns[None, :]
    return gl.load(pointers, mask=exists[:, None], other=0.0)


@gluon.jit
def _largest(rows) -> gl.tensor:
    return gl.max(gl.abs(rows.to(gl.float32)), 1)


@gluon.jit
def store_query(
    query, memory, start, query_len, head, sign, GROUP: gl.constexpr, SPEC: gl.constexpr
) -> None:
    """Store this group's half of the query rows, times `sign`, as operands.

    A bf16 row is brought into float16's range by a power of two; stores what undoes that.
    """
    halves, ropes = memory[0], memory[1]
    ROWS: gl.constexpr = SPEC.block_m // 2
    HALF: gl.constexpr = SPEC.values.width // 2
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    rows = GROUP * ROWS + gl.arange(0, ROWS, layout=layout)
    tokens = (start + rows // SPEC.group_size).to(gl.int64)
    starts = tokens * query.token_stride
    starts += (head * SPEC.group_size + rows % SPEC.group_size) * query.head_stride
    exists = rows < query_len * SPEC.group_size
    left = _load_part(query, starts, exists, 0, HALF)
    right = _load_part(query, starts, exists, HALF, HALF)
    rope = _load_part(query, starts, exists, 2 * HALF, SPEC.rope.width)
    factor = gl.full([ROWS], 1.0, gl.float32, layout)
    up = factor * sign
    if left.dtype != SPEC.compute:
        largest = gl.maximum(_largest(left), gl.maximum(_largest(right), _largest(rope)))
        exponent = largest.to(gl.int32, bitcast=True) & 0x7F800000
        exponent = gl.minimum(gl.maximum(exponent, 1 << 23), 253 << 23)
        factor = exponent.to(gl.float32, bitcast=True)
        up *= ((254 << 23) - exponent).to(gl.float32, bitcast=True)
    left = (left.to(gl.float32) * up[:, None]).to(SPEC.compute)
    right = (right.to(gl.float32) * up[:, None]).to(SPEC.compute)
    rope = (rope.to(gl.float32) * up[:, None]).to(SPEC.compute)
    halves.index(0).slice(GROUP * ROWS, ROWS, dim=0).store(left)
    halves.index(1).slice(GROUP * ROWS, ROWS, dim=0).store(right)
    ropes.slice(GROUP * ROWS, ROWS, dim=0).store(rope)
    memory[4][0].slice(GROUP * ROWS, ROWS, dim=0).store(factor)
    fence_async_shared()


@gluon.jit
def _score(memory, barriers, phase, GROUP: gl.constexpr, SPEC: gl.constexpr) -> gl.tensor:
    """Multiply the query with the keys of this group's own tile."""
    query_halves, query_ropes, halves, ropes, _ = memory
    full, rest_full, _, _ = barriers
    zeros = gl.full([SPEC.block_m, SPEC.block_n], 0.0, gl.float32, sum_layout(SPEC.block_n))
    own = hide(GROUP)
    mbarrier.wait(full.index(GROUP), phase)
    keys = halves.index(3 * own).permute((1, 0))
    sums = warpgroup_mma(query_halves.index(own), keys, zeros, use_acc=False, is_async=True)
    mbarrier.wait(rest_full.index(GROUP), phase)
    keys = halves.index(own + 1).permute((1, 0))
    sums = warpgroup_mma(query_halves.index(1 - own), keys, sums, is_async=True)
    sums = warpgroup_mma(query_ropes, ropes.index(own).permute((1, 0)), sums, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _mask(sums, first_key, positions, num_keys, SPEC: gl.constexpr) -> gl.tensor:
    layout: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    keys = (first_key + gl.arange(0, SPEC.block_n, layout=layout))[None, :]
    visible = (keys < num_keys) & (keys <= positions[:, None])
    return gl.where(visible, sums, -float("inf"))


@gluon.jit
def _shrink_to(new_largest, largest) -> gl.tuple:
    """What old sums are to be multiplied by, and a finite stand-in for the new maximum."""
    ceiling = gl.where(new_largest == -float("inf"), 0.0, new_largest)
    return gl.exp2(largest - ceiling), ceiling


@gluon.jit
def _weigh(weighted, shrink, memory, SLOT: gl.constexpr, GROUP: gl.constexpr) -> gl.tensor:
    """Shrink the weighted sums of values and add those of a tile."""
    _, _, halves, ropes, _ = memory
    layout: gl.constexpr = gl.SliceLayout(1, weighted.type.layout)
    shrink = gl.convert_layout(shrink, layout, assert_trivial=True)
    slot = hide(SLOT)
    sums = warpgroup_mma(
        ropes.index(slot),
        halves.index(2 * slot + GROUP),
        weighted * shrink[:, None],
        is_async=True,
    )
    return warpgroup_mma_wait(0, deps=[sums])


@gluon.jit
def _weigh_others(state, memory, barriers, phase, GROUP: gl.constexpr) -> gl.tuple:
    """Add the tile of the other group, which knows the maxima and denominators up to it."""
    weighted, largest, total = state
    OTHER: gl.constexpr = 1 - GROUP
    layout: gl.constexpr = largest.type.layout
    mbarrier.wait(barriers[1].index(OTHER), phase)
    pairs = memory[4][1].index(OTHER).load(gl.join(largest, total).type.layout)
    new_largest, total = pairs.split()
    new_largest = gl.convert_layout(new_largest, layout, assert_trivial=True)
    total = gl.convert_layout(total, layout, assert_trivial=True)
    shrink, _ = _shrink_to(new_largest, largest)
    weighted = _weigh(weighted, shrink, memory, OTHER, GROUP)
    mbarrier.arrive(barriers[0][3].index(OTHER), count=1)
    return weighted, new_largest, total


@gluon.jit
def attend_tiles(
    memory, barriers, step, span, rows, GROUP: gl.constexpr, SPEC: gl.constexpr
) -> gl.tuple:
    """Attend to tiles of one sequence; returns weighted sums, maxima and denominators."""
    ropes = memory[3]
    factors, stats = memory[4]
    first, tiles = span
    positions, num_keys, full_end, scale = rows
    layout: gl.constexpr = gl.SliceLayout(1, sum_layout(SPEC.block_n))
    HALF: gl.constexpr = SPEC.values.width // 2
    weighted = gl.full([SPEC.block_m, HALF], 0.0, gl.float32, sum_layout(HALF))
    largest = gl.full([SPEC.block_m], -float("inf"), gl.float32, layout)
    total = gl.full([SPEC.block_m], 0.0, gl.float32, layout)
    factor = gl.maximum(factors.load(layout) * scale, 2.0**-126)
    own = (step & 1) ^ GROUP
    for tile in range(own, tiles, 2):
        sums = _score(memory, barriers[0], ((step + tile) >> 1) & 1, GROUP, SPEC)
        key = (first + tile) * SPEC.block_n
        if key >= full_end:
            sums = _mask(sums, key, positions, num_keys, SPEC)
        tile_largest = gl.max(sums, 1) * factor
        if tile > 0:
            state = (weighted, largest, total)
            phase = ((step + tile - 1) >> 1) & 1
            weighted, largest, total = _weigh_others(state, memory, barriers, phase, GROUP)
        new_largest = gl.maximum(largest, tile_largest)
        shrink, ceiling = _shrink_to(new_largest, largest)
        prob = gl.exp2(sums * factor[:, None] - (ceiling - SPEC.headroom)[:, None])
        total = total * shrink + gl.sum(prob, 1)
        largest = new_largest
        ropes.index(GROUP).store(prob.to(SPEC.compute))
        stats.index(GROUP).store(gl.join(largest, total))
        fence_async_shared()
        mbarrier.arrive(barriers[1].index(GROUP), count=1)
        weighted = _weigh(weighted, shrink, memory, GROUP, GROUP)
        mbarrier.arrive(barriers[0][2].index(GROUP), count=1)
        mbarrier.arrive(barriers[0][3].index(GROUP), count=1)
    if ((tiles - 1) & 1) != own:
        state = (weighted, largest, total)
        phase = ((step + tiles - 1) >> 1) & 1
        weighted, largest, total = _weigh_others(state, memory, barriers, phase, GROUP)
    return weighted, largest, total
