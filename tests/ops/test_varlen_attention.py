"""varlen_attention against float64 loops over the numbers that packed keys and values mean."""

from __future__ import annotations

import math

import pytest
import torch

from quantattn.errors import FormatError, ScaleError
from quantattn.ops import paged_attention, static_quant_fp8, varlen_attention
from quantattn.testing import assert_matches, make_batch
from tests import fp8_oracle
from tests.ops import oracles
from tests.ops.packed import PER_HEAD, PER_TENSOR, Packed, pack

MIXED = ([1, 3, 0, 65, 2, 4], [17, 3, 5, 70, 0, 2])
SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "head_dim_v": 20}


def small(dtype="fp8", scales=PER_HEAD, lens=MIXED, **more) -> Packed:
    return pack(*lens, dtype=dtype, scales=scales, **{**SHAPE, **more})


@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scales", [PER_TENSOR, PER_HEAD], ids=["per tensor", "per head"])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batches_match_float64(dtype, scales, model_dtype) -> None:
    batch = small(dtype, scales, model_dtype=model_dtype, padding=2)
    out, lse = varlen_attention(**batch.arguments(return_lse=True))
    want, want_lse = batch.expected()
    assert out.dtype == model_dtype
    assert lse.dtype == torch.float32
    assert_matches(out, want, rel_l2=1e-6 if model_dtype == torch.float32 else 4e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(7, 1, 96), (3, 3, 1), (8, 2, 64)]
)
def test_odd_shapes_match_float64(num_heads, num_kv_heads, head_dim) -> None:
    batch = pack(
        [2, 1, 5],
        [65, 1, 63],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
    )
    assert_matches(varlen_attention(**batch.arguments()), batch.expected()[0])


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
    batch = small(model_dtype=torch.float32)
    out, lse = varlen_attention(**batch.arguments(return_lse=True, **options))
    want, want_lse = batch.expected(**options)
    assert_matches(out, want, rel_l2=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_slices_of_a_packed_projection_are_read_in_place() -> None:
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = torch.randn(7, 8, 16).bfloat16()
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4, "max_seqlen_k": 4}
    sliced = varlen_attention(packed[:, :4], packed[:, 4:6], packed[:, 6:], **lengths)
    copied = varlen_attention(*(x.clone() for x in packed.split([4, 2, 2], 1)), **lengths)
    assert torch.equal(sliced, copied)


def test_equals_paged_attention_over_the_same_keys() -> None:
    scales = {"k_scale": PER_HEAD[0], "v_scale": PER_HEAD[1]}
    paged = make_batch([2, 5], [20, 5], **SHAPE, kv_cache_dtype="fp8", **scales, padding=1)
    sides = zip((paged.key, paged.value), PER_HEAD, strict=True)
    codes = [static_quant_fp8(side, scale) for side, scale in sides]
    meta = paged.metadata
    more = {"cu_seqlens_q": meta.cu_seqlens_q, "max_seqlen_q": 5, **scales, "return_lse": True}
    packed = varlen_attention(
        paged.query,
        *codes,
        cu_seqlens_k=torch.tensor([0, 20, 25], dtype=torch.int32),
        max_seqlen_k=20,
        **more,
    )
    expected = paged_attention(
        paged.query,
        paged.pages,
        seq_lens=meta.seq_lens,
        block_table=meta.block_table,
        num_kv_heads=2,
        head_dim_v=20,
        kv_cache_dtype="fp8",
        **more,
    )
    torch.testing.assert_close(packed, expected)


def test_keys_of_a_model_dtype_ignore_scales() -> None:
    batch = small("auto")
    plain = varlen_attention(**batch.arguments())
    scales = {"k_scale": PER_TENSOR[0], "v_scale": PER_TENSOR[1]}
    assert torch.equal(varlen_attention(**batch.arguments(**scales)), plain)


@pytest.mark.parametrize("q_scale", [torch.tensor(0.02), torch.tensor([0.02, 0.013])])
def test_an_fp8_query_is_dequantized_with_its_scale(q_scale) -> None:
    batch = small()
    query = static_quant_fp8(batch.query, q_scale)
    out = varlen_attention(**batch.arguments(query=query, q_scale=q_scale))
    factor = torch.tensor(oracles.per_head(q_scale, 2), dtype=torch.float64).repeat_interleave(3)
    exact = fp8_oracle.decode(query, torch.float8_e4m3fn) * factor[:, None]
    assert out.dtype == torch.bfloat16
    assert_matches(out, batch.expected(query=exact)[0])


@pytest.mark.parametrize("prob_scale", [torch.tensor(0.003), torch.tensor([0.003, 0.0022])])
def test_fp8_probabilities_are_quantized_with_their_scale(prob_scale) -> None:
    batch = small(model_dtype=torch.float32)
    out = varlen_attention(**batch.arguments(prob_scale=prob_scale))
    assert_matches(out, batch.expected(prob_scale=prob_scale)[0], rel_l2=1e-3)


@pytest.mark.parametrize("round_through", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 6, 2, 60])
def test_a_quantized_output_is_the_quantized_float32_output(round_through, groups) -> None:
    batch = small(padding=1)
    out_scale = torch.tensor(0.0013) if groups is None else torch.linspace(0.001, 0.004, groups)
    fused = varlen_attention(**batch.arguments(out_scale=out_scale, round_through=round_through))
    source = torch.bfloat16 if round_through else torch.float32
    unfused = varlen_attention(**batch.arguments(out_dtype=source))
    codes = static_quant_fp8(unfused, out_scale).view(torch.uint8)
    assert torch.equal(fused.view(torch.uint8), codes)
    assert not fused[-1].view(torch.uint8).any()


