"""Paged attention in Triton's interpreter, on the CPU; test_interpreted.py runs this in a process.

Tiles of 16 rows and 16 keys, so that short sequences have whole tiles, cut ones, and several runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from quantattn.kernels import _split_decode
from quantattn.kernels._attention_arguments import TileSizes
from quantattn.kernels.paged_attention import paged_attention
from quantattn.ops import static_quant_fp8
from quantattn.testing import POISON, assert_matches
from tests.ops import page_oracle
from tests.ops.paged_cases import FORMATS, MIXED, Case, draw, fp8_query

# numpy, which interprets, says where numbers overflow or meet a NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

# float32 throughout; half precision: products in float16, whose operands are off by 2^-12.
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0, 1.5, -torch.inf])
DECODE = ([1, 2, 0, 3], [70, 33, 0, 17])


def attend(call, block_n: int = 16):
    rows = max(16, 1 << (call.decode_limit * call.group_size - 1).bit_length())
    return paged_attention(
        call,
        decode_sizes=TileSizes(rows, block_n, 4, 1),
        prefill_sizes=TileSizes(16, block_n, 4, 1),
    )


def assert_right(case: Case, result, bound: float | None = None, **expected) -> None:
    out, lse = result
    want, want_lse = case.expected(**expected)
    assert_matches(out, want, rel_l2=bound or BOUNDS[case.batch.query.dtype])
    # Logits are sums of products with float16 operands: off by 2^-12 of a few units.
    close = 1e-5 if case.batch.query.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=close, atol=close)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("order", "dtype"), [("NHD", torch.float32), ("HND", torch.bfloat16)])
def test_mixed_batches_match_float64(name, order, dtype) -> None:
    case = draw(name, order=order, dtype=dtype, padding=2)
    assert_right(case, attend(case.call()))


@pytest.mark.parametrize(
    ("name", "order"), list(zip(page_oracle.FORMATS, ("NHD", "HND", "NHD"), strict=True))
)
def test_scales_beside_their_rows(name, order) -> None:
    case = draw(name, DECODE, order=order, placement="inline", dtype=torch.float16)
    assert_right(case, attend(case.call()))


@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "dims"),
    [(1, 7, 1, (96, 80)), (5, 3, 3, (4, 4)), (32, 8, 2, (40, 64))],
)
def test_odd_shapes_match_float64(block_size, num_heads, num_kv_heads, dims) -> None:
    case = draw(
        "int8_per_token_head",
        ([20, 2], [41, 19]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dims=dims,
        block_size=block_size,
        dtype=torch.float32,
    )
    assert_right(case, attend(case.call()))


@pytest.mark.parametrize(
    ("lens", "options"),
    [
        (MIXED, {"causal": False}),
        (DECODE, {"causal": False, "softmax_scale": -0.4}),
        (DECODE, {"sliding_window": 1}),
        (MIXED, {"sliding_window": 19}),
        (DECODE, {"sliding_window": 19, "sinks": SINKS}),
        (MIXED, {"sinks": SINKS.bfloat16(), "logits_soft_cap": 0.7}),
    ],
    ids=str,
)
def test_options_match_float64(lens, options) -> None:
    case = draw("fp8_e4m3", lens, dtype=torch.float32)
    assert_right(case, attend(case.call(**options)), **options)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int4_per_token_head", "auto"])
def test_an_fp8_query_is_dequantized_with_its_scale(name) -> None:
    case = draw(name)
    q_scale = torch.tensor([0.02, 0.013])
    codes, meaning = fp8_query(case, q_scale)
    result = attend(case.call(query=codes, q_scale=q_scale))
    assert_right(case, result, query=meaning)


@pytest.mark.parametrize(
    ("name", "prob_scale"),
    [("fp8_e4m3", torch.tensor([1e-5, 0.002])), ("int8_per_token_head", torch.tensor(1 / 448))],
)
def test_fp8_probabilities_hold_their_error_bound(name, prob_scale) -> None:
    case = draw(name, dtype=torch.float32)
    result = attend(case.call(prob_scale=prob_scale))
    assert_right(case, result, bound=3e-2)
    assert not torch.equal(result[0], attend(case.call())[0])


def test_one_key_has_a_probability_that_shows_the_scales_rounding() -> None:
    case = draw("auto", ([1], [1]), dtype=torch.float32)
    out, _ = attend(case.call(prob_scale=torch.tensor(0.04)))
    # 1 / 0.04 = 25 is stored as 24, so the probability 1 becomes 0.96
    torch.testing.assert_close(out[0, 0], 0.96 * case.batch.value[0, 0])


@pytest.mark.parametrize(
    ("name", "groups", "round_through"),
    [("fp8_e4m3", None, True), ("fp8_e4m3", 48, False), ("int4_per_token_head", 6, True)],
)
def test_a_quantized_output_is_the_quantized_float32_output(name, groups, round_through) -> None:
    case = draw(name, padding=1)
    out_scale = torch.tensor(0.0013) if groups is None else torch.linspace(0.001, 0.004, groups)
    fused, _ = attend(case.call(out_scale=out_scale, round_through=round_through))
    source = torch.bfloat16 if round_through else torch.float32
    unfused, _ = attend(case.call(out_dtype=source))
    codes = static_quant_fp8(unfused, out_scale).view(torch.uint8)
    assert torch.equal(fused.view(torch.uint8), codes)
    assert not fused[-1].view(torch.uint8).any()


@pytest.mark.parametrize("name", FORMATS)
def test_what_lies_in_unused_slots_never_reaches_the_output(name) -> None:
    case = draw(name, DECODE)
    before = attend(case.call())
    stored = case.batch.pages.view(torch.uint8)
    unused = ~used_bytes(case)
    assert (stored[unused] == POISON).all()
    stored[unused] = 0x7F
    assert all(torch.equal(*pair) for pair in zip(attend(case.call()), before, strict=True))
    assert before[0].isfinite().all()


def used_bytes(case: Case) -> torch.Tensor:
    """Which bytes of the pages hold an entry."""
    kind = torch.int16 if case.layout.format.storage_dtype is None else torch.uint8
    pages = torch.zeros_like(case.batch.pages.view(torch.uint8)).view(kind)
    views = [case.layout.key_view(pages), case.layout.value_view(pages)]
    views += [view.view(torch.int32) for view in case.layout.scale_views(pages)]
    lengths = case.batch.metadata.seq_lens.tolist()
    for table, length in zip(case.batch.metadata.block_table.tolist(), lengths, strict=True):
        for position, view in itertools.product(range(length), views):
            place = view[table[position // 16], position % 16]
            place.copy_(~torch.zeros_like(place))
    return pages.view(torch.uint8) == 0xFF


@pytest.mark.parametrize(("tokens", "sinks"), [(3, torch.full((6,), 0.5)), (40, None)])
def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity(tokens, sinks) -> None:
    case = draw("auto", ([tokens, 1], [tokens, 9]), dtype=torch.float32)
    # Of sequence 0 only one key is left, which only its last row sees; the other has none.
    call = case.call(sinks=sinks, seq_lens=torch.tensor([1, 0], dtype=torch.int32))
    out, lse = attend(call)
    seen = torch.arange(tokens + 1) == tokens - 1
    assert not out[~seen].any()
    assert (lse[~seen] == -math.inf).all()
    assert out[seen].any(2).all()
    assert lse[seen].isfinite().all()


def test_logits_far_below_zero_are_no_mask() -> None:
    case = draw("auto", ([1], [2]), num_heads=2, dtype=torch.float32)
    keys = case.layout.key_view(case.batch.pages)
    block = int(case.batch.metadata.block_table[0, 0])
    keys[block, :2] = 0.0
    keys[block, :2, :, 0] = torch.tensor([-6e4, -6.0001e4])[:, None]
    query = torch.zeros(1, 2, 24)
    query[..., 0] = 1.0
    out, _ = attend(case.call(query=query, softmax_scale=1.0))
    want, _ = case.expected(query=query.double(), softmax_scale=1.0)
    # Scores of 6e4 / ln 2 are float32 numbers that lie 2^-7 apart.
    assert_matches(out, want, rel_l2=4e-3)


def test_a_large_query_fits_float16_products() -> None:
    case = draw("fp8_e4m3", DECODE)
    query = (case.batch.query.double() * 2.0**40).bfloat16()
    query[0] *= 2.0**-70
    scale = 2.0**-41
    result = attend(case.call(query=query, softmax_scale=scale))
    assert_right(case, result, query=query.double(), softmax_scale=scale)


def test_scales_of_values_may_differ_by_orders_of_magnitude() -> None:
    case = draw("fp8_per_token_head", ([2], [40]))
    scales = case.layout.value_scale_view(case.batch.pages)
    table = case.batch.metadata.block_table[0].tolist()
    for position in range(40):
        scales[table[position // 16], position % 16] = 10.0 ** (position % 9 - 4)
    out, _ = attend(case.call())
    assert_matches(out, case.expected()[0])


def test_keys_behind_the_window_are_not_read() -> None:
    case = draw("fp8_e4m3", ([2, 30], [70, 70]), dtype=torch.float32)
    right = attend(case.call(sliding_window=9))
    table = case.batch.metadata.block_table.clone()
    table[0, :3], table[1, :1] = 2**30, 2**30
    again = attend(case.call(sliding_window=9, block_table=table))
    assert all(torch.equal(*pair) for pair in zip(again, right, strict=True))


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_batch_of_nothing_but_padding_is_zero(tokens) -> None:
    case = draw("auto", ([], []), padding=tokens)
    out, lse = attend(case.call())
    assert not out.any()
    assert (lse == -math.inf).all()
    assert len(out) == tokens


def test_more_padding_than_a_tile() -> None:
    case = draw("fp8_e4m3", ([1, 20], [5, 20]), padding=40)
    out, lse = attend(case.call())
    assert not out[21:].any()
    assert (lse[21:] == -math.inf).all()
    assert_matches(out, case.expected()[0])


def test_more_sequences_than_are_counted_at_once(monkeypatch) -> None:
    monkeypatch.setattr(_split_decode, "SEQUENCES", 4)
    lens = [1, 20, 3, 17, 5, 0, 40, 8, 2, 33]
    case = draw("fp8_e4m3", ([min(1, length) for length in lens], lens), num_heads=2, dims=(4, 4))
    assert_right(case, attend(case.call()))


def test_strided_arguments_give_the_same() -> None:
    case = draw("fp8_e4m3", DECODE)
    plain = case.call(sinks=SINKS)
    names = ("query", "cu_seqlens_q", "seq_lens", "block_table", "sinks")
    wide = {name: torch.stack([getattr(plain, name)] * 2, -1)[..., 0] for name in names}
    assert torch.equal(attend(plain)[0], attend(dataclasses.replace(plain, **wide))[0])


def test_no_lse_unless_it_is_asked_for() -> None:
    case = draw("fp8_e4m3", DECODE)
    out, lse = attend(case.call(return_lse=False))
    assert lse.shape == (0,)
    assert torch.equal(out, attend(case.call())[0])


def test_the_longest_query_decides_which_kernels_run() -> None:
    case = draw("fp8_e4m3", DECODE, dtype=torch.float32)
    decoded = attend(case.call())
    both = attend(dataclasses.replace(case.call(), max_seqlen_q=9))
    for pair in zip(decoded, both, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)
