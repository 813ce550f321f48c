"""The compile check itself: what it must refuse, and that no kernel goes without it."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.kernels.compiling import compile_for, complaints
from tests.kernels.sources import is_for_hopper, kernels, launched


@triton.jit
def spilling_kernel(out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    numbers = tl.load(out_ptr + places)
    tl.store(out_ptr + places, numbers * tl.sum(numbers))


@triton.jit
def serialised_kernel(out_ptr, a_ptr, b_ptr, steps, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    square = places[:, None] * SIZE + places[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(steps):
        a = tl.load(a_ptr + step * SIZE * SIZE + square)
        b = tl.load(b_ptr + step * SIZE * SIZE + square)
        total = tl.dot(a, b.trans(), total, max_num_imprecise_acc=32)
    tl.store(out_ptr + square, total)


@gluon.jit
def gluon_kernel(out_ptr, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    places = gl.arange(0, SIZE, layout=layout)
    gl.store(out_ptr + places, gl.load(out_ptr + places) * 2.0)


@gluon.jit
def scattering_kernel(out_ptr, in_ptr, LANES: gl.constexpr):
    layout: gl.constexpr = gl.DistributedLinearLayout([], LANES, [], [], [4, 8])
    rows = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))
    numbers = gl.load(in_ptr + (rows[:, None] * 8 + columns[None, :]))
    gl.store(out_ptr + rows, gl.max(numbers, 1))


def test_spilled_registers_are_refused() -> None:
    signature, options = {"out_ptr": "*fp32"}, {"num_warps": 1, "maxnreg": 32}
    with pytest.raises(AssertionError, match="bytes spill stores"):
        compile_for(90, spilling_kernel, signature, {"SIZE": 4096}, [], **options)


def test_serialised_products_are_refused() -> None:
    signature = {"out_ptr": "*fp32", "a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "steps": "i32"}
    with pytest.raises(AssertionError, match=r"\(C75\d\d\)"):
        compile_for(90, serialised_kernel, signature, {"SIZE": 128}, [(0,), (1,), (2,)])


@pytest.mark.parametrize(
    ("lanes", "is_scattered"),
    [
        ([[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]], False),
        ([[1, 0], [2, 0], [0, 1], [0, 2], [0, 4]], False),
        ([[0, 1], [0, 2], [1, 0], [2, 0], [0, 4]], True),
        ([[0, 1], [1, 0], [2, 0], [0, 2], [0, 4]], True),
    ],
)
def test_reductions_over_lanes_with_others_between_are_refused(lanes, is_scattered) -> None:
    signature = {"out_ptr": "*fp32", "in_ptr": "*fp32"}
    refused = pytest.raises(AssertionError, match=r"axis 1 of .*lane = \[\[0, 1\], ")
    with refused if is_scattered else contextlib.nullcontext():
        compile_for(90, scattering_kernel, signature, {"LANES": lanes}, [], num_warps=1)


def test_kernels_of_gluon_are_compiled_too() -> None:
    compiled = compile_for(90, gluon_kernel, {"out_ptr": "*fp32"}, {"SIZE": 512}, [(0,)])
    assert "ld.global.v4.b32" in compiled.asm["ptx"]


def test_any_other_warning_is_refused() -> None:
    report = "ptxas info    : Used 32 registers\nptxas warning : setmaxnreg is ignored (C7508)\n"
    assert complaints(report) == ["ptxas warning : setmaxnreg is ignored (C7508)"]


def identifiers(tree: ast.Module) -> set[str]:
    return {
        getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
    }


@pytest.mark.parametrize("kernel", sorted(kernels()))
def test_a_compile_test_covers_each_kernel(kernel) -> None:
    files = Path(__file__).parent.glob("test_*_compiles.py")
    tests = [identifiers(ast.parse(file.read_text())) for file in files]
    needed = {kernel} if is_for_hopper(kernel) else {kernel, "ARCHITECTURES"}
    assert any(needed <= names for names in tests), f"compile {kernel} in a *_compiles.py test"


def test_what_is_launched_is_named_a_kernel() -> None:
    assert launched() <= kernels()
