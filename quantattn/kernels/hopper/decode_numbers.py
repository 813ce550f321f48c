"""A tile of bf16 or fp16 keys and values as operands of Hopper's tensor cores.

Query, keys and values are multiplied as they are, all from shared memory; probabilities are rounded
to the same type.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from quantattn.kernels.hopper.memory import wait_for

__all__ = ["add_values", "clear_values", "score_tile", "store_query", "sum_layout"]

PART: gl.constexpr = gl.constexpr(64)
"""Dims that lie side by side in a tile of keys or values: no more can be swizzled."""


@gluon.constexpr_function
def sum_layout(height, columns) -> gl.NVMMADistributedLayout:
    """Registers of products `[height, columns]`."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def store_query(query_tile, rows, sign) -> gl.tensor:
    """Store query rows times `sign`; returns what each row must be multiplied by."""
    query_tile.store((rows * sign).to(query_tile.dtype))
    fence_async_shared()
    return gl.full([rows.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, rows.type.layout))


@gluon.jit
def score_tile(query_tile, key_tiles, value_tiles, slot, SPEC: gl.constexpr) -> gl.tuple:
    """Multiply the keys of a tile with the query rows.

    Returns:
        The products `[keys, rows]`, and the values for `add_values`.
    """
    PARTS: gl.constexpr = SPEC.keys.width // PART
    layout: gl.constexpr = sum_layout(SPEC.block_n, SPEC.block_m)
    sums = gl.full([SPEC.block_n, SPEC.block_m], 0.0, gl.float32, layout)
    values = ()
    for part in gl.static_range(PARTS):
        query = query_tile.slice(part * PART, PART, dim=1).permute((1, 0))
        sums = warpgroup_mma(
            key_tiles.index(slot * PARTS + part), query, sums, use_acc=part > 0, is_async=True
        )
        values += (value_tiles.index(slot * PARTS + part),)
    return wait_for((sums,))[0], values


@gluon.jit
def clear_values(values, first_key, oldest, num_keys, SPEC: gl.constexpr) -> None:
    """Put 0 where no key is stored: numbers there may be NaN, which no probability of 0 undoes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = first_key + gl.arange(0, SPEC.block_n, layout=gl.SliceLayout(1, layout))
    stored = ((keys < num_keys) & (keys >= oldest))[:, None]
    for part in gl.static_range(len(values)):
        values[part].store(gl.where(stored, values[part].load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def add_values(weighted, shrink, values, prob, prob_tile, SPEC: gl.constexpr) -> gl.tuple:
    """Shrink sums of weighted values, one a part, and add the values of a tile."""
    prob_tile.permute((1, 0)).store(prob.to(prob_tile.dtype))
    fence_async_shared()
    layout: gl.constexpr = weighted[0].type.layout
    shrink = gl.convert_layout(shrink, gl.SliceLayout(0, layout), assert_trivial=True)[None, :]
    added = ()
    for part in gl.static_range(len(values)):
        rows = values[part].permute((1, 0))
        sums = weighted[part] * shrink
        added += (warpgroup_mma(rows, prob_tile.permute((1, 0)), sums, is_async=True),)
    return wait_for(added)
