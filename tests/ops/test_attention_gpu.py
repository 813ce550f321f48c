"""Writes and attention on a GPU: results of the CPU, under graph capture, without waiting."""

from __future__ import annotations

import pytest
import torch

from quantattn import ops
from quantattn.ops import _library
from quantattn.testing import assert_matches, make_batch

pytestmark = pytest.mark.gpu

SCALES = (torch.tensor(0.03), torch.tensor(0.05))
SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24}
MIXED = ([1, 3, 0, 65, 1, 2], [17, 3, 0, 70, 64, 16])


def attend(query, pages, meta, scales):
    return ops.paged_attention(
        query,
        pages,
        cu_seqlens_q=meta.cu_seqlens_q,
        seq_lens=meta.seq_lens,
        block_table=meta.block_table,
        max_seqlen_q=meta.max_seqlen_q,
        num_kv_heads=2,
        kv_cache_dtype="fp8",
        k_scale=scales[0],
        v_scale=scales[1],
        return_lse=True,
    )


def write(key, value, pages, slots, scales):
    ops.write_kv(
        key,
        value,
        pages,
        slots,
        k_scale=scales[0],
        v_scale=scales[1],
        kv_cache_dtype="fp8",
    )


@pytest.mark.parametrize("multiplies", [True, False], ids=["kernels", "plain torch"])
def test_the_gpu_gives_the_cpus_results_when_captured(multiplies, monkeypatch) -> None:
    monkeypatch.setattr(_library, "_multiplies", lambda device: multiplies)
    batch = make_batch(
        *MIXED, **SHAPE, kv_cache_dtype="fp8", k_scale=SCALES[0], v_scale=SCALES[1], padding=2
    )
    tokens = len(batch.query)
    key, value = torch.randn(2, tokens, 2, 24).bfloat16().unbind(0)
    inputs = [t.cuda() for t in (batch.query, key, value, batch.pages)]
    meta, scales = batch.metadata.to("cuda"), tuple(s.cuda() for s in SCALES)

    def layer():
        query, key, value, pages = inputs
        write(key, value, pages, meta.slot_mapping, scales)
        return attend(query, pages, meta, scales)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = layer()
    graph.replay()
    write(key, value, batch.pages, batch.metadata.slot_mapping, SCALES)
    expected, expected_lse = attend(batch.query, batch.pages, batch.metadata, SCALES)
    stored = inputs[3].cpu().view(torch.uint8)
    assert torch.equal(stored, batch.pages.contiguous().view(torch.uint8))
    assert_matches(out, expected.double())
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("multiplies", [True, False], ids=["kernels", "plain torch"])
def test_no_call_waits_for_the_gpu(multiplies, monkeypatch) -> None:
    monkeypatch.setattr(_library, "_multiplies", lambda device: multiplies)
    batch = make_batch(*MIXED, **SHAPE, kv_cache_dtype="fp8", k_scale=SCALES[0], v_scale=SCALES[1])
    meta, scales = batch.metadata.to("cuda"), tuple(s.cuda() for s in SCALES)
    query, pages = batch.query.cuda(), batch.pages.cuda()
    slots = meta.slot_mapping
    key = value = torch.randn(len(slots), 2, 24, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        write(key, value, pages, slots, scales)
        attend(query, pages, meta, scales)
        ops.static_quant_fp8(query, scales[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
