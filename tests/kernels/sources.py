"""The kernels that the library's source declares, and what it launches."""

from __future__ import annotations

import ast
import re

from tests.library import ROOT

TREES = [ast.parse(file.read_text()) for file in sorted((ROOT / "quantattn/kernels").rglob("*.py"))]


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
    """Names that are called as `name[grid](...)`, or given to `Launches`, which does that."""
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "Launches"}
    called = {ast.unparse(c.func.value) for c in calls if isinstance(c.func, ast.Subscript)}
    return given | called - {"binary", "self._kernel"}
