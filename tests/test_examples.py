"""Examples that users read are run: docstrings of all modules, the Python of README and docs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import quantattn
import quantattn.loaders
from tests.library import ROOT, host_modules

PUBLIC = [
    "quantattn",
    "quantattn.fusion",
    "quantattn.loaders",
    "quantattn.models.generation",
    "quantattn.models.llama",
    "quantattn.ops",
    "quantattn.testing",
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public_names() -> dict[str, object]:
    """What an example may use without importing it, as in `from quantattn import *`."""
    packages = (quantattn, quantattn.loaders)
    return {name: getattr(package, name) for package in packages for name in package.__all__}


@pytest.mark.parametrize("name", host_modules())
def test_docstring_examples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    for example in doctest.DocTestFinder().find(module):
        assert not any(doctest.SKIP in step.options for step in example.examples), example.name
    assumed = {"torch": torch, **public_names(), **vars(module)}
    failed, _ = doctest.testmod(module, globs=assumed, optionflags=OPTIONS)
    assert failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_function_shows_an_example(package: str) -> None:
    module = importlib.import_module(package)
    without = {
        name
        for name in module.__all__
        if inspect.isroutine(member := getattr(module, name))
        and ">>> " not in (inspect.getdoc(member) or "")
    }
    assert not without


@pytest.mark.parametrize("package", ["quantattn", "quantattn.loaders"])
def test_every_public_method_shows_an_example(package: str) -> None:
    """Methods that only override one of torch's own are torch's to explain."""
    without = set()
    module = importlib.import_module(package)
    classes = {name: vars(module)[name] for name in module.__all__}
    for name, member in classes.items():
        for method, function in vars(member).items() if inspect.isclass(member) else ():
            is_own = not method.startswith("_") and not hasattr(torch.nn.Module, method)
            shown = ">>> " in (inspect.getdoc(function) or "")
            if is_own and inspect.isfunction(function) and method != "translate_state_dict":
                without |= set() if shown else {f"{name}.{method}"}
    assert not without


@pytest.mark.parametrize(
    ("page", "device"),
    [
        ("README.md", "cpu"),
        ("docs/caches.md", "cpu"),
        pytest.param("docs/caches.md", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_pages_examples_run_in_order(
    page: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    with torch.device(device):
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)


def test_figures_of_speed_in_the_readme_are_those_that_were_measured() -> None:
    section = (ROOT / "README.md").read_text().split("## Speed")[1].split("\n## ")[0]
    figures = set(re.findall(r"\d+\.\d+", section))
    measured = (ROOT / "docs/performance.md").read_text()
    assert figures
    assert figures <= set(re.findall(r"\d+\.\d+", measured))
