"""The kernel compiles for each architecture on a machine without a GPU, without spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from quantattn.kernels import dynamic_quant_fp8 as kernel
from tests.kernels import compiling
from tests.kernels.compiling import ARCHITECTURES, fp8_conversions


@pytest.mark.parametrize("architecture", [75, *ARCHITECTURES])
@pytest.mark.parametrize(
    ("source", "mantissa_bits", "width"),
    [("bf16", 3, 128), ("fp16", 2, 5120), ("bf16", 3, 28_672)],
    ids=["heads", "tokens", "wide tokens"],
)
def test_compiles_to_wide_accesses_and_one_rounding(
    architecture, source, mantissa_bits, width
) -> None:
    rows, columns, num_warps = kernel._block_sizes(65_536, width)
    constants = {
        "MANTISSA_BITS": mantissa_bits,
        "NATIVE": architecture >= 89,
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
        "CHUNKS": -(-width // columns),
    }
    signature = {
        "out_ptr": "*u8",
        "scales_ptr": "*fp32",
        "input_ptr": f"*{source}",
        "num_rows": "i32",
        "num_heads": "i32",
        "width": "i32",
        "token_stride": "i32",
        "head_stride": "i32",
    }
    divisible = [(place,) for place in (0, 1, 2, 5, 6, 7)]
    jit = kernel._quantize_rows_kernel
    compiled = compiling.compile_for(
        architecture, jit, signature, constants, divisible, num_warps=num_warps
    )
    ptx = compiled.asm["ptx"]
    assert (
        ptx.count("ld.global.v4.b32") * 8 * 32 * num_warps == rows * columns * constants["CHUNKS"]
    )
    assert "st.global.b8" not in ptx
    conversion = f"e{7 - mantissa_bits}m{mantissa_bits}x2.f32"
    assert fp8_conversions(compiled) == ({conversion} if architecture >= 89 else set())
