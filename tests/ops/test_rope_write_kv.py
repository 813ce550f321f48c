"""rope_write_kv: the bits of a rotation, of write_kv and of static_quant_fp8, one after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantattn import ops
from quantattn.cache_writes import holds_entries
from quantattn.errors import FormatError, ScaleError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.ops import rope_write_kv, write_kv
from quantattn.testing import poisoned_pages
from tests import fp8_oracle
from tests.ops.page_oracle import FORMATS as ROW_FORMATS
from tests.ops.page_oracle import ORDERS, PLACEMENTS
from tests.ops.rope_oracle import make_table, pair, turn

HEADS, KV_HEADS, DIM, DIM_V, SIZE = 6, 3, 24, 16, 4
POSITIONS = [7, 0, 30, 7, 12]
SLOTS = [17, 3, -1, 0, 6]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
K_SCALE, V_SCALE = torch.tensor([0.3, 0.7, 0.05]), torch.tensor(1.9)
Q_SCALES = [torch.tensor(0.013), torch.tensor([0.021]), torch.tensor([0.011, 0.031, 0.007])]


def new_rows(dtype=torch.float32, tokens: int = 5):
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V))
    return [torch.randn(tokens, *shape).mul(3).to(dtype) for shape in shapes]


def new_pages(name: str, order="NHD", placement="page", dtype=torch.float16):
    fmt = parse_kv_cache_dtype(name)
    layout = PageLayout(KV_HEADS, DIM, DIM_V, order, fmt, placement)
    return poisoned_pages(5, layout.page_size(SIZE), torch.uint8 if fmt.is_quantized else dtype)


def run(query, key, value, pages, table, kv_cache_dtype="fp8", **changes):
    arguments = {
        "slot_mapping": torch.tensor(SLOTS),
        "positions": torch.tensor(POSITIONS),
        "k_scale": K_SCALE,
        "v_scale": V_SCALE,
        "kv_cache_dtype": kv_cache_dtype,
    }
    table = {"cos_sin_cache": table}
    return rope_write_kv(query, key, value, pages, **{**arguments, **table, **changes})


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(
        actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [DIM, 10, 2])
def test_a_pair_turns_as_a_complex_number_does(interleaved, rotary_dim) -> None:
    query, key, value = new_rows()
    table = make_table(31, rotary_dim, torch.float32)
    out = run(query, key, value, new_pages("fp8"), table, interleaved=interleaved)
    angle = torch.complex(*table.double()[POSITIONS].chunk(2, dim=1))
    for i in range(rotary_dim // 2):
        a, b = pair(i, rotary_dim, interleaved)
        exact = torch.complex(query[..., a].double(), query[..., b].double()) * angle[:, i, None]
        actual = torch.complex(out[..., a].double(), out[..., b].double())
        # Two products and their sum, each rounded to 24 bits of numbers below 16 * sqrt(2).
        assert (actual - exact).abs().max() < 3 * 32 * 2.0**-24
    assert same_bits(out[..., rotary_dim:], query[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [DIM, 10])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
def test_every_product_and_sum_is_rounded_once(interleaved, rotary_dim, dtype, table_dtype) -> None:
    query, key, value = new_rows(dtype)
    table = make_table(31, rotary_dim, table_dtype)
    pages, expected = new_pages("auto", dtype=dtype), new_pages("auto", dtype=dtype)
    options = {"interleaved": interleaved}
    out = run(query, key, value, pages, table, "auto", **options)
    assert same_bits(out, turn(query, POSITIONS, table, **options))
    turned = turn(key, POSITIONS, table, **options)
    slots = torch.tensor(SLOTS)
    write_kv(turned, value, expected, slots, k_scale=None, v_scale=None, kv_cache_dtype="auto")
    assert bytes(pages.untyped_storage()) == bytes(expected.untyped_storage())


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2", *ROW_FORMATS])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pages_hold_what_write_kv_writes_of_rotated_keys(name, order, placement) -> None:
    query, key, value = new_rows(torch.bfloat16)
    table = make_table(31, 16, torch.bfloat16)
    pages, expected = (new_pages(name, order, placement) for _ in range(2))
    place = {"layout": order, "scale_placement": placement}
    run(query, key, value, pages, table, name, **place)
    scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
    turned = turn(key, POSITIONS, table)
    write_kv(turned, value, expected, torch.tensor(SLOTS), **scales, kv_cache_dtype=name, **place)
    assert bytes(pages.untyped_storage()) == bytes(expected.untyped_storage())


@pytest.mark.parametrize("q_scale", Q_SCALES, ids=["[]", "[1]", "[num_kv_heads]"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_quantized_from_their_rounded_rotation(q_scale, dtype) -> None:
    query, key, value = new_rows(dtype)
    table = make_table(31, 16, torch.float32)
    out = run(query, key, value, new_pages("fp8"), table, q_scale=q_scale)
    by_head = q_scale.expand(KV_HEADS).repeat_interleave(HEADS // KV_HEADS).numpy()
    turned = turn(query, POSITIONS, table).float().numpy()
    codes = fp8_oracle.encode(fp8_oracle.quotient(turned, by_head[:, None]), torch.float8_e4m3fn)
    assert out.dtype == torch.float8_e4m3fn
    assert out.is_contiguous()
    np.testing.assert_array_equal(out.view(torch.uint8).numpy(), codes)


def test_one_row_of_the_table_serves_any_position_of_padding() -> None:
    query, key, value = new_rows()
    table = make_table(31, DIM, torch.float32)
    positions = torch.tensor([2**40, -1, 30, 31, -(2**62)])
    slots = torch.full((5,), -1)
    pages = new_pages("fp8")
    before = bytes(pages.untyped_storage())
    out = run(query, key, value, pages, table, positions=positions, slot_mapping=slots)
    assert same_bits(out, turn(query, [30, 0, 30, 30, 0], table))
    assert bytes(pages.untyped_storage()) == before


def test_a_stored_token_whose_position_no_row_describes_is_nan() -> None:
    query, key, value = new_rows()
    table = make_table(31, 10, torch.float32)
    positions = torch.tensor([31, 0, -1, -1, 12])
    pages, expected = new_pages("fp8"), new_pages("fp8")
    out = run(query, key, value, pages, table, positions=positions)
    unknown = [0, 3]
    assert out[unknown, :, :10].isnan().all()
    assert same_bits(out[unknown, :, 10:], query[unknown, :, 10:])
    assert same_bits(out[[1, 2, 4]], turn(query[[1, 2, 4]], [0, 0, 12], table))
    turned = turn(key, [0, 0, 0, 0, 12], table)
    turned[unknown, :, :10] = torch.nan
    scales = {"k_scale": K_SCALE, "v_scale": V_SCALE, "kv_cache_dtype": "fp8"}
    write_kv(turned, value, expected, torch.tensor(SLOTS), **scales)
    assert bytes(pages.untyped_storage()) == bytes(expected.untyped_storage())


def test_rows_may_be_slices_of_a_packed_projection() -> None:
    widths = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM_V]
    packed = torch.randn(5, sum(widths) + 5)[:, 5:].split(widths, dim=1)
    strided = [x.unflatten(1, (-1, w)) for x, w in zip(packed, (DIM, DIM, DIM_V), strict=True)]
    table = make_table(62, 40, torch.float32)[::2, ::2]
    pages, expected = new_pages("fp8"), new_pages("fp8")
    out = run(*strided, pages, table, q_scale=Q_SCALES[2])
    compact = [x.contiguous() for x in (*strided, table)]
    assert same_bits(out, run(*compact[:3], expected, compact[3], q_scale=Q_SCALES[2]))
    assert bytes(pages.untyped_storage()) == bytes(expected.untyped_storage())


@pytest.mark.parametrize("q_scale", [None, Q_SCALES[2]], ids=["plain", "quantized"])
def test_no_tokens_write_nothing_and_note_nothing(q_scale) -> None:
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    index = {name: torch.zeros(0, dtype=torch.int64) for name in ("slot_mapping", "positions")}
    pages = new_pages("fp8")
    before = bytes(pages.untyped_storage())
    table = make_table(31, DIM, torch.float32)
    out = run(*new_rows(tokens=0), pages, table, q_scale=q_scale, **scales, **index)
    assert out.shape == (0, HEADS, DIM)
    assert bytes(pages.untyped_storage()) == before
    assert not holds_entries(scales["k_scale"])


def test_writing_notes_both_scales_and_not_the_query_s() -> None:
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    q_scale, pages = torch.tensor(0.125), new_pages("fp8")
    table = make_table(31, DIM, torch.float32)
    run(*new_rows(), pages, table, q_scale=q_scale, **scales)
    assert holds_entries(scales["k_scale"])
    assert holds_entries(scales["v_scale"])
    assert not holds_entries(q_scale)


def test_a_format_that_ignores_the_scales_notes_nothing() -> None:
    k_scale, pages = torch.tensor(0.5), new_pages("auto")
    run(*new_rows(), pages, make_table(31, DIM, torch.float32), "auto", k_scale=k_scale)
    assert not holds_entries(k_scale)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("q_scale", [None, Q_SCALES[2]], ids=["plain", "quantized"])
@pytest.mark.parametrize("name", ["auto", "fp8_e4m3", "int4_per_token_head"])
def test_passes_opcheck(tokens, q_scale, name) -> None:
    scales = (None, None) if name != "fp8_e4m3" else (K_SCALE, V_SCALE)
    index = torch.tensor(SLOTS)[:tokens], torch.tensor(POSITIONS)[:tokens]
    table = make_table(31, 10, torch.float32)
    tail = (name, "HND", "inline", index[1], table, True, q_scale)
    rows = [torch.randn(tokens, h, 2 * w)[..., ::2] for h, w in ((6, 24), (3, 24), (3, 16))]
    operation = torch.ops.quantattn.rope_write_kv.default
    arguments = (*rows, new_pages(name, "HND", "inline"), index[0], *scales, *tail)
    results = torch.library.opcheck(operation, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_compiles_without_graph_breaks_for_any_count_of_tokens() -> None:
    table = make_table(31, 10, torch.float32)

    def layer(query, key, value, pages, slots, positions):
        index = {"slot_mapping": slots, "positions": positions}
        out = run(query, key, value, pages, table, q_scale=Q_SCALES[2], **index)
        return out.view(torch.uint8)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 3):
        rows, actual_pages = new_rows(tokens=tokens), new_pages("fp8")
        eager_pages = actual_pages.clone()
        index = torch.tensor(SLOTS)[:tokens], torch.tensor(POSITIONS)[:tokens]
        actual = compiled(*rows, actual_pages, *index)
        assert torch.equal(actual, layer(*rows, eager_pages, *index))
        assert torch.equal(actual_pages, eager_pages)


GOOD = {
    "query": torch.zeros(3, HEADS, DIM),
    "key": torch.zeros(3, KV_HEADS, DIM),
    "value": torch.zeros(3, KV_HEADS, DIM_V),
    "kv_cache": torch.zeros(2, SIZE * KV_HEADS * (DIM + DIM_V), dtype=torch.float8_e4m3fn),
    "slot_mapping": torch.zeros(3, dtype=torch.int64),
    "positions": torch.zeros(3, dtype=torch.int64),
    "cos_sin_cache": torch.zeros(9, DIM),
    "k_scale": torch.tensor(0.5),
    "v_scale": torch.tensor(0.25),
    "kv_cache_dtype": "fp8",
}


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("query", torch.zeros(3, HEADS * DIM), FormatError, r"query: got shape \[3, 144\]"),
        ("query", torch.zeros(3, HEADS, DIM).double(), FormatError, "query: got dtype .*float64"),
        ("query", torch.zeros(3, 5, DIM), FormatError, "query: 5 heads .* 3 KV heads"),
        ("key", torch.zeros(2, KV_HEADS, DIM), FormatError, r"key: got shape \[2, 3, 24\]"),
        ("key", torch.zeros(3, KV_HEADS, 20), FormatError, r"key: got shape \[3, 3, 20\]"),
        ("key", torch.zeros(3, 0, DIM), FormatError, "query: 6 heads .* 0 KV heads"),
        ("key", torch.zeros(3, KV_HEADS, DIM).half(), FormatError, "key: got dtype .*float16"),
        ("key", torch.zeros(3, KV_HEADS, DIM, device="meta"), FormatError, "key is on meta"),
        ("value", torch.zeros(3, 2, DIM_V), FormatError, r"value: got shape \[3, 2, 16\]"),
        ("value", torch.zeros(3, KV_HEADS, DIM_V).half(), FormatError, "value: got dtype"),
        ("kv_cache", torch.zeros(2, 480), FormatError, "kv_cache: got dtype torch.float32"),
        ("kv_cache", GOOD["kv_cache"][:, :-1], FormatError, "no multiple of the 120"),
        ("slot_mapping", torch.zeros(2, dtype=torch.int64), FormatError, r"slot_mapping: .*\[2\]"),
        ("positions", torch.zeros(2, dtype=torch.int64), FormatError, r"positions: .*\[2\]"),
        ("positions", torch.zeros(3, dtype=torch.int32), FormatError, "positions: .*int32"),
        ("positions", torch.zeros(3, device="meta").long(), FormatError, "positions is on meta"),
        ("cos_sin_cache", torch.zeros(9), FormatError, r"cos_sin_cache: got shape \[9\]"),
        ("cos_sin_cache", torch.zeros(9, DIM + 2), FormatError, "2 to head_dim 24 numbers"),
        ("cos_sin_cache", torch.zeros(9, 7), FormatError, r"cos_sin_cache: got shape \[9, 7\]"),
        ("cos_sin_cache", torch.zeros(9, 0), FormatError, r"cos_sin_cache: got shape \[9, 0\]"),
        ("cos_sin_cache", torch.zeros(0, DIM), FormatError, r"cos_sin_cache: got shape \[0, 24\]"),
        ("cos_sin_cache", torch.zeros(9, DIM).double(), FormatError, "cos_sin_cache: got dtype"),
        ("cos_sin_cache", torch.zeros(9, DIM, device="meta"), FormatError, "cos_sin_cache is on"),
        ("k_scale", None, ScaleError, "k_scale: got None"),
        ("v_scale", None, ScaleError, "v_scale: got None"),
        ("v_scale", torch.ones(6), ScaleError, r"v_scale: got shape \[6\], expected \[3\]"),
        ("q_scale", torch.ones(6), ScaleError, r"q_scale: got shape \[6\], expected \[3\]"),
        ("q_scale", 0.5, ScaleError, "q_scale: got float"),
        ("q_scale", torch.tensor(0.5, device="meta"), ScaleError, "q_scale is on meta, .* on cpu"),
        ("scale_placement", "row", FormatError, "scale_placement: got 'row'"),
        ("kv_cache_dtype", "fp4", FormatError, "'fp4'"),
        ("layout", "DHN", FormatError, "layout: got 'DHN'"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, wrong, error, message) -> None:
    with pytest.raises(error, match=message):
        rope_write_kv(**{**GOOD, name: wrong})


def test_the_table_of_refusals_starts_from_a_call_that_runs() -> None:
    assert ops.rope_write_kv(**GOOD).shape == (3, HEADS, DIM)
