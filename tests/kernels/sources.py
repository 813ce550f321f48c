"""The kernels that the library's source declares, and what it launches."""

from __future__ import annotations

import ast
import re

from tests.library import ROOT

TREES = [ast.parse(file.read_text()) for file in sorted((ROOT / "quantattn/kernels").glob("*.py"))]


def kernels() -> set[str]:
    """Functions compiled for the GPU that are launched, which their names tell."""
    return {
        node.name
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel")
        if any(re.match(r"(triton|gluon)\.jit\b", ast.unparse(d)) for d in node.decorator_list)
    }


def is_for_hopper(kernel: str) -> bool:
    """Whether it is compiled for sm_90 only, which its name tells too."""
    return kernel.startswith("hopper_")


def launched() -> set[str]:
    """Names that are called as `name[grid](...)`."""
    return {
        ast.unparse(node.func.value)
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
