"""write_kv and paged_attention over pages that hold the scale of each row: bytes, then meaning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from quantattn.cache_writes import holds_entries
from quantattn.errors import FormatError
from quantattn.ops import paged_attention, write_kv
from quantattn.testing import POISON, assert_matches, make_batch
from tests.ops import oracles, page_oracle

HEADS, DIM, DIM_V, SIZE = 2, 16, 8, 4
SCALED = pytest.mark.parametrize("name", page_oracle.FORMATS)
PLACED = pytest.mark.parametrize("placement", page_oracle.PLACEMENTS)
ORDERED = pytest.mark.parametrize("order", page_oracle.ORDERS)
MIXED = ([1, 3, 0, 65, 1, 2], [17, 3, 0, 70, 64, 16])
LAYER_SCALE = torch.tensor(0.5)


def place(name, order="NHD", placement="page", *, dims=(DIM, DIM_V), heads=HEADS, size=SIZE):
    return page_oracle.Pages(name, dims, heads, size, order, placement)


def poisoned(where: page_oracle.Pages, num_blocks: int, byte: int = POISON, gap: int = 12):
    """Bytes of pages with gaps, and the pages in them."""
    everything = torch.full((num_blocks, where.page_bytes + gap), byte, dtype=torch.uint8)
    return everything, everything[:, : where.page_bytes]


def write(where: page_oracle.Pages, key, value, pages, slots, **more) -> None:
    write_kv(
        key,
        value,
        pages,
        torch.as_tensor(slots),
        k_scale=None,
        v_scale=None,
        kv_cache_dtype=where.name,
        layout=where.order,
        scale_placement=where.placement,
        **more,
    )


def written_by_hand(where: page_oracle.Pages, everything, key, value, slots):
    """The same bytes after the oracle's write."""
    expected = everything.numpy().copy()
    where.write_tokens(expected, key, value, slots)
    return expected


