"""Compiles kernels for GPUs that are not there, and reads what ptxas says of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = [80, 89, 90, 100, 120]


def compile_for(architecture: int, kernel, signature: dict, constants: dict, divisible):
    """Compile a kernel for `sm_<architecture>`; `divisible` arguments are multiples of 16."""
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    attributes = {place: [["tt.divisibility", 16]] for place in divisible}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32))


def spilled_bytes(ptx: str, folder: Path) -> int:
    """Bytes that ptxas spills, by its own report."""
    architecture = re.search(r"\.target (sm_\w+)", ptx).group(1)
    tools = triton.knobs.nvidia
    tool = tools.ptxas_blackwell if architecture.startswith("sm_1") else tools.ptxas
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [tool.path, "-v", f"-arch={architecture}", str(file), "-o", str(folder / "cubin")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(map(int, re.findall(r"(\d+) bytes spill", done.stdout + done.stderr)))
