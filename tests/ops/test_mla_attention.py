"""mla_attention against float64: a cached row is key and value, one scale serves both products."""

from __future__ import annotations

import math

import pytest
import torch

from quantattn.errors import FormatError, ScaleError
from quantattn.metadata import AttentionMetadata
from quantattn.ops import mla_attention, static_quant_fp8, write_latent
from quantattn.testing import assert_matches, poisoned_pages
from tests import fp8_oracle
from tests.ops import oracles

LATENT, ROPE, SIZE, HEADS = 16, 4, 4, 3
QUERY_LENS, SEQ_LENS = [1, 4, 0, 6], [9, 4, 2, 13]
TABLE = torch.tensor([[3, 8, 1, 99], [5, 99, 99, 99], [0, 99, 99, 99], [7, 2, 6, 4]])
SCALE = torch.tensor(0.02)


def written(kv_cache_dtype, dtype=torch.bfloat16, padding=2):
    """Query, pages and metadata of a batch whose latent rows are in their pages."""
    stored = oracles.FP8.get(kv_cache_dtype, dtype)
    pages = poisoned_pages(10, SIZE * (LATENT + ROPE), stored)
    every = AttentionMetadata.from_lengths(SEQ_LENS, SEQ_LENS, TABLE, SIZE)
    latent = torch.randn(sum(SEQ_LENS), LATENT + ROPE).to(dtype)
    scale = None if kv_cache_dtype == "auto" else SCALE
    write_latent(latent, pages, every.slot_mapping, scale=scale, kv_cache_dtype=kv_cache_dtype)
    tokens = sum(QUERY_LENS) + padding
    meta = AttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, TABLE, SIZE, num_tokens=tokens)
    query = torch.randn(tokens, HEADS, LATENT + ROPE).to(dtype)
    query[sum(QUERY_LENS) :] = torch.nan
    return query, pages, meta


def arguments(meta, kv_cache_dtype, **more):
    return {
        "cu_seqlens_q": meta.cu_seqlens_q,
        "seq_lens": meta.seq_lens,
        "block_table": meta.block_table,
        "max_seqlen_q": meta.max_seqlen_q,
        "latent_dim": LATENT,
        "rope_dim": ROPE,
        "kv_cache_dtype": kv_cache_dtype,
        "scale": None if kv_cache_dtype == "auto" else SCALE,
        "softmax_scale": 0.21,
        **more,
    }


def expected(query, pages, kv_cache_dtype):
    scale = None if kv_cache_dtype == "auto" else SCALE
    found = []
    for row, length in enumerate(SEQ_LENS):
        slots = [int(TABLE[row, p // SIZE]) * SIZE + p % SIZE for p in range(length)]
        rows, _ = oracles.read_cache(
            pages,
            slots,
            heads=1,
            dims=(LATENT + ROPE, 0),
            order="NHD",
            kv_cache_dtype=kv_cache_dtype,
            scales=(scale, None),
        )
        found.append((rows, rows[..., :LATENT]))
    return oracles.attend(query.double(), found, QUERY_LENS, oracles.Options(softmax_scale=0.21))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batches_match_float64(kv_cache_dtype, dtype) -> None:
    query, pages, meta = written(kv_cache_dtype, dtype)
    args = arguments(meta, kv_cache_dtype, return_lse=True)
    out, lse = mla_attention(query, pages, **args)
    want, want_lse = expected(query, pages, kv_cache_dtype)
    assert out.dtype == dtype
    assert_matches(out, want, rel_l2=1e-6 if dtype == torch.float32 else 4e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert (lse[-2:] == -math.inf).all()


def test_one_scale_serves_both_products() -> None:
    pages = torch.zeros(1, 2, dtype=torch.float8_e4m3fn)
    scale = torch.tensor(0.5)
    row = torch.ones(1, 2)
    write_latent(row, pages, torch.tensor([0]), scale=scale, kv_cache_dtype="fp8")
    out, lse = mla_attention(
        torch.ones(1, 1, 2),
        pages,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        max_seqlen_q=1,
        latent_dim=1,
        rope_dim=1,
        kv_cache_dtype="fp8",
        scale=scale,
        softmax_scale=1.0,
        return_lse=True,
    )
    assert out.item() == 1.0
    assert lse.item() == 2.0


def test_an_unquantized_cache_ignores_the_scale() -> None:
    query, pages, meta = written("auto")
    plain = mla_attention(query, pages, **arguments(meta, "auto"))
    assert torch.equal(mla_attention(query, pages, **arguments(meta, "auto", scale=SCALE)), plain)


def test_an_fp8_query_is_dequantized_with_its_scale() -> None:
    query, pages, meta = written("fp8", padding=0)
    q_scale = torch.tensor(0.013)
    codes = static_quant_fp8(query, q_scale)
    out = mla_attention(codes, pages, **arguments(meta, "fp8", q_scale=q_scale))
    exact = fp8_oracle.decode(codes, torch.float8_e4m3fn) * q_scale.double()
    assert out.dtype == torch.bfloat16
    assert_matches(out, expected(exact, pages, "fp8")[0])


@pytest.mark.parametrize("round_through", [False, True])
@pytest.mark.parametrize("out_scale", [torch.tensor(0.0013), torch.linspace(0.001, 0.002, HEADS)])
def test_a_quantized_output_is_the_quantized_float32_output(round_through, out_scale) -> None:
    query, pages, meta = written("fp8")
    args = arguments(meta, "fp8")
    fused = mla_attention(query, pages, out_scale=out_scale, round_through=round_through, **args)
    source = torch.bfloat16 if round_through else torch.float32
    unfused = static_quant_fp8(mla_attention(query, pages, out_dtype=source, **args), out_scale)
    assert torch.equal(fused.view(torch.uint8), unfused.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("latent_dim", 15, FormatError, "rows of 20, expected latent_dim 15"),
        ("scale", None, ScaleError, "scale: got None"),
        ("scale", torch.ones(3), ScaleError, r"scale: got shape \[3\]"),
        ("q_scale", torch.tensor(0.5), ScaleError, "q_scale: got one for a query of"),
        ("out_scale", torch.ones(7), ScaleError, "7 groups do not cut 48"),
        ("softmax_scale", math.inf, FormatError, "softmax_scale: got inf"),
        ("seq_lens", torch.zeros(4), FormatError, "seq_lens: got dtype"),
        ("out_dtype", torch.int8, FormatError, "out_dtype: got torch.int8"),
        ("kv_cache_dtype", "fp8_per_token_head", FormatError, "latent cache does not serve"),
        ("kv_cache_dtype", "fp8_e5m2", FormatError, "kv_cache: got dtype torch.float8_e4m3fn"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, value, error, message) -> None:
    query, pages, meta = written("fp8")
    with pytest.raises(error, match=message):
        mla_attention(query, pages, **{**arguments(meta, "fp8"), name: value})
