"""paged_attention against float64 loops over the bytes of poisoned pages."""

from __future__ import annotations

import math

import pytest
import torch

from quantattn.errors import FormatError, ScaleError
from quantattn.ops import paged_attention, static_quant_fp8
from quantattn.reference import _attend, _tiling
from quantattn.testing import assert_matches, make_batch
from tests import fp8_oracle
from tests.ops import oracles

PER_TENSOR = (torch.tensor(0.03), torch.tensor(0.05))
PER_HEAD = (torch.tensor([0.03, 0.011]), torch.tensor([0.05, 0.017]))
MIXED = ([1, 3, 0, 65, 1, 2], [17, 3, 0, 70, 64, 16])
SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "head_dim_v": 20}


def arguments(batch, kv_cache_dtype, scales, **more):
    meta = batch.metadata
    quantized = kv_cache_dtype != "auto"
    return {
        "cu_seqlens_q": meta.cu_seqlens_q,
        "seq_lens": meta.seq_lens,
        "block_table": meta.block_table,
        "max_seqlen_q": meta.max_seqlen_q,
        "num_kv_heads": batch.key.shape[1],
        "head_dim_v": batch.value.shape[2],
        "kv_cache_dtype": kv_cache_dtype,
        "k_scale": scales[0] if quantized else None,
        "v_scale": scales[1] if quantized else None,
        **more,
    }


