"""Under Inductor itself: beside other passes, through its caches, without copies of the pages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config as config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

from quantattn import AttentionMetadata, FormatError, PagedKVCache, QuantAttention, fusion, ops
from quantattn.fusion import graph_pass, rewriting
from quantattn.testing import assert_fused_matches
from tests.fusion.running import make_run
from tests.library import ROOT

pytestmark = pytest.mark.usefixtures("fresh_compiler")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
QUANT = "torch.ops.quantattn.static_quant_fp8.default("


class Attend(torch.nn.Module):
    """Writes, attends and quantizes."""

    def __init__(self, kv_cache_dtype: str = "fp8", **options) -> None:
        super().__init__()
        self.attn = QuantAttention(4, 16, num_kv_heads=2, kv_cache_dtype=kv_cache_dtype, **options)
        self.attn.set_scale("k", 0.0123)
        self.attn.set_scale("v", 0.031)
        self.register_buffer("out_scale", torch.tensor(0.0371))

    def forward(self, query, key, value, pages, metadata):
        out = self.attn(query, key, value, pages, metadata)
        return ops.static_quant_fp8(out.flatten(1), self.out_scale)


def one_batch(num_blocks: int = 4, kv_cache_dtype: str = "fp8", device: str = "cpu"):
    torch.manual_seed(2)
    tensors = [torch.randn(3, heads, 16).bfloat16().to(device) for heads in (4, 2, 2)]
    cache = PagedKVCache(1, num_blocks, 16, 2, 16, kv_cache_dtype=kv_cache_dtype, device=device)
    metadata = AttentionMetadata.from_lengths([2, 1], [2, 9], [[1], [3]], 16, device=device)
    return *tensors, cache.layer(0), metadata


class Recorded(CustomGraphPass):
    """A pass of the user's own, that only looks."""

    def __init__(self, uuid: str | None = "own") -> None:
        self.seen: list[int] = []
        self._uuid = uuid

    def __call__(self, graph) -> None:
        self.seen.append(sum("static_quant" in node.name for node in graph.nodes))

    def uuid(self) -> str | None:
        return self._uuid


@pytest.mark.parametrize("several", [True, False], ids=["list", "one pass, as torch 2.11"])
def test_the_users_own_passes_run_too(several, monkeypatch) -> None:
    if several and not hasattr(graph_pass.inductor, "get_custom_graph_passes"):
        pytest.skip("this torch takes one pass")
    if not several:
        monkeypatch.delattr(graph_pass.inductor, "get_custom_graph_passes", raising=False)
    first, last = Recorded(None), Recorded(None)
    with config.patch(post_grad_custom_post_pass=first), torch.no_grad():
        with fusion.enable() as enabled:
            passes = config.post_grad_custom_post_pass
            if several:
                config.post_grad_custom_post_pass = [*passes, last]
            torch.compile(Attend(), fullgraph=True)(*one_batch())
            assert (first.seen, last.seen) == ([1], [0] if several else [])
            assert len(enabled.report().fused) == 1
            config.post_grad_custom_post_pass = passes
        assert config.post_grad_custom_post_pass is first


def test_one_pass_without_a_name_keeps_a_chain_out_of_the_caches(monkeypatch) -> None:
    monkeypatch.delattr(graph_pass.inductor, "get_custom_graph_passes", raising=False)
    for uuid, cached in (("own", True), (None, False)):
        with config.patch(post_grad_custom_post_pass=Recorded(uuid)), fusion.enable():
            assert (config.post_grad_custom_post_pass.uuid() is not None) is cached


def test_the_uuid_follows_the_source(tmp_path, monkeypatch) -> None:
    before = fusion.FusionOptions().uuid
    for file in Path(rewriting.__file__).parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(rewriting, "__file__", str(tmp_path / "rewriting.py"))
    uuids = []
    for added in ("", "# Another source."):
        with (tmp_path / "patterns_of_tomorrow.py").open("a") as file:
            file.write(added)
        rewriting._source_digest.cache_clear()
        uuids.append(fusion.FusionOptions().uuid)
    monkeypatch.undo()
    rewriting._source_digest.cache_clear()
    assert uuids[0] == fusion.FusionOptions().uuid == before != uuids[1]


def test_two_fusions_can_be_on_and_off_in_any_order() -> None:
    first = fusion.enable()
    second = fusion.enable(round_through=False)
    assert first.graph_pass.uuid() != second.graph_pass.uuid()
    assert first.graph_pass.uuid() == fusion.FusionOptions().uuid
    first.disable()
    assert config.post_grad_custom_post_pass is second.graph_pass
    second.disable()


