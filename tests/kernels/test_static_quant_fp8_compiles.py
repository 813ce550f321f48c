"""The kernel compiles for each architecture on a machine without a GPU, without spills."""

from __future__ import annotations

import re
import subprocess

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from quantattn.kernels import static_quant_fp8 as kernel  # noqa: E402

ARCHITECTURES = [80, 89, 90, 100, 120]


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
        **dict.fromkeys(constants, "constexpr"),
    }
    divisible = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 4, 5)}
    ast = ASTSource(kernel._static_quant_fp8_kernel, signature, constants, divisible)
    return triton.compile(ast, target=GPUTarget("cuda", architecture, 32))


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
@pytest.mark.parametrize(("source", "group_size"), [("bf16", None), ("fp32", 128)])
def test_compiles_to_wide_accesses_and_exact_division(
    architecture, mantissa_bits, native, source, group_size, tmp_path
) -> None:
    compiled = compile_for(
        architecture,
        source=source,
        group_size=group_size,
        mantissa_bits=mantissa_bits,
        native=native,
    )
    ptx = compiled.asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    conversions = set(re.findall(r"cvt\.rn\.satfinite\.(e\dm\d)x2\.f32", ptx))
    assert conversions == ({f"e{7 - mantissa_bits}m{mantissa_bits}"} if native else set())
    assert spilled_bytes(ptx, tmp_path) == 0


def spilled_bytes(ptx: str, folder) -> int:
    """Bytes that ptxas spills, by its own report."""
    architecture = re.search(r"\.target (sm_\w+)", ptx).group(1)
    tools = triton.knobs.nvidia
    tool = tools.ptxas_blackwell if architecture.startswith("sm_1") else tools.ptxas
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [tool.path, "-v", f"-arch={architecture}", str(file), "-o", str(folder / "cubin")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill", done.stdout + done.stderr)))