def sequences(batch, kv_cache_dtype, scales, order="NHD"):
    """Keys and values of each sequence as the bytes in its pages mean them."""
    size = batch.pages.shape[1] // (
        batch.key.shape[1] * (batch.key.shape[2] + batch.value.shape[2])
    )
    found = []
    for row, length in enumerate(batch.metadata.seq_lens.tolist()):
        table = batch.metadata.block_table[row].tolist()
        slots = [table[p // size] * size + p % size for p in range(length)]
        found.append(
            oracles.read_cache(
                batch.pages,
                slots,
                heads=batch.key.shape[1],
                dims=(batch.key.shape[2], batch.value.shape[2]),
                order=order,
                kv_cache_dtype=kv_cache_dtype,
                scales=scales,
            )
        )
    return found


def expected(batch, kv_cache_dtype, scales, *, order="NHD", query=None, **options):
    query = batch.query.double() if query is None else query
    options.setdefault("softmax_scale", query.shape[2] ** -0.5)
    query_lens = batch.metadata.cu_seqlens_q.diff().tolist()
    return oracles.attend(
        query,
        sequences(batch, kv_cache_dtype, scales, order),
        query_lens,
        oracles.Options(**options),
    )


def small_batch(kv_cache_dtype="fp8", scales=PER_HEAD, **more):
    quantized = kv_cache_dtype != "auto"
    k_scale, v_scale = scales if quantized else (None, None)
    given = {**SHAPE, "kv_cache_dtype": kv_cache_dtype, "k_scale": k_scale, "v_scale": v_scale}
    return make_batch(*more.pop("lens", MIXED), **{**given, **more})


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [PER_TENSOR, PER_HEAD], ids=["per tensor", "per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batches_match_float64(order, kv_cache_dtype, scales, dtype) -> None:
    batch = small_batch(kv_cache_dtype, scales, layout=order, dtype=dtype, padding=2)
    out, lse = paged_attention(
        batch.query,
        batch.pages,
        layout=order,
        return_lse=True,
        **arguments(batch, kv_cache_dtype, scales),
    )
    want, want_lse = expected(batch, kv_cache_dtype, scales, order=order)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_matches(out, want, rel_l2=1e-6 if dtype == torch.float32 else 4e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(7, 1, 96), (3, 3, 1), (8, 2, 64)]
)
def test_odd_shapes_match_float64(block_size, num_heads, num_kv_heads, head_dim) -> None:
    batch = small_batch(
        scales=PER_TENSOR,
        lens=([2, 1, 5], [65, 1, 63]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        block_size=block_size,
    )
    out = paged_attention(batch.query, batch.pages, **arguments(batch, "fp8", PER_TENSOR))
    assert_matches(out, expected(batch, "fp8", PER_TENSOR)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"sliding_window": 1},
        {"sliding_window": 9},
        {"logits_soft_cap": 0.7},
        {"softmax_scale": 0.4},
        {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0, 1.5, -torch.inf])},
        {"sinks": torch.linspace(-1, 2, 6).bfloat16(), "sliding_window": 7, "logits_soft_cap": 2.0},
    ],
    ids=str,
)
def test_options_match_float64(options) -> None:
    batch = small_batch(dtype=torch.float32)
    out, lse = paged_attention(
        batch.query, batch.pages, return_lse=True, **arguments(batch, "fp8", PER_HEAD, **options)
    )
    want, want_lse = expected(batch, "fp8", PER_HEAD, **options)
    assert_matches(out, want, rel_l2=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_an_unquantized_cache_ignores_scales() -> None:
    batch = small_batch("auto")
    args = arguments(batch, "auto", (None, None))
    plain = paged_attention(batch.query, batch.pages, **args)
    scaled = paged_attention(
        batch.query, batch.pages, **{**args, "k_scale": PER_TENSOR[0], "v_scale": PER_TENSOR[1]}
    )
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("lens", [([1], [40]), ([70], [130])])
@pytest.mark.parametrize("q_scale", [torch.tensor(0.02), torch.tensor([0.02, 0.013])])
def test_an_fp8_query_is_dequantized_with_its_scale(lens, q_scale) -> None:
    scales = (torch.tensor(0.5), torch.tensor(2.0))
    batch = small_batch(scales=scales, lens=lens)
    query = static_quant_fp8(batch.query, q_scale)
    args = arguments(batch, "fp8", scales, q_scale=q_scale)
    out = paged_attention(query, batch.pages, **args)
    assert out.dtype == torch.bfloat16
    assert paged_attention(query, batch.pages, out_dtype=torch.float16, **args).dtype == torch.half
    factor = torch.tensor(oracles.per_head(q_scale, 2), dtype=torch.float64).repeat_interleave(3)
    exact = fp8_oracle.decode(query, torch.float8_e4m3fn) * factor[:, None]
    assert_matches(out, expected(batch, "fp8", scales, query=exact)[0])
    assert_matches(out, expected(batch, "fp8", scales)[0], rel_l2=3e-2)


@pytest.mark.parametrize("prob_scale", [torch.tensor(0.003), torch.tensor([0.003, 0.0022])])
def test_fp8_probabilities_are_quantized_with_their_scale(prob_scale) -> None:
    batch = small_batch(dtype=torch.float32)
    args = arguments(batch, "fp8", PER_HEAD, prob_scale=prob_scale)
    out = paged_attention(batch.query, batch.pages, **args)
    assert_matches(out, expected(batch, "fp8", PER_HEAD, prob_scale=prob_scale)[0], rel_l2=1e-3)


def test_fp8_probabilities_hold_their_own_error_bound() -> None:
    batch = small_batch(dtype=torch.float32)
    args = arguments(batch, "fp8", PER_HEAD, prob_scale=torch.tensor(1 / 448))
    out = paged_attention(batch.query, batch.pages, **args)
    assert_matches(out, expected(batch, "fp8", PER_HEAD)[0], rel_l2=3e-2)


def test_one_key_has_a_probability_that_shows_the_scales_rounding() -> None:
    batch = small_batch("auto", lens=([1], [1]), dtype=torch.float32)
    args = arguments(batch, "auto", (None, None), prob_scale=torch.tensor(0.04))
    out = paged_attention(batch.query, batch.pages, **args)
    # 1 / 0.04 = 25 is stored as 24, so the probability 1 becomes 0.96
    torch.testing.assert_close(out[0, 0], 0.96 * batch.value[0, 0])


@pytest.mark.parametrize("round_through", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 6, 2, 60])
def test_a_quantized_output_is_the_quantized_float32_output(round_through, groups) -> None:
    batch = small_batch(padding=1)
    args = arguments(batch, "fp8", PER_HEAD)
    out_scale = torch.tensor(0.0013) if groups is None else torch.linspace(0.001, 0.004, groups)
    fused = paged_attention(
        batch.query, batch.pages, out_scale=out_scale, round_through=round_through, **args
    )
    source = torch.bfloat16 if round_through else torch.float32
    unfused = paged_attention(batch.query, batch.pages, **args, out_dtype=source)
    codes = static_quant_fp8(unfused, out_scale).view(torch.uint8)
    assert fused.dtype == torch.float8_e4m3fn
    assert torch.equal(fused.view(torch.uint8), codes)
    assert not fused[-1].view(torch.uint8).any()


def test_rounding_through_the_model_dtype_changes_some_codes() -> None:
    batch = small_batch()
    args = arguments(batch, "fp8", PER_HEAD, out_scale=torch.tensor(0.0013))
    direct = paged_attention(batch.query, batch.pages, **args).view(torch.uint8)
    through = paged_attention(batch.query, batch.pages, round_through=True, **args)
    assert (direct != through.view(torch.uint8)).any()


def test_doubling_a_scale_doubles_what_it_scales() -> None:
    batch = small_batch(dtype=torch.float32)
    args = arguments(batch, "fp8", PER_HEAD)
    out = paged_attention(batch.query, batch.pages, **args)
    doubled = paged_attention(batch.query, batch.pages, **{**args, "v_scale": 2 * PER_HEAD[1]})
    assert torch.equal(doubled, 2 * out)
    k_doubled = paged_attention(batch.query, batch.pages, **{**args, "k_scale": 2 * PER_HEAD[0]})
    assert torch.equal(k_doubled, paged_attention(2 * batch.query, batch.pages, **args))