def test_a_report_starts_anew_when_torchs_counters_are_cleared() -> None:
    with torch.no_grad(), fusion.enable() as enabled:
        torch.compile(Attend(), fullgraph=True)(*one_batch())
        torch.compiler.reset()
        torch.compile(Attend(), fullgraph=True)(*one_batch())
        assert len(enabled.report().fused) == 2
        later = fusion.Fusion(enabled.options, enabled.graph_pass)
        assert later.report().fused == ()
        torch._dynamo.utils.counters.clear()
        torch.compiler.reset()
        torch.compile(Attend(), fullgraph=True)(*one_batch())
        assert len(enabled.report().fused) == len(later.report().fused) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_code_neither_quantizes_nor_copies_the_pages(version, device) -> None:
    blocks = 61
    *inputs, pages, metadata = one_batch(blocks, device=device)
    model = Attend().to(device)
    v2 = version == "v2"
    patch = config.patch(enable_auto_functionalized_v2=v2)
    with torch.no_grad(), patch, fusion.enable(require=True):
        fused, (code,) = run_and_get_code(
            torch.compile(model, fullgraph=True), *inputs, pages, metadata
        )
    assert QUANT not in code
    assert "paged_attention.default(" in code
    assert f"({blocks}, {pages.shape[1]})" in code  # the pages, where their strides are checked
    allocations = [line for line in code.splitlines() if "empty_strided" in line]
    assert not [line for line in allocations if f"({blocks}," in line]
    *inputs, other, metadata = one_batch(blocks, device=device)
    unfused = model(*inputs, other, metadata)
    assert_fused_matches(fused, unfused, model_dtype=torch.bfloat16)
    assert torch.equal(pages.view(torch.uint8), other.view(torch.uint8))


def test_require_is_an_error_of_the_compiler_and_at_the_end_of_a_block() -> None:
    attend = Attend().attn
    with (
        pytest.raises(Exception, match=r"require: nothing was fused.* is an output of the graph"),
        torch.no_grad(),
        fusion.enable(require=True),
    ):
        torch.compile(attend, fullgraph=True)(*one_batch())
    with pytest.raises(FormatError, match="end of the block"), fusion.enable(require=True):
        pass


SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from quantattn import fusion
from tests.fusion.test_inductor import QUANT, Attend, one_batch

options, device = json.loads(sys.argv[1]), sys.argv[2]
enabled = fusion.enable(**options) if options is not None else None
with torch.no_grad():
    compiled = torch.compile(Attend().to(device), fullgraph=True)
    _, (code,) = run_and_get_code(compiled, *one_batch(device=device))
print(json.dumps([
    QUANT not in code,
    str(enabled.report()) if enabled else None,
    counters["inductor"]["fxgraph_cache_hit"],
]))
"""


@pytest.mark.parametrize("device", DEVICES)
def test_a_shared_cache_follows_the_setting_and_keeps_the_report(device, tmp_path: Path) -> None:
    """G05: every run in a fresh process."""

    def run(options: dict | None) -> list:
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(options), device]
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    off, on, again = (run(options) for options in (None, {}, {}))
    assert off == [False, None, 0]
    assert (on[0], on[2]) == (True, 0)
    lines = ["fused 1, missed 1", "attention_quant: paged_attention fused", "rope_write: auto_func"]
    assert all(line in on[1] for line in lines)
    assert again == [*on[:2], 1]
    assert run(None) == [False, None, 1]


def test_one_cache_keeps_formats_windows_and_scale_shapes_apart() -> None:
    """G05 as well: every model is compiled beside the others' cached graphs, then from them."""
    variants = [
        {},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"sliding_window": 2},
        {"scale_granularity": "head"},
    ]
    for again in range(2):
        for number, options in enumerate(variants):
            model, name = Attend(**options), options.get("kv_cache_dtype", "fp8")
            model.out_scale = torch.linspace(0.02, 0.07, 1 + number % 2)
            expected = model(*one_batch(kv_cache_dtype=name))
            torch.compiler.reset()
            with torch.no_grad(), fusion.enable() as enabled:
                compiled = torch.compile(model, fullgraph=True)
                fused = compiled(*one_batch(kv_cache_dtype=name))
            assert len(enabled.report().fused) == 1
            assert_fused_matches(fused, expected, model_dtype=torch.bfloat16)
        hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        assert hits == again * len(variants)


TREESPEC = "ignore:.isinstance.treespec:FutureWarning"  # torch's own, as is the other
NOT_WRITABLE = "ignore:The given buffer is not writable"