def read_sides(where: page_oracle.Pages, pages, slots) -> list[torch.Tensor]:
    """Keys and values of some slots, float64 `[len(slots), heads, width]`."""
    return [
        torch.from_numpy(
            np.array(
                [
                    [where.read(pages[s // where.size].numpy(), side, s % where.size, head)]
                    for s in slots
                    for head in range(where.heads)
                ]
            ).reshape(len(slots), where.heads, where.dims[side])
        )
        for side in range(2)
    ]


@SCALED
@PLACED
@ORDERED
@pytest.mark.parametrize("byte", [POISON, 0x7F])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_every_byte_is_as_written_by_hand(name, placement, order, byte, source) -> None:
    where = place(name, order, placement)
    everything, pages = poisoned(where, 5, byte)
    slots = [17, 0, 6, -1, 19]
    key, value = (torch.randn(5, HEADS, width).mul(3).to(source) for width in where.dims)
    expected = written_by_hand(where, everything, key, value, slots)
    write(where, key, value, pages, slots)
    np.testing.assert_array_equal(everything.numpy(), expected)


@SCALED
@PLACED
@ORDERED
@pytest.mark.parametrize(("dims", "heads", "size"), [((96, 96), 1, 1), ((128, 64), 3, 16)])
def test_odd_shapes_are_as_written_by_hand(name, placement, order, dims, heads, size) -> None:
    where = place(name, order, placement, dims=dims, heads=heads, size=size)
    everything, pages = poisoned(where, 4)
    slots = torch.randperm(4 * size)[: max(1, size // 2)].tolist()
    key, value = (torch.randn(len(slots), heads, width) for width in dims)
    expected = written_by_hand(where, everything, key, value, slots)
    write(where, key, value, pages, slots)
    np.testing.assert_array_equal(everything.numpy(), expected)


@SCALED
@PLACED
@pytest.mark.parametrize("slots", [[0, 1, -1, -1], [-1, -1, -1, -1], [-5, -1, 1, 0]])
def test_padding_touches_no_code_and_no_scale(name, placement, slots) -> None:
    where = place(name, placement=placement)
    everything, pages = poisoned(where, 2)
    key, value = torch.randn(4, HEADS, DIM), torch.randn(4, HEADS, DIM_V)
    expected = written_by_hand(where, everything, key, value, slots)
    write(where, key, value, pages, slots)
    np.testing.assert_array_equal(everything.numpy(), expected)


@SCALED
def test_no_tokens_write_nothing(name) -> None:
    where = place(name)
    everything, pages = poisoned(where, 2)
    slots = torch.zeros(0, dtype=torch.int64)
    write(where, torch.randn(0, HEADS, DIM), torch.randn(0, HEADS, DIM_V), pages, slots)
    assert (everything == POISON).all()


@SCALED
def test_keys_may_be_slices_of_a_packed_projection(name) -> None:
    where = place(name)
    packed = torch.randn(3, HEADS * (DIM + DIM_V) + 5)
    key = packed[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
    value = packed[:, HEADS * DIM : -5].unflatten(1, (HEADS, DIM_V))
    (_, strided), (_, contiguous) = poisoned(where, 2), poisoned(where, 2)
    write(where, key, value, strided, [3, 4, 0])
    write(where, key.contiguous(), value.contiguous(), contiguous, [3, 4, 0])
    assert torch.equal(strided, contiguous)


@SCALED
@PLACED
def test_layers_packed_in_one_buffer_keep_to_themselves(name, placement) -> None:
    where = place(name, placement=placement)
    buffer = torch.full((3, 4, where.page_bytes), POISON, dtype=torch.uint8)
    expected = buffer.clone()
    for layer in range(4):
        key, value = torch.randn(2, HEADS, DIM) * (layer + 1), torch.randn(2, HEADS, DIM_V)
        slots = [layer, 11 - layer]
        expected[:, layer] = torch.from_numpy(
            written_by_hand(where, expected[:, layer], key, value, slots)
        )
        write(where, key, value, buffer[:, layer], slots)
    assert torch.equal(buffer, expected)


@SCALED
@PLACED
def test_blocks_beyond_two_to_the_31_bytes_are_addressed(name, placement) -> None:
    where = place(name, placement=placement)
    stride = 2**28
    # Virtual memory of numpy's: untouched pages are free, and torch's tests fill what torch gives.
    storage = torch.from_numpy(np.empty(9 * stride, np.uint8))
    pages = storage.as_strided((9, where.page_bytes), (stride, 1))
    key, value = torch.randn(1, HEADS, DIM), torch.randn(1, HEADS, DIM_V)
    write(where, key, value, pages, [8 * SIZE + 3])
    expected = np.zeros(where.page_bytes, np.uint8)
    for head in range(HEADS):
        where.write(expected, 0, 3, head, key[0, head].numpy())
        where.write(expected, 1, 3, head, value[0, head].numpy())
    got = pages[8].numpy()
    for side, head in itertools.product(range(2), range(HEADS)):
        np.testing.assert_array_equal(
            where.read(got, side, 3, head), where.read(expected, side, 3, head)
        )


@SCALED
def test_layer_scales_are_ignored_and_not_tied_to_the_pages(name) -> None:
    where = place(name)
    (_, pages), (_, without) = poisoned(where, 2), poisoned(where, 2)
    scales = torch.tensor(0.5), torch.tensor(0.25)
    key, value = torch.randn(1, HEADS, DIM), torch.randn(1, HEADS, DIM_V)
    slots = torch.tensor([5])
    arguments = {"kv_cache_dtype": name}
    write_kv(key, value, pages, slots, k_scale=scales[0], v_scale=scales[1], **arguments)
    write_kv(key, value, without, slots, k_scale=None, v_scale=None, **arguments)
    assert torch.equal(pages, without)
    assert not any(holds_entries(scale) for scale in scales)


def arguments(batch, name, **more):
    meta = batch.metadata
    return {
        "cu_seqlens_q": meta.cu_seqlens_q,
        "seq_lens": meta.seq_lens,
        "block_table": meta.block_table,
        "max_seqlen_q": meta.max_seqlen_q,
        "num_kv_heads": batch.key.shape[1],
        "head_dim_v": batch.value.shape[2],
        "kv_cache_dtype": name,
        **more,
    }


def expected_output(batch, where: page_oracle.Pages, query=None, **options):
    """Float64 attention over what the bytes of the pages mean."""
    sequences = []
    for table, length in zip(
        batch.metadata.block_table.tolist(), batch.metadata.seq_lens.tolist(), strict=True
    ):
        slots = [table[p // where.size] * where.size + p % where.size for p in range(length)]
        sequences.append(tuple(read_sides(where, batch.pages, slots)))
    query = batch.query.double() if query is None else query
    options.setdefault("softmax_scale", where.dims[0] ** -0.5)
    query_lens = batch.metadata.cu_seqlens_q.diff().tolist()
    return oracles.attend(query, sequences, query_lens, oracles.Options(**options))


def drawn_batch(where: page_oracle.Pages, lens=MIXED, *, num_heads=6, **more):
    return make_batch(
        *lens,
        num_heads=num_heads,
        num_kv_heads=where.heads,
        head_dim=where.dims[0],
        head_dim_v=where.dims[1],
        block_size=where.size,
        kv_cache_dtype=where.name,
        layout=where.order,
        scale_placement=where.placement,
        **more,
    )


@SCALED
@PLACED
@ORDERED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_batches_match_float64(name, placement, order, dtype) -> None:
    where = place(name, order, placement, dims=(24, 16), size=16)
    batch = drawn_batch(where, dtype=dtype, padding=2)
    out, lse = paged_attention(
        batch.query,
        batch.pages,
        layout=order,
        scale_placement=placement,
        return_lse=True,
        **arguments(batch, name),
    )
    want, want_lse = expected_output(batch, where)
    assert out.dtype == dtype
    assert_matches(out, want, rel_l2=1e-6 if dtype == torch.float32 else 4e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@SCALED
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(7, 1, 96), (3, 3, 8), (8, 2, 128)])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_odd_shapes_match_float64(name, num_heads, num_kv_heads, dim, size) -> None:
    where = place(name, dims=(dim, dim), heads=num_kv_heads, size=size)
    batch = drawn_batch(where, ([2, 1, 3], [33, 1, 31]), num_heads=num_heads)
    out = paged_attention(batch.query, batch.pages, **arguments(batch, name))
    assert_matches(out, expected_output(batch, where)[0])


@SCALED
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 9, "logits_soft_cap": 0.7},
        {"causal": False, "softmax_scale": 0.4},
        {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0, 1.5, -torch.inf])},
        {"prob_scale": torch.tensor([0.004, 0.003])},
    ],
    ids=str,
)
def test_options_match_float64(name, options) -> None:
    where = place(name, dims=(24, 16))
    batch = drawn_batch(where, dtype=torch.float32)
    out = paged_attention(batch.query, batch.pages, **arguments(batch, name, **options))
    # A probability next to a tie of its FP8 code may round either way.
    bound = 1e-3 if "prob_scale" in options else 1e-6
    assert_matches(out, expected_output(batch, where, **options)[0], rel_l2=bound)


@SCALED
def test_an_fp8_query_and_output_match_float64(name) -> None:
    where = place(name, dims=(24, 16))
    batch = drawn_batch(where, dtype=torch.float32)
    q_scale, out_scale = torch.tensor([0.02, 0.03]), torch.tensor(0.01)
    per_head = q_scale.repeat_interleave(3)[:, None]
    query = (batch.query / per_head).to(torch.float8_e4m3fn)
    given = arguments(batch, name, q_scale=q_scale)
    out = paged_attention(query, batch.pages, **given, out_dtype=torch.float32)
    want, _ = expected_output(batch, where, query.double() * per_head.double())
    assert_matches(out, want, rel_l2=1e-6)
    stored = paged_attention(query, batch.pages, **given, out_scale=out_scale)
    quantized = (out / out_scale).to(torch.float8_e4m3fn)
    assert torch.equal(stored.view(torch.uint8), quantized.view(torch.uint8))


@SCALED
@PLACED
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_what_lies_in_unused_slots_never_reaches_the_output(name, placement, byte) -> None:
    where = place(name, placement=placement)
    outputs = []
    for fill in (0x11, byte):
        _, pages = poisoned(where, 3, fill)
        key, value = (
            torch.arange(3.0 * HEADS * width).sin().view(3, HEADS, width) for width in where.dims
        )
        write(where, key, value, pages, [4, 5, 6])
        int32 = {"dtype": torch.int32}
        out = paged_attention(
            torch.ones(2, HEADS, DIM),
            pages,
            cu_seqlens_q=torch.tensor([0, 1, 2], **int32),
            seq_lens=torch.tensor([3, 0], **int32),
            block_table=torch.tensor([[1, 2], [0, 0]], **int32),
            max_seqlen_q=1,
            num_kv_heads=HEADS,
            head_dim_v=DIM_V,
            kv_cache_dtype=name,
            scale_placement=placement,
        )
        assert (out[1] == 0).all()
        outputs.append(out)
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


@SCALED
def test_a_row_of_nan_stays_with_its_own_token_and_head(name) -> None:
    where = place(name, size=16)
    (_, clean), (_, spoilt) = poisoned(where, 1), poisoned(where, 1)
    key, value = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, DIM_V)
    write(where, key, value, clean, [0, 1, 2])
    key[1, 0], value[1, 0] = torch.nan, torch.inf
    write(where, key, value, spoilt, [0, 1, 2])
    for token, head in itertools.product(range(3), range(HEADS)):
        for side in range(2):
            rows = [where.read(p[0].numpy(), side, token, head) for p in (clean, spoilt)]
            assert np.array_equal(*rows) == ((token, head) != (1, 0))


@SCALED
def test_layers_that_share_pages_read_each_others_scales(name) -> None:
    where = place(name)
    everything, pages = poisoned(where, 2)
    alias = everything.view(-1).as_strided(pages.shape, pages.stride())
    key, value = torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM_V)
    key[..., 2], value[..., 5] = 0.635, -0.25  # one number a row: exact in every format
    write(where, key, value, pages, [3])
    for side, amax in enumerate((0.635, 0.25)):
        assert abs(read_sides(where, alias, [3])[side]).max() == pytest.approx(amax, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "bound"),
    [
        ("fp8_per_token_head", "normal", 0.05),
        ("fp8_per_token_head", "heavy-tailed", 0.05),
        ("fp8_per_token_head", "outlier channels", 0.05),
        ("int8_per_token_head", "normal", 0.01),
        ("int8_per_token_head", "heavy-tailed", 0.02),
        ("int8_per_token_head", "outlier channels", 0.03),
        ("int4_per_token_head", "normal", 0.15),
        ("int4_per_token_head", "heavy-tailed", 0.18),
        ("int4_per_token_head", "outlier channels", 0.18),
    ],
)
def test_attention_stays_near_that_over_unquantized_keys_and_values(name, kind, bound) -> None:
    where = place(name, dims=(64, 64), size=16)
    batch = drawn_batch(where, ([4], [200]), dtype=torch.float32, num_heads=4)
    key, value = (
        page_oracle.drawn(kind, 200 * HEADS, 64, seed).view(200, HEADS, 64) for seed in (5, 6)
    )
    key = key / key.norm(dim=-1, keepdim=True) * 8  # logits of a few units, whatever the kind
    table = batch.metadata.block_table[0].tolist()
    slots = [table[p // 16] * 16 + p % 16 for p in range(200)]
    write(where, key, value, batch.pages, slots)
    out = paged_attention(batch.query, batch.pages, **arguments(batch, name))
    sequence = [(key.double(), value.double())]
    want, _ = oracles.attend(batch.query.double(), sequence, [4], oracles.Options(64**-0.5))
    assert_matches(out, want, rel_l2=bound)
    with pytest.raises(AssertionError):
        assert_matches(out, want, rel_l2=bound / 10)


@PLACED
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pages: pages[:, 1:], "no multiple of the"),
        (lambda pages: pages.as_strided((2, pages.shape[1]), pages.stride(), 2), "start 2 bytes"),
        (lambda pages: pages.view(torch.float8_e4m3fn), "expected one of: torch.uint8$"),
    ],
    ids=["width", "alignment", "dtype"],
)
def test_pages_that_cannot_hold_scales_are_refused(placement, change, message) -> None:
    where = place("fp8_per_token_head", placement=placement)
    batch = drawn_batch(where, ([1], [3]), num_heads=2)
    pages = change(torch.zeros(3, where.page_bytes, dtype=torch.uint8))
    with pytest.raises(FormatError, match=message):
        write(where, batch.key, batch.value, pages, [0, 1, 2])
    given = arguments(batch, where.name, scale_placement=placement)
    with pytest.raises(FormatError, match=message):
        paged_attention(batch.query, pages, **given)


def test_int4_refuses_rows_of_half_words() -> None:
    where = place("int4_per_token_head", dims=(12, 8))
    key, value = torch.randn(1, HEADS, 12), torch.randn(1, HEADS, 8)
    pages = torch.zeros(1, 400, dtype=torch.uint8)
    with pytest.raises(FormatError, match=r"head_dim, head_dim_v: got 12 and 8.*multiple of 8"):
        write(where, key, value, pages, [0])
