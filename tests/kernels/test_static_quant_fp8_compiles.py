"""The kernel compiles for each architecture on a machine without a GPU, without spills."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from quantattn.kernels import static_quant_fp8 as kernel
from tests.kernels import compiling
from tests.kernels.compiling import ARCHITECTURES, fp8_conversions


def compile_for(architecture: int, *, source: str, mantissa_bits: int, width, native: bool):
    """The flat kernel where the width is None, else the one of runs."""
    constants = {"MANTISSA_BITS": mantissa_bits, "NATIVE": native}
    signature = {"out_ptr": "*u8", "input_ptr": f"*{source}", "scale_ptr": "*fp32"}
    if width is None:
        jit = kernel._quantize_flat_kernel
        constants["BLOCK"] = kernel.FLAT_TILE
        signature["num_elements"] = "i32"
        divisible = [0, 1, 2, 3]  # as in the launcher's first part
    else:
        jit = kernel._quantize_runs_kernel
        constants |= {"BLOCK_RUNS": kernel.TILE // width, "BLOCK_COLUMNS": width}
        signature |= dict.fromkeys(["num_runs", "num_groups", "width", "row_stride"], "i32")
        divisible = [0, 1, 2, 5, 6]
    places = [(place,) for place in divisible]
    return compiling.compile_for(architecture, jit, signature, constants, places)


VARIANTS = [
    pytest.param(architecture, native, id=f"sm_{architecture}-{'native' if native else 'integers'}")
    for architecture in [75, *ARCHITECTURES]
    for native in [False] + [True] * (architecture >= 89)
]


@pytest.mark.parametrize(("architecture", "native"), VARIANTS)
@pytest.mark.parametrize(
    ("source", "mantissa_bits", "width"),
    [("bf16", 3, None), ("fp16", 2, 1024), ("fp32", 3, 128)],
    ids=["bf16-e4m3-flat", "fp16-e5m2-rows", "fp32-e4m3-heads"],
)
def test_compiles_to_wide_accesses_and_exact_division(
    architecture, native, source, mantissa_bits, width
) -> None:
    options = {"source": source, "mantissa_bits": mantissa_bits, "width": width}
    compiled = compile_for(architecture, native=native, **options)
    ptx = compiled.asm["ptx"]
    assert ("fma.rn.f32" if native else "div.rn.f32") in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    conversion = f"e{7 - mantissa_bits}m{mantissa_bits}x2.f32"
    assert fp8_conversions(compiled) == ({conversion} if native else set())


@pytest.mark.parametrize("architecture", [89, 90])
@pytest.mark.parametrize("mantissa_bits", [3, 2])
def test_a_pair_of_numbers_is_one_conversion_and_never_fp16(architecture, mantissa_bits) -> None:
    compiled = compile_for(
        architecture, source="bf16", mantissa_bits=mantissa_bits, width=None, native=True
    )
    machine_code = compiled.asm["sass"]
    pairs = kernel.FLAT_TILE // (4 * 32) // 2
    assert len(re.findall(rf"F2FP\.\S*E{7 - mantissa_bits}M{mantissa_bits}", machine_code)) == pairs
    assert not re.search(r"F16|HADD2|HMUL2|F2F\b", machine_code)