@pytest.mark.filterwarnings(TREESPEC, NOT_WRITABLE)
def test_an_export_keeps_the_operators_and_can_be_saved(tmp_path: Path) -> None:
    model = Attend()
    with torch.no_grad():
        exported = torch.export.export(model, one_batch())
    names = {str(node.target) for node in exported.graph.nodes}
    assert {"quantattn.paged_attention.default", "quantattn.static_quant_fp8.default"} <= names
    torch.export.save(exported, tmp_path / "exported.pt2")
    loaded = torch.export.load(tmp_path / "exported.pt2").module()
    assert_fused_matches(loaded(*one_batch()), model(*one_batch()), model_dtype=torch.bfloat16)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"),
    reason="packages of torch 2.11 hand operators another dtype (pytorch/pytorch#169157)",
)
@pytest.mark.filterwarnings(TREESPEC, NOT_WRITABLE)
@pytest.mark.parametrize("device", DEVICES)
def test_packages_fuse(device, tmp_path: Path) -> None:
    model = Attend().to(device)
    with torch.no_grad(), fusion.enable(require=True) as enabled:
        path = torch._inductor.aoti_compile_and_package(
            torch.export.export(model, one_batch(device=device)),
            package_path=str(tmp_path / "model.pt2"),
        )
        assert len(enabled.report().fused) == 1
    fused = torch._inductor.aoti_load_package(path)(*one_batch(device=device))
    unfused = model(*one_batch(device=device))
    assert_fused_matches(fused, unfused, model_dtype=torch.bfloat16)


def batch_of(query_lens: list[int], seq_lens: list[int], device: str = "cpu"):
    rows, seqs = sum(query_lens), len(seq_lens)
    tensors = [torch.randn(rows, heads, 16).bfloat16().to(device) for heads in (4, 2, 2)]
    cache = PagedKVCache(1, 2 * seqs + 1, 16, 2, 16, kv_cache_dtype="fp8", device=device)
    table = [[2 * i, 2 * i + 1] for i in range(seqs)]
    metadata = AttentionMetadata.from_lengths(query_lens, seq_lens, table, 16, device=device)
    return *tensors, cache.layer(0), metadata


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_serves_batches_and_scales_that_it_was_not_compiled_for(device) -> None:
    model = Attend().to(device)
    # Of the first, no two sizes are equal: torch would take them for one.
    first = ([3, 1, 1, 1, 1], [3, 9, 4, 1, 18])
    cases = (first, ([2, 2, 1, 2], [2, 19, 3, 4]), ([5, 1], [5, 9]))
    with torch.no_grad(), fusion.enable(require=True) as enabled:
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for number, case in enumerate(cases):
            model.out_scale.fill_(0.0113 * (number + 2))
            *inputs, pages, metadata = batch_of(*case, device)
            other = pages.clone()
            fused = compiled(*inputs, pages, metadata)
            unfused = model(*inputs, other, metadata)
            assert_fused_matches(fused, unfused, model_dtype=torch.bfloat16)
            assert torch.equal(pages.view(torch.uint8), other.view(torch.uint8))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(enabled.report().fused) == 1


def test_one_export_serves_other_batches_of_the_same_longest_query() -> None:
    model, auto = Attend(), torch.export.Dim.AUTO
    rows = {0: auto}
    shapes = (rows, rows, rows, rows, [rows, rows, {0: auto, 1: auto}, rows, None])
    with torch.no_grad():
        exported = torch.export.export(
            model, batch_of([2, 1, 1], [2, 9, 4]), dynamic_shapes=shapes
        ).module()
        for case in (([2, 1], [2, 9]), ([2, 2, 1, 2], [2, 19, 3, 4])):
            batch = batch_of(*case)
            assert_fused_matches(exported(*batch), model(*batch), model_dtype=torch.bfloat16)
        with pytest.raises(AssertionError, match="max_seqlen_q"):
            exported(*batch_of([5, 1], [5, 9]))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's, on TF32 and on the empty graph that it starts with
def test_one_cuda_graph_replays_fused_attention_with_new_lengths_and_scales() -> None:
    model, batch = make_run(
        "32/8", 7, kv_cache_dtype="fp8", out_scale=torch.tensor(0.125), device="cuda"
    )
    torch._dynamo.mark_static_address(batch.pages)
    with torch.no_grad(), fusion.enable(require=True):
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        lengths = batch.metadata.seq_lens.clone()
        for step in range(5):
            model.out_scale.fill_(0.01 * (step + 3))
            batch.metadata.seq_lens.copy_(lengths.clamp(max=4 * step + 1))
            torch.compiler.cudagraph_mark_step_begin()
            fused = compiled(batch).clone()
            assert_fused_matches(fused, model(batch), model_dtype=torch.bfloat16)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
