"""The package's surface: what it exports, what importing it costs, what its wheel holds."""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import quantattn
import quantattn.loaders
from tests.library import PACKAGE_OF, ROOT, host_modules

IMPORT_ALL = "import sys, quantattn, quantattn.loaders, quantattn.ops"
HEAVY = ["torch._dynamo", "torch._inductor", "transformers", "triton"]


def run_python(code: str, cwd: Path) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", host_modules())
def test_all_is_sorted_and_names_every_public_class_and_function(name: str) -> None:
    module = importlib.import_module(name)
    exported = list(module.__all__)
    assert exported == sorted(exported)
    assert not [member for member in exported if not hasattr(module, member)]
    defined_here = {
        member
        for member, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == name
        and not member.startswith("_")
    }
    assert defined_here <= set(exported)


@pytest.mark.parametrize("package", [quantattn, quantattn.loaders])
def test_a_package_exports_exactly_what_it_gathers(package: ModuleType) -> None:
    gathered = {
        member
        for member, value in vars(package).items()
        if not member.startswith("_")
        and getattr(value, "__module__", "").partition(".")[0] == "quantattn"
    }
    exported = {name for name in package.__all__ if not inspect.ismodule(getattr(package, name))}
    assert gathered == exported


def test_importing_the_package_loads_no_compiler() -> None:
    print_heavy = f"print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python(f"{IMPORT_ALL}; {print_heavy}", ROOT) == "[]"


def test_the_package_imports_where_triton_is_missing() -> None:
    run_python(f"import sys; sys.modules['triton'] = None; {IMPORT_ALL}", ROOT)


def test_the_checkout_alone_finds_its_loaders(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import quantattn.loaders as found"
    file = run_python(f"{code}; print(found.__file__)", tmp_path)
    assert Path(file) == ROOT / "loaders" / "__init__.py"


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Name and content of all that a wheel of this tree carries, its own records left out."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGE_OF:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, source / folder.name, ignore=ignore)
    run_python("from setuptools.build_meta import build_wheel; build_wheel('wheels')", source)
    (wheel,) = (source / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}


def test_the_wheel_holds_the_files_of_the_tree(wheel_files: dict[str, bytes]) -> None:
    tree_files = {
        "/".join((*package.split("."), *file.relative_to(folder).parts)): file.read_bytes()
        for folder, package in PACKAGE_OF.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert sorted(wheel_files) == sorted(tree_files)
    assert wheel_files == tree_files
