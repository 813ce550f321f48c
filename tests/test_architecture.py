"""The arrows of the design: who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from tests.library import ROOT, library_modules

# From the bottom up. A module imports what is below its own row, or beside it in the same row.
TIERS = [
    {"errors", "cache_writes"},
    {"formats"},
    {"quant_scales", "scale_access", "scale_buffers", "scale_snapshot", "scales"},
    {
        "arithmetic",
        "block_moves",
        "cache",
        "cache_identity",
        "host_blocks",
        "layout",
        "metadata",
        "page_scales",
        "paged_blocks",
        "rotation",
        "validation",
    },
    {"kernels", "reference"},
    {"ops"},
    {"attention", "audit", "calibration", "loaders", "mla", "registration"},
    {"quantattn"},
    {"cli", "fusion", "integrations", "models", "testing"},
    {"__main__"},
]
# (importer, imported): what its row alone would allow.
FORBIDDEN = {
    ("kernels", "reference"),
    ("reference", "kernels"),
    ("loaders", "kernels"),
    ("loaders", "ops"),
    ("loaders", "reference"),
}
TIER_OF = {unit: rank for rank, units in enumerate(TIERS) for unit in units}


MODULES = library_modules()
TREES = {name: ast.parse(file.read_text()) for name, file in MODULES.items()}


def unit_of(module: str) -> str:
    """The row entry that a module belongs to: `quantattn.ops.write_kv` -> `ops`."""
    return module.split(".")[1] if "." in module else module


def imports_of(tree: ast.AST) -> Iterator[str]:
    """What the tree imports, inside functions too; `from a import b` is `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    """Modules of the library that a module imports, its own name left out."""
    found = set()
    for name in imports_of(TREES[module]):
        if name.split(".")[0] != "quantattn":
            continue
        while name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {module}


def run_at_import(tree: ast.Module) -> ast.Module:
    """The tree without the bodies of its functions and without `if TYPE_CHECKING`."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return Strip().visit(ast.parse(ast.unparse(tree)))


def test_every_module_has_its_place_in_the_tiers() -> None:
    homeless = {name for name in MODULES if unit_of(name) not in TIER_OF}
    assert not homeless, "name the row of these in TIERS"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_follow_the_arrows(module: str) -> None:
    unit = unit_of(module)
    for imported in own_imports(module):
        target = unit_of(imported)
        assert TIER_OF[target] <= TIER_OF[unit], f"{module} imports {imported}, which is above it"
        assert (unit, target) not in FORBIDDEN, f"{module} must not know {imported}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()


@pytest.mark.parametrize("leaf", ["cli", "integrations"])
def test_nothing_else_imports_a_leaf(leaf: str) -> None:
    importers = {
        module
        for module in MODULES
        if unit_of(module) not in {leaf, "__main__"}
        for imported in own_imports(module)
        if unit_of(imported) == leaf
    }
    assert not importers


def test_imports_are_absolute() -> None:
    relative = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    assert not relative


def test_kernels_and_triton_are_imported_only_when_an_op_first_runs() -> None:
    early = {
        f"{module} imports {name}"
        for module, tree in TREES.items()
        if unit_of(module) != "kernels"
        for name in imports_of(run_at_import(tree))
        if name.startswith(("triton", "quantattn.kernels"))
    }
    assert not early


def test_kernels_never_see_a_module() -> None:
    pattern = re.compile(r"\btorch\.nn\b|\bfrom torch import .*\bnn\b")
    offenders = {
        module
        for module, tree in TREES.items()
        if unit_of(module) == "kernels" and pattern.search(ast.unparse(tree))
    }
    assert not offenders


def stems(folder: str) -> set[str]:
    return {file.stem for file in (ROOT / folder).glob("*.py") if not file.stem.startswith("_")}


def test_an_operation_has_the_same_stem_everywhere() -> None:
    ops = stems("quantattn/ops") - {"support"}
    assert stems("quantattn/reference") == ops
    assert stems("quantattn/kernels") <= ops
    assert {f"test_{stem}" for stem in ops} <= stems("tests/ops")


def test_only_formats_parses_the_name_of_a_cache_format() -> None:
    guess = re.compile(
        r"""(startswith|endswith)\(\(?["'](fp8|int8|int4)|["'](fp8|int8|int4)\w*["'] in """
    )
    offenders = {
        module
        for module, tree in TREES.items()
        if unit_of(module) != "formats" and guess.search(ast.unparse(tree))
    }
    assert not offenders


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "misc"])
def test_no_module_is_a_drawer(name: str) -> None:
    assert not {module for module in MODULES if module.rpartition(".")[2] == name}
