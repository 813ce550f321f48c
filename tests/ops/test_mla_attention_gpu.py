"""The kernels of mla_attention on a GPU against float64, at the widths that models have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from quantattn import AttentionMetadata
from quantattn.ops import mla_attention, static_quant_fp8, write_latent
from quantattn.testing import assert_matches, poisoned_pages

pytestmark = pytest.mark.gpu

LATENT, ROPE, SIZE = 512, 64, 64
SCALE = torch.tensor(0.02)
STORED = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
DECODE = ([1, 1, 1, 1, 1, 1], [17, 1, 0, 1023, 64, 2500])
SPECULATED = ([3, 8, 1, 0, 5], [3, 70, 0, 9, 1000])
# More sequences than are counted at once, and runs of tiles that begin and end anywhere.
MANY = ([1, 2, 4, 3] * 40, [7 * row % 600 for row in range(160)])
MIXED = ([1, 130, 1, 9, 0, 65], [300, 130, 1, 4, 7, 200])


def written(kv_cache_dtype, dtype, heads, lens, padding=2, size=SIZE):
    """Query, pages and metadata, on the GPU, of a batch whose latent rows are in their pages.

    Where a sequence has more queries than keys, its first queries see none.
    """
    query_lens, seq_lens = lens
    rows = [max(pair) for pair in zip(*lens, strict=True)]
    counts = [-(-length // size) for length in rows]
    table = torch.full((len(counts), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    order = torch.randperm(sum(counts)).int()
    for row, ids in enumerate(order.split(counts)):
        table[row, : len(ids)] = ids
    stored = STORED.get(kv_cache_dtype, dtype)
    pages = poisoned_pages(len(order) + 1, size * (LATENT + ROPE), stored, gap=64).cuda()
    every = AttentionMetadata.from_lengths(rows, rows, table, size).to("cuda")
    latent = torch.randn(sum(rows), LATENT + ROPE).to(dtype).cuda()
    scale = None if kv_cache_dtype == "auto" else SCALE.cuda()
    write_latent(latent, pages, every.slot_mapping, scale=scale, kv_cache_dtype=kv_cache_dtype)
    tokens = sum(query_lens) + padding
    meta = AttentionMetadata.from_lengths(query_lens, rows, table, size, num_tokens=tokens)
    meta = replace(meta, seq_lens=torch.tensor(seq_lens, dtype=torch.int32))
    query = torch.randn(tokens, heads, LATENT + ROPE).to(dtype).cuda()
    query[sum(query_lens) :] = torch.nan
    return query, pages, meta.to("cuda")


def attend(query, pages, meta, kv_cache_dtype, **more):
    return mla_attention(
        query,
        pages,
        cu_seqlens_q=meta.cu_seqlens_q,
        seq_lens=meta.seq_lens,
        block_table=meta.block_table,
        max_seqlen_q=meta.max_seqlen_q,
        latent_dim=LATENT,
        rope_dim=ROPE,
        kv_cache_dtype=kv_cache_dtype,
        scale=None if kv_cache_dtype == "auto" else torch.full((), float(SCALE), device="cuda"),
        softmax_scale=0.07,
        **more,
    )


def expected(query, pages, meta, kv_cache_dtype):
    """Output and LSE in float64, padding and rows without keys 0 and -inf."""
    out = torch.zeros(*query.shape[:2], LATENT, dtype=torch.float64, device="cuda")
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64, device="cuda")
    numbers = pages.double() * (1.0 if kv_cache_dtype == "auto" else float(SCALE))
    starts = meta.cu_seqlens_q.tolist()
    size = pages.shape[1] // (LATENT + ROPE)
    for row, length in enumerate(meta.seq_lens.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        query_len = tokens.stop - tokens.start
        if query_len == 0 or length == 0:
            continue
        blocks = meta.block_table[row, : -(-length // size)].long()
        keys = numbers[blocks].reshape(-1, LATENT + ROPE)[:length]
        logits = torch.einsum("qhd,kd->qhk", query[tokens].double(), keys) * 0.07
        position = torch.arange(length - query_len, length, device="cuda")
        hidden = torch.arange(length, device="cuda") > position[:, None]
        logits = logits.masked_fill(hidden[:, None], -math.inf)
        sees = position >= 0
        out[tokens][sees] = torch.softmax(logits[sees], -1) @ keys[:, :LATENT]
        lse[tokens][sees] = torch.logsumexp(logits[sees], -1)
    return out, lse


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "heads", "lens", "size"),
    [
        pytest.param("fp8", torch.bfloat16, 128, DECODE, 64, id="fp8-bf16-128-decode"),
        pytest.param("fp8", torch.bfloat16, 128, MIXED, 16, id="fp8-bf16-128-mixed"),
        pytest.param("fp8", torch.bfloat16, 128, MANY, 256, id="fp8-bf16-128-many"),
        pytest.param("fp8", torch.bfloat16, 16, DECODE, 64, id="fp8-bf16-16-decode"),
        pytest.param("fp8", torch.bfloat16, 32, DECODE, 16, id="fp8-bf16-32-decode"),
        pytest.param("fp8", torch.float16, 4, MANY, 256, id="fp8-fp16-4-many"),
        pytest.param("fp8_e5m2", torch.bfloat16, 3, SPECULATED, 128, id="e5m2-bf16-3-several"),
        pytest.param("fp8", torch.float16, 16, SPECULATED, 128, id="fp8-fp16-16-several"),
        pytest.param("fp8", torch.float16, 64, MANY, 24, id="fp8-fp16-64-many"),
        pytest.param("fp8_e5m2", torch.bfloat16, 5, MIXED, 64, id="e5m2-bf16-5-mixed"),
        pytest.param("fp8_e5m2", torch.bfloat16, 80, SPECULATED, 32, id="e5m2-bf16-80-several"),
        pytest.param("auto", torch.bfloat16, 128, SPECULATED, 64, id="auto-bf16-128-several"),
        pytest.param("auto", torch.bfloat16, 32, MANY, 16, id="auto-bf16-32-many"),
        pytest.param("auto", torch.float16, 16, DECODE, 48, id="auto-fp16-16-decode"),
    ],
)
def test_matches_float64(kv_cache_dtype, dtype, heads, lens, size) -> None:
    query, pages, meta = written(kv_cache_dtype, dtype, heads, lens, size=size)
    out, lse = attend(query, pages, meta, kv_cache_dtype, return_lse=True)
    want, want_lse = expected(query, pages, meta, kv_cache_dtype)
    assert out.dtype == dtype
    assert_matches(out, want)
    # For few rows Hopper adds up e4m3 products, of whose sums it keeps 13 fraction bits.
    tokens = meta.max_seqlen_q if meta.max_seqlen_q <= 8 else 1
    error = 5e-3 if heads * tokens <= 32 else 1e-4
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=error)


def test_a_float32_query_is_attended_with_in_float32() -> None:
    query, pages, meta = written("fp8", torch.float32, 8, MIXED)
    out = attend(query, pages, meta, "fp8")
    assert_matches(out, expected(query, pages, meta, "fp8")[0], rel_l2=1e-5)


def test_an_fp8_query_is_dequantized_with_its_scale() -> None:
    query, pages, meta = written("fp8", torch.bfloat16, 16, DECODE, padding=0)
    q_scale = torch.tensor(0.013, device="cuda")
    codes = static_quant_fp8(query, q_scale)
    out = attend(codes, pages, meta, "fp8", q_scale=q_scale)
    exact = codes.double() * q_scale.double()
    assert_matches(out, expected(exact, pages, meta, "fp8")[0])


@pytest.mark.parametrize(
    ("round_through", "groups", "lens"),
    [
        pytest.param(False, None, DECODE, id="one scale-decode"),
        pytest.param(True, 64, DECODE, id="through bf16-groups-decode"),
        pytest.param(False, 16, MIXED, id="groups-mixed"),
    ],
)
def test_a_quantized_output_is_the_quantized_float32_output(round_through, groups, lens) -> None:
    query, pages, meta = written("fp8", torch.bfloat16, 16, lens)
    scale = torch.tensor(0.0013) if groups is None else torch.linspace(0.001, 0.002, groups)
    options = {"out_scale": scale.cuda(), "round_through": round_through}
    fused = attend(query, pages, meta, "fp8", **options)
    source = torch.bfloat16 if round_through else torch.float32
    unfused = static_quant_fp8(attend(query, pages, meta, "fp8", out_dtype=source), scale.cuda())
    assert torch.equal(fused.view(torch.uint8), unfused.view(torch.uint8))


def test_one_capture_serves_other_lengths_tables_and_scales() -> None:
    batches = [
        written("fp8", torch.bfloat16, 128, (DECODE[0], lengths))
        for lengths in (DECODE[1], [2500, 0, 5, 64, 1, 1000])
    ]
    (query, pages, meta), (later_query, later_pages, later_meta) = batches
    attend(query, pages, meta, "fp8")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(query, pages, meta, "fp8")
    eager = attend(later_query, later_pages, later_meta, "fp8")
    query.copy_(later_query)
    for name in ("seq_lens", "block_table"):
        getattr(meta, name).copy_(getattr(later_meta, name))
    pages.view(torch.uint8).copy_(later_pages.view(torch.uint8))
    graph.replay()
    assert torch.equal(out, eager)
