"""The kernel compiles for each architecture on a machine without a GPU, without spills."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from quantattn.kernels import static_quant_fp8 as kernel
from tests.kernels import compiling
from tests.kernels.compiling import ARCHITECTURES, spilled_bytes


def compile_for(architecture: int, *, source: str, group_size, mantissa_bits: int, native: bool):
    constants = {
        "GROUP_SIZE": group_size,
        "MANTISSA_BITS": mantissa_bits,
        "NATIVE": native,
        "BLOCK_ROWS": 1,
        "BLOCK_COLUMNS": kernel.TILE,
    }
    signature = {
        "out_ptr": "*u8",
        "input_ptr": f"*{source}",
        "scale_ptr": "*fp32",
        "num_rows": "i32",
        "num_columns": "i32",
        "input_row_stride": "i32",
    }
    divisible = [(place,) for place in (0, 1, 2, 4, 5)]
    jit = kernel._quantize_rows_kernel
    return compiling.compile_for(architecture, jit, signature, constants, divisible)


def compile_flat_for(architecture: int, *, source: str, mantissa_bits: int, native: bool):
    constants = {"MANTISSA_BITS": mantissa_bits, "NATIVE": native, "BLOCK": kernel.TILE}
    signature = {
        "out_ptr": "*u8",
        "input_ptr": f"*{source}",
        "scale_ptr": "*fp32",
        "num_elements": "i32",
    }
    jit = kernel._quantize_flat_kernel
    divisible = [(0,), (1,), (2,), (3,)]  # the launcher's parts have multiples of 16, but the last
    return compiling.compile_for(architecture, jit, signature, constants, divisible)


def variants():
    for architecture in ARCHITECTURES:
        for native in [False] + [True] * (architecture >= 90):
            for mantissa_bits in (3, 2):
                yield pytest.param(
                    architecture,
                    mantissa_bits,
                    native,
                    id=f"sm_{architecture}-e{7 - mantissa_bits}m{mantissa_bits}-"
                    + ("native" if native else "integers"),
                )


@pytest.mark.parametrize(("architecture", "mantissa_bits", "native"), list(variants()))
@pytest.mark.parametrize(
    ("source", "group_size"), [("bf16", "flat"), ("fp16", None), ("fp32", 128)]
)
def test_compiles_to_wide_accesses_and_exact_division(
    architecture, mantissa_bits, native, source, group_size, tmp_path
) -> None:
    options = {"source": source, "mantissa_bits": mantissa_bits, "native": native}
    if group_size == "flat":
        compiled = compile_flat_for(architecture, **options)
    else:
        compiled = compile_for(architecture, group_size=group_size, **options)
    ptx = compiled.asm["ptx"]
    assert ("fma.rn.f32" if native else "div.rn.f32") in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    conversions = set(re.findall(r"cvt\.rn\.satfinite\.(e\dm\d)x2\.f32", ptx))
    assert conversions == ({f"e{7 - mantissa_bits}m{mantissa_bits}"} if native else set())
    assert spilled_bytes(ptx, tmp_path) == 0
