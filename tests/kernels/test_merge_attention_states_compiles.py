"""The kernel compiles for each architecture on a machine without a GPU, without spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton.language as tl

from quantattn.kernels import merge_attention_states as kernel
from tests.kernels import compiling
from tests.kernels.compiling import ARCHITECTURES, fp8_conversions


@pytest.mark.parametrize("architecture", [75, *ARCHITECTURES])
def test_compiles_to_wide_accesses_and_one_rounding(architecture) -> None:
    constants = {
        "NUM_HEADS": 40,
        "HEAD_DIM": 128,
        "GROUP_SIZE": 128,
        "DTYPE": tl.bfloat16,
        "ROUND_THROUGH": True,
        "NATIVE": architecture >= 89,
        "BLOCK_HEADS": kernel.TILE // 128,
        "BLOCK_D": 128,
    }
    signature = {
        "out_ptr": "*u8",
        "lse_ptr": "*fp32",
        "out_a_ptr": "*bf16",
        "lse_a_ptr": "*fp32",
        "out_b_ptr": "*bf16",
        "lse_b_ptr": "*fp32",
        "scale_ptr": "*fp32",
        **{f"{side}_strides": ("i32", "i32") for side in ("out_a", "lse_a", "out_b", "lse_b")},
    }
    divisible = [(place,) for place in range(7)]
    divisible += [(place, part) for place in (7, 9) for part in (0, 1)]
    compiled = compiling.compile_for(
        architecture, kernel._merge_kernel, signature, constants, divisible
    )
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert fp8_conversions(compiled) == ({"e4m3x2.f32"} if architecture >= 89 else set())
