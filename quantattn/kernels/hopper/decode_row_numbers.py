"""The float32 numbers of a tile of K and V rows in shared memory: scales, and offsets of int4."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantattn.kernels.hopper.decode_terms import powers_of_two, sum_layout
from quantattn.kernels.hopper.memory import reinterpret

__all__ = ["box_width", "load_row_numbers", "numbers_of_row"]


@gluon.constexpr_function
def numbers_of_row(SPEC) -> int:
    """Numbers that a K row or a V row has; 0 where the layer has its scales."""
    if not SPEC.has_row_scales:
        return 0
    return 2 if SPEC.codes == "int4" else 1


@gluon.constexpr_function
def box_width(SPEC) -> int:
    """Keys that are loaded at once."""
    return int(min(SPEC.block_size, SPEC.block_n))


@gluon.constexpr_function
def _number_layout(SPEC) -> gl.DistributedLinearLayout:
    """Registers of one number of all keys, by box; the keys of a thread are those of its scores."""
    box = box_width(SPEC)
    bases = [(8, *powers_of_two(64, SPEC.block_n)), (0, 0, 1, 2, 4), (16, 32)]
    registers, lanes, warps = ([[i // box, 0, i % box] for i in keys] for keys in bases)
    return gl.DistributedLinearLayout(
        reg_bases=registers,
        lane_bases=lanes,
        warp_bases=warps,
        block_bases=[],
        shape=[SPEC.block_n // box, 1, box],
    )


@gluon.jit
def load_row_numbers(number_boxes, slot, STAGES: gl.constexpr, SPEC: gl.constexpr) -> gl.tuple:
    """Load the scales of the K rows and of the V rows of a tile; of int4, then their offsets."""
    COUNT: gl.constexpr = numbers_of_row(SPEC)
    BOX: gl.constexpr = box_width(SPEC)
    SHAPE: gl.constexpr = [STAGES, SPEC.block_n // BOX, 2 * COUNT, BOX]
    by_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    boxes = reinterpret(number_boxes, gl.float32, SHAPE, by_order).index(slot)
    layout: gl.constexpr = gl.SliceLayout(1, sum_layout(SPEC.block_n, SPEC.block_m))
    loaded = ()
    for part in gl.static_range(COUNT):
        for side in gl.static_range(2):
            numbers = boxes.slice(side * COUNT + part, 1, dim=1).load(_number_layout(SPEC))
            numbers = numbers.reshape([SPEC.block_n])
            loaded += (gl.convert_layout(numbers, layout, assert_trivial=True),)
    return loaded
