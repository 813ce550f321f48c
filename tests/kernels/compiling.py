"""Compiles kernels for GPUs that are not there, and refuses what their compilers get wrong."""

from __future__ import annotations

import ast
import contextlib
import io
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

ARCHITECTURES = [80, 89, 90, 100, 120]
"""Those that attention is compiled for; what multiplies no tiles is compiled for sm_75 too."""


def compile_for(architecture: int, kernel, signature: dict, constants: dict, divisible, **options):
    """Compile a kernel, of Triton or Gluon, for `sm_<architecture>`, without complaints.

    Constants have names, or places `(argument, element)`. `divisible` arguments are multiples of
    16; `options` are those of a launch (`num_warps` ...).
    """
    names = [name for name in constants if isinstance(name, str)]
    signature = {**signature, **dict.fromkeys(names, "constexpr")}
    attributes = {place: [["tt.divisibility", 16]] for place in divisible}
    source_of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_of(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", architecture, 32)
    knobs, report = triton.knobs, io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(report):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a kernel from the cache comes without a report
        compiled = triton.compile(source, target=target, options=options)
    said = report.getvalue()
    assert "Compiling entry function" in said, f"ptxas reported nothing: {said}"
    assert not complaints(said), complaints(said)
    scattered = scattered_reductions(compiled.asm["ttgir"])
    assert not scattered, scattered
    return compiled


def scattered_reductions(ttgir: str) -> list[str]:
    """Layouts that something is reduced in where Triton 3.6 would reduce wrong threads' numbers.

    It shuffles over as many lanes as share what is reduced, from the first of them on, as if they
    lay side by side.
    """
    layouts = dict(re.findall(r"^#(\w+) = #ttg\.linear<(.*)>$", ttgir, re.MULTILINE))
    reductions = re.findall(
        r'"tt\.reduce"\(.*?axis = (\d+) .*?\n +\}\) : \((tensor<.*?)\) ->', ttgir, re.DOTALL
    )
    found = []
    for axis, operands in reductions:
        operand = operands.split(">, tensor<")[0]
        layout = layouts.get(re.findall(r"#(\w+)", operand)[-1])
        lanes = ast.literal_eval(re.search(r"lane = (\[.*?\]), warp", layout)[1]) if layout else []
        for dimension in reversed(re.findall(r"dim = (\d+)", operand)):
            lanes = [lane[: int(dimension)] + lane[int(dimension) + 1 :] for lane in lanes]
        sharing = [place for place, lane in enumerate(lanes) if lane[int(axis)] != 0]
        if sharing and sharing[-1] - sharing[0] >= len(sharing):
            found.append(f"axis {axis} of {layout}")
    return found


def fp8_conversions(compiled) -> set[str]:
    """Every conversion to FP8 in a binary's PTX, as its target and source: `e4m3x2.f32`.

    One from fp16 rounds a float32 number twice; Triton 3.6 makes it on sm_89.
    """
    return set(re.findall(r"\bcvt\.\S*\.(e\dm\dx2\.\w+) ", compiled.asm["ptx"]))


def complaints(report: str) -> list[str]:
    """What ptxas says of spilled registers, of serialised products (C75xx), and every warning."""
    pattern = re.compile(r"warning|\(C\d+\)|[1-9]\d* bytes spill")
    return [line.strip() for line in report.splitlines() if pattern.search(line)]