def test_a_sink_joins_the_denominator_once_whatever_the_k_scale() -> None:
    value = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    for k_scale in (1.0, 0.25):
        pages = torch.zeros(1, 4, dtype=torch.float8_e4m3fn)
        pages[0] = torch.tensor([1.0, 2.0, 0.0, 0.0]).div(k_scale).to(torch.float8_e4m3fn)
        pages[0, 2:] = value.flatten().to(torch.float8_e4m3fn)
        out = paged_attention(
            torch.ones(1, 1, 1),
            pages,
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([2], dtype=torch.int32),
            block_table=torch.tensor([[0]], dtype=torch.int32),
            max_seqlen_q=1,
            num_kv_heads=1,
            kv_cache_dtype="fp8",
            k_scale=torch.tensor(k_scale),
            v_scale=torch.tensor(1.0),
            softmax_scale=1.0,
            sinks=torch.tensor([0.5]),
        )
        assert out.item() == pytest.approx(2.11682, abs=1e-5)


@pytest.mark.parametrize(
    ("logit", "capped"),
    [(1.0, 0.99987), (100.0, 48.2014), (4400.0, 50.0), (1e4, 50.0), (-1e4, -50.0)],
)
def test_a_soft_cap_stays_finite(logit, capped) -> None:
    pages = torch.tensor([[1.0, 5.0]])
    out, lse = paged_attention(
        torch.full((1, 1, 1), logit),
        pages,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([1], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        max_seqlen_q=1,
        num_kv_heads=1,
        kv_cache_dtype="auto",
        softmax_scale=1.0,
        logits_soft_cap=50.0,
        return_lse=True,
    )
    assert lse.item() == pytest.approx(capped, rel=1e-4)
    assert out.item() == 5.0


@pytest.mark.parametrize("sinks", [None, torch.full((6,), 0.5)])
def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity(sinks) -> None:
    batch = small_batch("auto", lens=([2, 1], [2, 9]), dtype=torch.float32)
    args = arguments(batch, "auto", (None, None), sinks=sinks)
    # three new tokens but one key: two rows lie before position 0
    args["cu_seqlens_q"] = torch.tensor([0, 3, 3], dtype=torch.int32)
    args["seq_lens"] = torch.tensor([1, 0], dtype=torch.int32)
    args["max_seqlen_q"] = 3
    out, lse = paged_attention(batch.query, batch.pages, return_lse=True, **args)
    assert not out[:2].any()
    assert (lse[:2] == -math.inf).all()
    assert out[2].any()
    assert lse[2].isfinite().all()


def test_logits_far_below_zero_are_no_mask() -> None:
    pages = torch.tensor([[-6e4, -6.0001e4, 1.0, 2.0]])
    out = paged_attention(
        torch.ones(1, 1, 1),
        pages,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        block_table=torch.tensor([[0]], dtype=torch.int32),
        max_seqlen_q=1,
        num_kv_heads=1,
        kv_cache_dtype="auto",
        softmax_scale=1.0,
    )
    weights = torch.softmax(torch.tensor([0.0, -1.0], dtype=torch.float64), 0)
    assert out.item() == pytest.approx(float(weights @ torch.tensor([1.0, 2.0]).double()))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("q_scale", [None, torch.tensor(0.3)], ids=["bf16 query", "fp8 query"])
def test_a_batch_of_nothing_but_padding_is_zero(tokens, q_scale) -> None:
    batch = small_batch("auto", lens=([], []), padding=tokens)
    args = arguments(batch, "auto", (None, None), q_scale=q_scale)
    query = batch.query if q_scale is None else static_quant_fp8(batch.query, q_scale)
    out, lse = paged_attention(query, batch.pages, return_lse=True, **args)
    assert out.shape == (tokens, 6, 20)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_memory_for_scores_is_bounded_by_working_in_parts(monkeypatch) -> None:
    batch = small_batch(dtype=torch.float32, lens=([300, 1, 90], [300, 77, 90]))
    args = arguments(batch, "fp8", PER_HEAD)
    whole = paged_attention(batch.query, batch.pages, **args)
    monkeypatch.setattr(_attend, "WORKING_SET", 1)
    parts = paged_attention(batch.query, batch.pages, **args)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_sizes_that_the_host_does_not_know_change_nothing(monkeypatch) -> None:
    batch = small_batch(dtype=torch.float32, padding=3)
    args = arguments(batch, "fp8", PER_HEAD, return_lse=True)
    known = paged_attention(batch.query, batch.pages, **args)
    for module in (_attend, _tiling):
        monkeypatch.setattr(module, "known_size", lambda size, limit: limit)
    unknown = paged_attention(batch.query, batch.pages, **args)
    torch.testing.assert_close(unknown, known, rtol=1e-5, atol=1e-6)


def test_a_longest_query_that_is_understated_changes_nothing() -> None:
    batch = small_batch(dtype=torch.float32)
    args = arguments(batch, "fp8", PER_HEAD)
    right = paged_attention(batch.query, batch.pages, **args)
    wrong_length = paged_attention(batch.query, batch.pages, **{**args, "max_seqlen_q": 1})
    torch.testing.assert_close(wrong_length, right, rtol=1e-5, atol=1e-6)


def test_autocast_does_not_lower_the_precision() -> None:
    batch = small_batch()
    args = arguments(batch, "fp8", PER_HEAD)
    plain = paged_attention(batch.query, batch.pages, **args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(paged_attention(batch.query, batch.pages, **args), plain)


def test_byte_pages_and_strided_queries_give_the_same() -> None:
    batch = small_batch()
    args = arguments(batch, "fp8", PER_HEAD)
    plain = paged_attention(batch.query, batch.pages, **args)
    strided = torch.cat([batch.query, batch.query], dim=2)[:, :, : batch.query.shape[2]]
    assert torch.equal(paged_attention(strided, batch.pages.view(torch.uint8), **args), plain)


def wrong(name, value, error, message):
    return pytest.param(name, value, error, message, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        wrong("query", torch.zeros(7, 144), FormatError, r"query: got shape \[7, 144\]"),
        wrong("query", torch.zeros(7, 5, 24), FormatError, "5 heads do not share"),
        wrong("query", torch.zeros(7, 6, 24).double(), FormatError, "query: got dtype"),
        wrong(
            "query", torch.zeros(7, 6, 24).to(torch.float8_e4m3fn), ScaleError, "q_scale: got None"
        ),
        wrong("q_scale", torch.tensor(0.5), ScaleError, "q_scale: got one for a query of"),
        wrong("kv_cache", torch.zeros(2, 704), FormatError, "kv_cache: got dtype torch.float32"),
        wrong("cu_seqlens_q", torch.zeros(3), FormatError, "cu_seqlens_q: got dtype"),
        wrong("cu_seqlens_q", torch.zeros(4).int(), FormatError, r"cu_seqlens_q: got shape \[4\]"),
        wrong("seq_lens", torch.zeros(2).long(), FormatError, "seq_lens: got dtype torch.int64"),
        wrong("block_table", torch.zeros(3, 4).int(), FormatError, "block_table: got shape"),
        wrong(
            "block_table", torch.zeros(2, 4, device="meta").int(), FormatError, "block_table is on"
        ),
        wrong("max_seqlen_q", -1, FormatError, "max_seqlen_q: got -1"),
        wrong("num_kv_heads", 0, FormatError, "num_kv_heads 0"),
        wrong("head_dim_v", 19, FormatError, "no multiple of"),
        wrong("k_scale", None, ScaleError, "k_scale: got None"),
        wrong("v_scale", torch.ones(3), ScaleError, r"v_scale: got shape \[3\]"),
        wrong("prob_scale", torch.ones(3), ScaleError, r"prob_scale: got shape \[3\]"),
        wrong("out_scale", torch.ones(7), ScaleError, "out_scale: 7 groups do not cut 120"),
        wrong("out_scale", torch.tensor(1.0, device="meta"), ScaleError, "on meta, but .* on cpu"),
        wrong("sinks", torch.ones(2), FormatError, r"sinks: got shape \[2\], expected \[6\]"),
        wrong("softmax_scale", math.nan, FormatError, "softmax_scale: got nan"),
        wrong("sliding_window", 0, FormatError, "sliding_window: got 0"),
        wrong("logits_soft_cap", 0.0, FormatError, r"logits_soft_cap: got 0\.0"),
        wrong("out_dtype", torch.int8, FormatError, "out_dtype: got torch.int8"),
        wrong("kv_cache_dtype", "int4_per_token_head", FormatError, "got 24 and 20"),
        wrong("scale_placement", "row", FormatError, "scale_placement: got 'row'"),
        wrong("layout", "NDH", FormatError, "layout: got 'NDH'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, value, error, message) -> None:
    batch = small_batch(lens=([3, 4], [3, 9]))
    good = {
        "query": batch.query,
        "kv_cache": batch.pages,
        **arguments(batch, "fp8", PER_HEAD),
    }
    with pytest.raises(error, match=message):
        paged_attention(**{**good, name: value})


def test_a_window_without_causality_is_refused() -> None:
    batch = small_batch(lens=([1], [4]))
    args = arguments(batch, "fp8", PER_HEAD, causal=False, sliding_window=3)
    with pytest.raises(FormatError, match="causal=False"):
        paged_attention(batch.query, batch.pages, **args)