def test_rows_before_the_first_key_are_zero_with_lse_minus_infinity() -> None:
    batch = small(lens=([4, 2], [2, 0]))
    out, lse = varlen_attention(**batch.arguments(return_lse=True, sinks=torch.full((6,), 0.5)))
    empty = torch.tensor([True, True, False, False, True, True])
    assert not out[empty].any()
    assert (lse[empty] == -math.inf).all()
    assert lse[~empty].isfinite().all()


@pytest.mark.parametrize("num_seqs", [0, 2])
def test_a_batch_without_keys_is_zero(num_seqs) -> None:
    batch = small(lens=([2] * num_seqs, [0] * num_seqs), padding=3, spare_keys=0)
    out, lse = varlen_attention(**batch.arguments(return_lse=True))
    assert out.shape == (2 * num_seqs + 3, 6, 20)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("lens", [([1, 3], [5, 3]), ([], [])], ids=["some", "none"])
def test_passes_opcheck(return_lse, dtype, lens) -> None:
    batch = small(dtype, lens=lens)
    given = batch.arguments()
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    lengths, scales = (3, 5), (given["k_scale"], given["v_scale"], None, None)
    scores, tail = (0.3, True, None, None, None), (torch.tensor(0.03), False, torch.bfloat16)
    arguments = (*(given[n] for n in names), *lengths, *scales, *scores, *tail, return_lse)
    operation = torch.ops.quantattn.varlen_attention.default
    # opcheck compares inputs before and after with arithmetic that torch lacks for FP8
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = {"test_utils": utils[1:]} if dtype == "fp8" else {}
    assert set(torch.library.opcheck(operation, arguments, **more).values()) == {"SUCCESS"}


def test_compiles_without_graph_breaks() -> None:
    def attend(query, key, value, ends):
        longest = query.shape[0]
        return varlen_attention(
            query,
            key,
            value,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            k_scale=PER_TENSOR[0],
            v_scale=PER_TENSOR[1],
        )

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (4, 9):
        query, codes = torch.randn(tokens, 6, 8), torch.randn(2, tokens, 2, 8)
        key, value = codes.to(torch.float8_e4m3fn).unbind(0)
        ends = torch.tensor([0, 3, tokens], dtype=torch.int32)
        assert torch.equal(compiled(query, key, value, ends), attend(query, key, value, ends))


def wrong(name, value, error, message):
    return pytest.param(name, value, error, message, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        wrong("query", torch.zeros(5, 144), FormatError, r"query: got shape \[5, 144\]"),
        wrong("query", torch.zeros(5, 5, 24), FormatError, "5 heads do not share"),
        wrong("query", torch.zeros(5, 6, 24).double(), FormatError, "query: got dtype"),
        wrong("query", torch.zeros(5, 6, 24).to(torch.float8_e4m3fn), ScaleError, "q_scale: got N"),
        wrong("q_scale", torch.tensor(0.5), ScaleError, "q_scale: got one for a query of"),
        wrong("key", torch.zeros(9, 2, 23), FormatError, r"key: got shape \[9, 2, 23\]"),
        wrong("key", torch.zeros(9, 2, 24).int(), FormatError, "key: got dtype torch.int32"),
        wrong("key", torch.zeros(9, 2, 24, device="meta"), FormatError, "key is on meta"),
        wrong("value", torch.zeros(8, 2, 20), FormatError, "value: got dtype torch.float32"),
        wrong("value", torch.zeros(8, 2, 20).to(torch.float8_e4m3fn), FormatError, "value: got sh"),
        wrong("cu_seqlens_q", torch.zeros(3), FormatError, "cu_seqlens_q: got dtype"),
        wrong("cu_seqlens_k", torch.zeros(4).int(), FormatError, r"cu_seqlens_k: got shape \[4\]"),
        wrong("max_seqlen_q", -1, FormatError, "max_seqlen_q: got -1"),
        wrong("max_seqlen_k", -2, FormatError, "max_seqlen_k: got -2"),
        wrong("k_scale", None, ScaleError, "k_scale: got None"),
        wrong("v_scale", torch.ones(3), ScaleError, r"v_scale: got shape \[3\]"),
        wrong("prob_scale", torch.ones(3), ScaleError, r"prob_scale: got shape \[3\]"),
        wrong("out_scale", torch.ones(7), ScaleError, "out_scale: 7 groups do not cut 120"),
        wrong("sinks", torch.ones(2), FormatError, r"sinks: got shape \[2\], expected \[6\]"),
        wrong("softmax_scale", math.nan, FormatError, "softmax_scale: got nan"),
        wrong("sliding_window", 0, FormatError, "sliding_window: got 0"),
        wrong("logits_soft_cap", 0.0, FormatError, r"logits_soft_cap: got 0\.0"),
        wrong("out_dtype", torch.int8, FormatError, "out_dtype: got torch.int8"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, value, error, message) -> None:
    good = small(lens=([3, 2], [3, 4])).arguments()
    with pytest.raises(error, match=message):
        varlen_attention(**{**good, name: value})


def test_offsets_of_no_length_at_all_are_refused() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    good = small(lens=([3, 2], [3, 4])).arguments(cu_seqlens_q=none, cu_seqlens_k=none)
    with pytest.raises(FormatError, match="cu_seqlens_q: got no number"):
        varlen_attention(**good)
