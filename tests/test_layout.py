"""Views of K and V rows, for both head orders, over every kind of storage an engine may have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantattn.errors import FormatError
from quantattn.layout import PageLayout, split_slots

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
