"""Views of K and V rows, for both head orders, over every kind of storage an engine may have."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantattn.errors import FormatError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout, split_slots
from tests.ops import page_oracle

NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM, DIM_V = 3, 5, 2, 7, 3


def expected_index(order: str, side: str, offset: int, head: int, d: int) -> int:
    """Place of a number in its page, counted by hand."""
    width = DIM if side == "key" else DIM_V
    start = 0 if side == "key" else BLOCK_SIZE * HEADS * DIM
    row = offset * HEADS + head if order == "NHD" else head * BLOCK_SIZE + offset
    return start + row * width + d


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("storage", ["compact", "padded pages", "one layer of a shared buffer"])
def test_views_find_each_number_in_any_storage(order, side, storage) -> None:
    layout = PageLayout(HEADS, DIM, DIM_V, order)
    size = layout.page_size(BLOCK_SIZE)
    buffer = torch.arange(4 * NUM_BLOCKS * (size + 6))
    pages = {
        "compact": buffer[: NUM_BLOCKS * size].view(NUM_BLOCKS, size),
        "padded pages": buffer[: NUM_BLOCKS * (size + 6)].view(NUM_BLOCKS, size + 6)[:, :size],
        "one layer of a shared buffer": buffer.view(NUM_BLOCKS, 4, size + 6)[:, 2, 1 : size + 1],
    }[storage]
    view = layout.key_view(pages) if side == "key" else layout.value_view(pages)
    assert view.shape == (NUM_BLOCKS, BLOCK_SIZE, HEADS, DIM if side == "key" else DIM_V)
    for block, offset, head, d in [(0, 0, 0, 0), (2, 4, 1, 2), (1, 3, 0, 1)]:
        index = expected_index(order, side, offset, head, d)
        assert view[block, offset, head, d] == pages[block, index]


def test_contiguous_engine_tensors_are_pages_when_flattened() -> None:
    nhd = torch.randn(3, 2, 4, 2, 6)
    layout = PageLayout(2, 6, 6, "NHD")
    assert torch.equal(layout.key_view(nhd.flatten(1)), nhd[:, 0])
    assert torch.equal(layout.value_view(nhd.flatten(1)), nhd[:, 1])
    hnd = torch.randn(3, 2, 2, 4, 6)
    layout = PageLayout(2, 6, 6, "HND")
    assert torch.equal(layout.key_view(hnd.flatten(1)), hnd[:, 0].transpose(1, 2))
    assert torch.equal(layout.value_view(hnd.flatten(1)), hnd[:, 1].transpose(1, 2))


def test_views_share_memory_with_the_pages() -> None:
    pages = torch.zeros(2, 4 * 2 * 6)
    PageLayout(2, 3, 3).value_view(pages)[1, 3, 1, 2] = 5.0
    assert pages[1, -1] == 5.0


def test_a_page_of_no_whole_number_of_tokens_is_refused_with_the_numbers() -> None:
    with pytest.raises(FormatError, match=r"101 elements.*multiple of the 20"):
        PageLayout(2, 7, 3).block_size(torch.zeros(2, 101))


def test_an_empty_page_is_refused() -> None:
    with pytest.raises(FormatError, match="0 elements"):
        PageLayout(2, 7, 3).block_size(torch.zeros(2, 0))


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(FormatError, match=r"'NDH'.*NHD"):
        PageLayout(2, 7, 3, "NDH")


@pytest.mark.parametrize("sizes", [(0, 7, 3), (2, 0, 3), (2, 7, -1)])
def test_widths_out_of_range_are_refused(sizes) -> None:
    with pytest.raises(FormatError, match="expected at least 1, 1 and 0"):
        PageLayout(*sizes)


@given(st.lists(st.integers(0, 2**40), min_size=1), st.integers(1, 300))
def test_slots_split_as_division_with_remainder(slots, block_size) -> None:
    blocks, offsets = split_slots(torch.tensor(slots), block_size)
    expected = [divmod(slot, block_size) for slot in slots]
    assert list(zip(blocks.tolist(), offsets.tolist(), strict=True)) == expected


ROWS = {name: parse_kv_cache_dtype(name) for name in page_oracle.FORMATS}
SCALED = pytest.mark.parametrize("name", page_oracle.FORMATS)
PLACED = pytest.mark.parametrize("placement", page_oracle.PLACEMENTS)
ORDERED = pytest.mark.parametrize("order", page_oracle.ORDERS)


def scaled_layout(where: page_oracle.Pages) -> PageLayout:
    return PageLayout(
        where.heads, *where.dims, where.order, ROWS[where.name], scale_placement=where.placement
    )


@SCALED
@PLACED
@ORDERED
@pytest.mark.parametrize("storage", ["compact", "padded pages", "one layer of a shared buffer"])
def test_codes_and_scales_lie_where_they_are_counted_by_hand(
    name, placement, order, storage
) -> None:
    where = page_oracle.Pages(name, (16, 8), 2, 5, order, placement)
    layout, size = scaled_layout(where), where.page_bytes
    assert layout.page_size(5) == size
    buffer = torch.randint(0, 256, (4 * 3 * (size + 16),), dtype=torch.uint8)
    pages = {
        "compact": buffer[: 3 * size].view(3, size),
        "padded pages": buffer[: 3 * (size + 16)].view(3, size + 16)[:, :size],
        "one layer of a shared buffer": buffer.view(3, 4, size + 16)[:, 2, 4 : size + 4],
    }[storage]
    for side, codes, scales in (
        (0, layout.key_view(pages), layout.key_scale_view(pages)),
        (1, layout.value_view(pages), layout.value_scale_view(pages)),
    ):
        width = where.code_bytes(side)
        assert codes.shape == (3, 5, 2, width)
        assert scales.shape == (3, 5, 2, 2)[: 4 if where.is_int4 else 3]
        for block, offset, head in itertools.product(range(3), range(5), range(2)):
            start = where.code_place(side, offset, head)
            assert torch.equal(codes[block, offset, head], pages[block, start : start + width])
            stored = scales[block, offset, head].reshape(-1).view(torch.int32)
            places = where.scale_places(side, offset, head)
            expected = torch.cat([pages[block, p : p + 4] for p in places]).view(torch.int32)
            assert torch.equal(stored, expected)


@SCALED
@PLACED
@ORDERED
def test_every_byte_of_a_page_has_one_use(name, placement, order) -> None:
    where = page_oracle.Pages(name, (16, 8), 3, 5, order, placement)
    layout = scaled_layout(where)
    pages = torch.zeros(2, where.page_bytes + 8, dtype=torch.uint8)[:, : where.page_bytes]
    layout.key_view(pages).add_(1)
    layout.value_view(pages).add_(1)
    for scales in layout.scale_views(pages):
        words = scales.view(torch.int32)
        words += 0x01010101
    assert (pages == 1).all()
    assert not pages.as_strided((1, 8), (1, 1), where.page_bytes).any()


def test_scales_in_padded_pages_are_found_by_strides() -> None:
    layout = PageLayout(1, 8, 8, format=ROWS["int8_per_token_head"], scale_placement="inline")
    size = layout.page_size(4)
    buffer = torch.full((3, size + 16), 0xAB, dtype=torch.uint8)
    pages = buffer[:, :size]
    numbers = torch.arange(1.0, 25.0).view(2, 3, 4, 1)
    for view, own in zip(layout.scale_views(pages), numbers, strict=True):
        view.copy_(own)
    slots = buffer[:, :size].reshape(3, 4, 2, 12)
    stored = slots[..., 8:].contiguous().view(torch.float32).squeeze(-1)
    assert torch.equal(stored.permute(2, 0, 1), numbers.squeeze(-1))
    assert (slots[..., :8] == 0xAB).all()
    assert (buffer[:, size:] == 0xAB).all()


@PLACED
@pytest.mark.parametrize("packing", ["layer by layer", "layers within a page", "offset"])
def test_layers_of_one_buffer_have_scales_of_their_own(placement, packing) -> None:
    layout = PageLayout(2, 8, 8, format=ROWS["fp8_per_token_head"], scale_placement=placement)
    size = layout.page_size(4)
    buffer = torch.zeros(4 * 3 * size + 12, dtype=torch.uint8)
    if packing == "layers within a page":
        layers = buffer[:-12].view(3, 4, size).unbind(1)
    else:
        start = 12 if packing == "offset" else 0
        layers = buffer[start : start + 4 * 3 * size].view(4, 3, size).unbind(0)
    for index, pages in enumerate(layers):
        for side, view in enumerate(layout.scale_views(pages)):
            view.fill_(index + 0.25 * side + 0.5)
    for index, pages in enumerate(layers):
        keys, values = layout.key_scale_view(pages), layout.value_scale_view(pages)
        assert (keys == index + 0.5).all()
        assert (values == index + 0.75).all()
        assert not layout.key_view(pages).any()


@pytest.mark.parametrize("sides", [(256, 520), (512, 1032)], ids=["256", "512"])
def test_two_head_sizes_share_pages_of_one_stride(sides) -> None:
    head_dim, token = sides
    layout = PageLayout(1, head_dim, head_dim, format=ROWS["int8_per_token_head"])
    assert layout.token_size == token
    buffer = torch.zeros(2, 16 * 1032, dtype=torch.uint8)
    pages = buffer[:, : layout.page_size(16)]
    layout.value_scale_view(pages)[1, 15, 0] = 0.5
    end = layout.page_size(16)
    assert buffer[1, end - 4 : end].view(torch.float32).item() == 0.5
    assert buffer.count_nonzero() == 1


def test_the_size_of_a_page_counts_its_scales() -> None:
    sizes = {name: PageLayout(8, 128, 128, format=fmt).page_size(16) for name, fmt in ROWS.items()}
    assert list(sizes.values()) == [33_792, 33_792, 18_432]


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
def test_other_formats_keep_no_scales_in_the_page(name) -> None:
    layout = PageLayout(2, 7, 3, format=parse_kv_cache_dtype(name))
    assert layout.scale_views(torch.zeros(2, layout.page_size(4))) == ()
    assert layout.page_size(4) == 80


@SCALED
@PLACED
@pytest.mark.parametrize("dims", [(6, 8), (8, 6), (8, 0)])
def test_rows_that_leave_scales_off_words_are_refused(name, placement, dims) -> None:
    step = 8 if name == "int4_per_token_head" else 4
    message = rf"got {dims[0]} and {dims[1]} for {name}.*multiple of {step}"
    with pytest.raises(FormatError, match=message):
        PageLayout(1, *dims, format=ROWS[name], scale_placement=placement)


def test_int4_rows_of_half_words_are_refused() -> None:
    with pytest.raises(FormatError, match="positive multiple of 8"):
        PageLayout(1, 12, 8, format=ROWS["int4_per_token_head"])
    PageLayout(1, 12, 8, format=ROWS["int8_per_token_head"])


@PLACED
@pytest.mark.parametrize(("offset", "gap"), [(2, 0), (0, 6), (1, 3)])
def test_pages_off_words_are_refused_with_the_numbers(placement, offset, gap) -> None:
    layout = PageLayout(1, 8, 8, format=ROWS["int8_per_token_head"], scale_placement=placement)
    size = layout.page_size(4)
    pages = torch.zeros(2 * (size + 8), dtype=torch.uint8).as_strided(
        (2, size), (size + gap, 1), offset
    )
    message = f"start {offset} bytes .* and {size + gap} bytes apart.*multiple of 4"
    for use in (layout.key_scale_view, layout.value_scale_view, layout.scale_views):
        with pytest.raises(FormatError, match=message):
            use(pages)
    with pytest.raises(FormatError, match=message):
        layout.check_alignment(pages)


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(FormatError, match=r"scale_placement: got 'row'.*inline"):
        PageLayout(2, 8, 8, scale_placement="row")
