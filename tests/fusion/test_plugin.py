"""The kit that users test fusion with: fixtures, graphs, counts, comparisons."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantattn.testing import GraphRecorder, assert_fused_matches, count_ops
from tests.library import ROOT

USERS_TEST = """
import torch
from quantattn.testing import assert_fused_matches, count_ops, make_batch

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}

def test_my_model_fuses(quantattn_graphs, quantattn_model):
    model = quantattn_model(2, **SHAPE, out_scale=torch.tensor(0.125))
    batch = make_batch([1, 3], [9, 3], **SHAPE)
    with torch.no_grad():
        fused = torch.compile(model, backend=quantattn_graphs, fullgraph=True)(batch)
        assert_fused_matches(fused, model(batch), model_dtype=torch.bfloat16)
    assert len(quantattn_graphs.report().fused) == 2
    before, after = (graphs[0] for graphs in (quantattn_graphs.before, quantattn_graphs.after))
    assert count_ops(before)["quantattn::static_quant_fp8"] == 2
    assert count_ops(after)["quantattn::static_quant_fp8"] == 0

def test_under_inductor(quantattn_fusion):
    assert quantattn_fusion.report().missed == ()
"""


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what installing this tree would tell importlib.metadata."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("metadata")
    for name in ("pyproject.toml", "README.md", "LICENSE", "quantattn", "loaders"):
        (source / name).symlink_to(ROOT / name)
    prepare = "from setuptools.build_meta import prepare_metadata_for_build_wheel as prepare"
    command = [sys.executable, "-W", "ignore", "-c", f"{prepare}; prepare({str(folder)!r})"]
    subprocess.run(command, cwd=source, capture_output=True, check=True)
    return folder


def test_pytest_is_told_of_the_plugin_by_its_modules_name(metadata: Path) -> None:
    """So that pytest knows it for the plugin that `-p` or `pytest_plugins` loaded already."""
    (found,) = metadata.glob("*.dist-info")
    (plugin,) = importlib.metadata.Distribution.at(found).entry_points.select(group="pytest11")
    assert plugin.name == plugin.value == "quantattn.testing.plugin"
    assert plugin.load().quantattn_graphs


@pytest.mark.parametrize(
    "options",
    [[], ["-p", "quantattn.testing.plugin"]],
    ids=["by its entry point", "by its name as well"],
)
def test_a_users_test_finds_the_fixtures(options, metadata: Path, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(USERS_TEST)
    command = [sys.executable, "-m", "pytest", "-q", *options]
    path = os.pathsep.join([str(metadata), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


WITHOUT_TRITON = """
import sys
import quantattn.fusion
heavy = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
sys.modules["triton"] = None
import torch
from tests.fusion.running import make_run, run_compiled
_, recorder = run_compiled(*make_run("32/8", 2, out_scale=torch.tensor(0.125)))
print(heavy, recorder.report())
"""


def test_fusion_needs_no_triton_and_imports_no_compiler_before_it_compiles() -> None:
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_TRITON]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("[] fused 1"), done.stdout + done.stderr


IMPORTS = """
import sys
import torch
before = {*sys.modules}
import quantattn, quantattn.cli, quantattn.fusion, quantattn.loaders, quantattn.models
import quantattn.ops, quantattn.testing
heavy = ("triton", "torch._dynamo", "torch._inductor")
print([name for name in {*sys.modules} - before if name.startswith(heavy)])
"""


def test_importing_everything_imports_neither_triton_nor_inductor() -> None:
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_the_recorder_keeps_both_graphs_and_runs_the_second() -> None:
    recorder = GraphRecorder()
    compiled = torch.compile(torch.nn.Linear(3, 2), backend=recorder)
    with torch.no_grad():
        assert compiled(torch.ones(4, 3)).shape == (4, 2)
    assert recorder.before[0] is not recorder.after[0]
    assert count_ops(recorder.before[0]) == count_ops(recorder.after[0])
    assert count_ops(recorder.before[0])["aten::addmm"] == 1
    assert str(recorder.report()) == "fused 0, missed 0"


CODES = torch.linspace(-440, 440, 4096).to(torch.float8_e4m3fn)
BF16 = {"model_dtype": torch.bfloat16}


def moved(codes: torch.Tensor, count: int, steps: int) -> torch.Tensor:
    """The first `count` codes moved towards zero."""
    bits = codes.view(torch.uint8).clone()
    bits[:count] -= steps
    return bits.view(torch.float8_e4m3fn)


def test_one_other_code_fails_where_bits_must_agree() -> None:
    assert_fused_matches(CODES, CODES.clone(), **BF16)
    with pytest.raises(AssertionError, match=r"1 of 4096 codes differ.*by 1 steps at \[0\]"):
        assert_fused_matches(moved(CODES, 1, 1), CODES, **BF16)


def test_from_float32_only_few_neighbours_may_differ() -> None:
    options = {**BF16, "round_through": False}
    # 32 u = 16 * 2^-7 of the codes, and chance.
    assert_fused_matches(moved(CODES, 512, 1), CODES, **options)
    with pytest.raises(AssertionError, match="639 of 4096"):
        assert_fused_matches(moved(CODES, 639, 1), CODES, **options)
    with pytest.raises(AssertionError, match="by 2 steps"):
        assert_fused_matches(moved(CODES, 1, 2), CODES, **options)


def test_what_follows_the_codes_is_compared_by_its_l2_error() -> None:
    exact = torch.linspace(-3, 3, 4096)
    assert_fused_matches(exact * (1 + 1e-7), exact, **BF16)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_fused_matches(exact * 1.001, exact, **BF16)
    assert_fused_matches(exact * 1.001, exact, **BF16, round_through=False)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_fused_matches(exact * 1.1, exact, **BF16, round_through=False)


def test_zeros_of_both_signs_are_one_number_and_dtypes_must_agree() -> None:
    zeros = torch.tensor([0.0, -0.0]).to(torch.float8_e4m3fn)
    assert_fused_matches(zeros, torch.tensor([-0.0, 0.0]).to(zeros.dtype), **BF16)
    with pytest.raises(AssertionError, match="float8_e5m2"):
        assert_fused_matches(CODES.float().to(torch.float8_e5m2), CODES, **BF16)
    with pytest.raises(AssertionError, match=r"\[2\]"):
        assert_fused_matches(CODES[:2], CODES, **BF16)
