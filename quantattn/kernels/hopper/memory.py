"""Shared memory of Hopper kernels: how tiles lie in it, and other views of them."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

__all__ = ["hide", "reinterpret", "tile_layout", "wait_for"]


@gluon.constexpr_function
def tile_layout(width, bits, rank) -> gl.NVMMASharedLayout:
    """Shared memory of rows of `width` numbers of so many bits, in `rank` dimensions."""
    return gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, width * bits // 8), element_bitwidth=bits, rank=rank
    )


@gluon.jit
def reinterpret(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr) -> Any:
    """The same bytes of shared memory as a tile of another type, shape and layout."""
    return tile._reinterpret(dtype, shape, layout)  # noqa: SLF001 - Gluon has no public form


@gluon.jit
def wait_for(products) -> gl.tuple:
    """Wait for all products, those of this tuple among them."""
    if len(products) == 1:
        return (warpgroup_mma_wait(0, deps=products),)
    else:
        return warpgroup_mma_wait(0, deps=products)


@gluon.jit
def hide(number) -> gl.tensor:
    """The same number, of which the compiler knows nothing.

    What depends on it stays where it is used. Descriptors and addresses that no loop changes would
    be computed ahead, and kept in local memory where registers are few.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )
