"""Faults of section G that users of other libraries met: compilation, fusion, CUDA graphs.

G05, a cache that hides the pass, is in tests/fusion/test_inductor.py; G07, wrong schemas and fakes,
in tests/ops/test_registration.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantattn import AttentionMetadata, FormatError, ops
from quantattn.fusion import FusionOptions
from quantattn.testing import (
    SPELLINGS,
    AttentionQuant,
    GraphRecorder,
    PagedBatch,
    assert_fused_matches,
    assert_matches,
    count_ops,
    make_batch,
)
from tests.fusion.running import make_run, run_compiled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REQUIRED = FusionOptions(require=True)


def reshaped(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return ops.static_quant_fp8(x.view(-1, 32, 128).contiguous().reshape(len(x), -1), scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantize", [*SPELLINGS.values(), reshaped])
def test_g01_fusion_matches_however_the_quantization_is_implemented(quantize, device) -> None:
    settings = {"out_scale": torch.tensor(0.125), "quantize": quantize, "device": device}
    model, batch = make_run("32/8", 3, num_layers=2, **settings)
    _, recorder = run_compiled(model, batch, options=REQUIRED)
    assert len(recorder.report().fused) == 2
    assert count_ops(recorder.after[0])["quantattn::static_quant_fp8"] == 0
    assert model.out_scale.item() == 0.125


def test_g01_a_model_that_runs_unfused_is_noticed() -> None:
    model, batch = make_run("32/8", 3, out_scale=torch.tensor(0.125))
    model.quantize = lambda x, s: ops.static_quant_fp8(x.double().float(), s)
    with pytest.raises(Exception, match=r"require: nothing was fused.*torch.float64"):
        run_compiled(model, batch, options=REQUIRED)
    with pytest.raises(FormatError, match="patterns"):
        FusionOptions(patterns=("attn_quant",))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["decode", "prompt"])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 533])
def test_g02_every_row_of_the_fused_output_is_written(rows, mode, device) -> None:
    """On the CPU, new memory is poisoned; a GPU gives out again what another run left behind."""
    scale = torch.tensor(0.0371, device=device)
    model, batch = make_run(
        "40/8", rows, mode=mode, kv_cache_dtype="fp8", out_scale=scale, device=device
    )
    unfused, _ = run_compiled(model, batch, options=None)
    torch.compiler.reset()
    recorder = GraphRecorder(REQUIRED)
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    other = replace(batch, query=batch.query.flip(0, 1, 2) * 3)
    for _ in range(3 if device == "cuda" else 1):  # until the allocator repeats itself
        spoilt = compiled(other)
        spoilt.view(torch.uint8).fill_(0x7F)
        address = spoilt.data_ptr()
        del spoilt
    fused = compiled(batch)
    assert device == "cpu" or fused.data_ptr() == address
    assert_fused_matches(fused, unfused, model_dtype=torch.bfloat16)
    assert len(recorder.after) == 1


def attend_to(value: float, scale: float, device: str) -> torch.Tensor:
    """Codes of an attention whose output is `value` everywhere, quantized in the attention."""
    batch = make_batch([1], [5], num_heads=8, num_kv_heads=2, head_dim=128)
    meta = batch.metadata.to(device)
    return ops.paged_attention(
        batch.query.to(device),
        torch.full_like(batch.pages, value, device=device),
        cu_seqlens_q=meta.cu_seqlens_q,
        seq_lens=meta.seq_lens,
        block_table=meta.block_table,
        max_seqlen_q=1,
        num_kv_heads=2,
        kv_cache_dtype="auto",
        out_scale=torch.tensor(scale, device=device),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_g03_the_output_is_divided_by_its_scale(device) -> None:
    codes = attend_to(3.0, 0.125, device)
    assert torch.equal(codes.float(), torch.full((1, 8, 128), 24.0, device=device))
    expected = ops.static_quant_fp8(
        torch.full((1, 8, 128), 3.0, device=device), torch.tensor(0.125, device=device)
    )
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    scale = 22.4 / 448
    dequantized = attend_to(22.4, scale, device).float() * scale
    assert_matches(dequantized, torch.full((1, 8, 128), 22.4), rel_l2=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [0.001, 0.0005, 600.0])
def test_g04_a_scale_of_its_own_keeps_small_and_large_outputs(value, device) -> None:
    scale = value / 300
    outputs = attend_to(value, scale, device).float() * scale
    assert ((outputs / value - 1).abs() <= 0.0625).all()


def test_g08_new_scales_are_used_and_nothing_is_compiled_again() -> None:
    scale = torch.tensor(0.0371)
    model, batch = make_run("32/8", 3, num_layers=4, kv_cache_dtype="fp8", out_scale=scale)
    torch.compiler.reset()
    recorder = GraphRecorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    for factor in (1.0, 0.5, 3.0):
        for layer in model.layers:
            layer.v_scale.mul_(factor)
            layer.k_range.mul_(factor)
        model.out_scale.mul_(1.5)
        with torch.no_grad():
            fused, expected = compiled(batch), model(batch)
        assert torch.equal(fused.view(torch.uint8), expected.view(torch.uint8))
    assert len(recorder.after) == 1


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_g08_a_float_beside_the_scales_of_many_layers_is_never_read(device) -> None:
    settings = {"kv_cache_dtype": "fp8", "out_scale": torch.tensor(0.125), "device": device}
    model, batch = make_run("32/8", 3, num_layers=32, head_dim=16, **settings)
    torch.compiler.reset()
    recorder = GraphRecorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    answers = []
    for k_scale, mirror in ((0.01, 0.01), (0.02, 0.01), (0.02, 0.07)):
        for layer in model.layers:
            layer.k_scale.copy_(torch.tensor(k_scale))
            layer._k_scale_float = mirror  # as other libraries keep a copy for the host
        answers.append(compiled(batch))
    first, second, third = (codes.view(torch.uint8) for codes in answers)
    assert not torch.equal(first, second)
    assert torch.equal(second, third)
    assert_fused_matches(answers[2], model(batch), model_dtype=torch.bfloat16)
    assert (len(recorder.after), len(recorder.report().fused)) == (1, 32)
    given = [node.meta["val"] for node in recorder.before[0].nodes if node.op == "placeholder"]
    assert all(isinstance(x, torch.Tensor) for x in given)


def make_sized(mode: str, size: int) -> tuple[AttentionQuant, PagedBatch]:
    settings = {"kv_cache_dtype": "fp8", "out_scale": torch.tensor(0.0371)}
    return make_run("32/8", size, mode=mode, head_dim=16, **settings)


def sized(mode: str, *sizes: int) -> list[PagedBatch]:
    return [make_sized(mode, size)[1] for size in sizes]


@torch.no_grad()
def graphs_after(batches: list[PagedBatch], **options) -> list[int]:
    """How many graphs there are after each batch, run by one compiled model."""
    torch.compiler.reset()
    recorder, (model, _) = GraphRecorder(), make_sized("decode", 3)
    compiled = torch.compile(model, backend=recorder, fullgraph=True, **options)
    counts = []
    for batch in batches:
        assert_fused_matches(compiled(batch), model(batch), model_dtype=torch.bfloat16)
        counts.append(len(recorder.after))
    assert len(recorder.report().fused) == len(recorder.after)
    return counts


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_one_graph_for_the_first_batch_one_for_any_and_one_for_a_batch_of_one(mode) -> None:
    batches = sized(mode, 5, 2, 17, 40, 1, 9)
    assert graphs_after(batches) == [1, 2, 2, 2, 3, 3]
    assert graphs_after(batches, dynamic=True) == [1, 1, 1, 1, 2, 2]


def test_decode_steps_beside_prompts_take_five_graphs_at_most() -> None:
    batches = sized("decode", 5, 2, 17) + sized("mixed", 7, 9) + sized("prompt", 9, 5)
    batches += sized("decode", 1) + sized("prompt", 7, 1) + sized("mixed", 2, 40)
    assert graphs_after(batches)[-1] == 5
    assert graphs_after(batches, dynamic=True)[-1] == 4


def test_one_graph_serves_decode_batches_whose_sizes_are_marked() -> None:
    """Of several sequences: one alone has an empty one beside it."""
    batches = sized("decode", 5, 2, 17, 40, 9)
    alone = batches[1].metadata
    lengths = [int(alone.seq_lens[0]), 0]
    metadata = AttentionMetadata.from_lengths([1, 0], lengths, alone.block_table, 16, num_tokens=2)
    batches.append(replace(batches[1], metadata=metadata))
    for batch in batches:
        meta = batch.metadata
        index = (meta.cu_seqlens_q, meta.seq_lens, meta.block_table, meta.slot_mapping)
        for tensor in (batch.query, batch.key, batch.value, batch.pages, *index):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(meta.block_table, 1)
    assert graphs_after(batches) == [1] * 6


@pytest.mark.gpu
def test_g09_a_captured_step_replays_with_new_scales() -> None:
    model, batch = make_run(
        "32/8", 2, kv_cache_dtype="fp8", out_scale=torch.tensor(0.125), device="cuda"
    )
    layer, meta = model.layers[0], batch.metadata
    key, value = (torch.randn(2, 8, 128, device="cuda").bfloat16() for _ in range(2))

    def step() -> torch.Tensor:
        out = layer(batch.query, key, value, batch.pages, meta)
        return ops.static_quant_fp8(out.flatten(1), model.out_scale)

    with torch.no_grad():
        step()
        address = layer.v_scale.data_ptr()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for scale in (0.02, 0.05):
            layer.v_scale.fill_(scale)
            model.out_scale.fill_(scale * 3)
            graph.replay()
            replayed = captured.clone()
            assert torch.equal(replayed.view(torch.uint8), step().view(torch.uint8))
        assert layer.v_scale.data_ptr() == address
