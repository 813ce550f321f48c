"""Scales inside pages start at 1.0, once, and what was written is never set back."""

from __future__ import annotations

import threading
import timeit
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from quantattn.cache import PagedKVCache
from quantattn.errors import FormatError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.ops import write_kv
from quantattn.page_scales import forget_page_scales, initialize_page_scales, reset_page_scales
from tests.scale_places import ONE, PAGE_FORMATS, PLACEMENTS, ZERO, number_places, without, words_at

INT8 = parse_kv_cache_dtype("int8_per_token_head")
LAYOUT = PageLayout(2, 8, 4, format=INT8)
NO_SCALES = {"k_scale": None, "v_scale": None}
PAGE = 3 * 2 * (8 + 4 + 2 * 4)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def poisoned(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """Makes tensors of a shape, on a CPU or a GPU, all of whose bytes are 0xFF."""
    return lambda *shape: torch.full(shape, 0xFF, dtype=torch.uint8, device=request.param)


def scales_of(pages: torch.Tensor, layout: PageLayout = LAYOUT) -> set[float]:
    return {number for view in layout.scale_views(pages) for number in view.unique().tolist()}


def write_scales(pages: torch.Tensor, value: float, layout: PageLayout = LAYOUT) -> None:
    for view in layout.scale_views(pages):
        view.fill_(value)


@pytest.mark.parametrize("name", PAGE_FORMATS)
@pytest.mark.parametrize(("placement", "order"), PLACEMENTS)
def test_only_the_scale_bytes_of_padded_pages_at_an_offset_are_set(
    poisoned, name, placement, order
) -> None:
    layout = PageLayout(3, 16, 8, order, parse_kv_cache_dtype(name), placement)
    scales, offsets, size = number_places(name, placement, order, 5, 3, (16, 8))
    assert layout.page_size(5) == size
    buffer = poisoned(12 + 4 * (size + 20)).random_()
    before = buffer.clone()
    pages = buffer[12:].view(4, size + 20)[:, :size]
    assert initialize_page_scales(pages, layout)
    for page, old in zip(pages, before[12:].view(4, size + 20), strict=True):
        assert words_at(page, scales) == {ONE}
        assert words_at(page, offsets) <= {ZERO}
        assert without(page, scales + offsets) == without(old[:size], scales + offsets)
    assert torch.equal(buffer[:12], before[:12])
    assert torch.equal(buffer[12:].view(4, -1)[:, size:], before[12:].view(4, -1)[:, size:])


def test_a_second_call_sets_nothing(poisoned) -> None:
    pages = poisoned(4, PAGE)
    assert initialize_page_scales(pages, LAYOUT)
    write_scales(pages, 0.125)
    assert not initialize_page_scales(pages, LAYOUT)
    assert scales_of(pages) == {0.125}


@pytest.mark.parametrize("name", PAGE_FORMATS)
def test_a_layer_that_shares_a_cache_keeps_what_its_target_wrote(poisoned, name) -> None:
    layout = PageLayout(1, 8, 8, format=parse_kv_cache_dtype(name))
    storage = poisoned(2, layout.page_size(4))
    target = PagedKVCache.borrow([storage], num_kv_heads=1, head_dim=8, kv_cache_dtype=name)
    rows = torch.linspace(-0.635, 0.635, 8, device=storage.device).repeat(3, 1, 1)
    slots = torch.tensor([0, 1, 5], device=storage.device)
    write_kv(rows, -rows, target.layer(0), slots, **NO_SCALES, kv_cache_dtype=name)
    written = storage.clone()
    sharing = PagedKVCache.borrow([storage], num_kv_heads=1, head_dim=8, kv_cache_dtype=name)
    assert sharing.layer(0).data_ptr() == target.layer(0).data_ptr()
    assert torch.equal(storage, written)


def test_int8_codes_of_a_sharing_layer_still_mean_what_was_written(poisoned) -> None:
    storage = poisoned(2, 4 * 2 * (8 + 4))
    shape = {"num_kv_heads": 1, "head_dim": 8, "kv_cache_dtype": INT8.name}
    target = PagedKVCache.borrow([storage], **shape)
    row = torch.tensor([0.635, -0.635, 0.0, 0.1, -0.1, 0.2, 0.3, -0.3]).to(storage.device)
    row, slot = row.view(1, 1, 8), torch.tensor([6], device=storage.device)
    write_kv(row, row, target.layer(0), slot, **NO_SCALES, kv_cache_dtype=INT8.name)
    PagedKVCache.borrow([storage], **shape)
    code = storage[1, 2 * 8].view(torch.int8).item()
    scale = storage[1, 64 + 2 * 4 : 64 + 3 * 4].clone().view(torch.float32).item()
    assert code == 127
    assert code * scale == pytest.approx(0.635)


@pytest.mark.parametrize(
    "alias",
    [
        lambda pages: pages[:],
        lambda pages: pages.as_strided(pages.shape, pages.stride(), pages.storage_offset()),
        lambda pages: pages.view(torch.int8).view(torch.uint8),
        lambda pages: torch.from_dlpack(pages),
    ],
    ids=["slice", "as_strided", "dtype", "storage"],
)
def test_the_same_bytes_seen_otherwise_are_the_same_view(poisoned, alias) -> None:
    pages = poisoned(4, PAGE + 4)[:, :PAGE]
    assert initialize_page_scales(pages, LAYOUT)
    write_scales(pages, 0.25)
    assert not initialize_page_scales(alias(pages), LAYOUT)
    assert scales_of(pages) == {0.25}


def test_pages_live_on_while_any_storage_over_them_does(poisoned) -> None:
    memory = poisoned(4, PAGE)
    first, second = torch.from_dlpack(memory), torch.from_dlpack(memory)
    assert initialize_page_scales(first, LAYOUT)
    assert not initialize_page_scales(second, LAYOUT)
    write_scales(second, 0.25)
    del first
    third = torch.from_dlpack(memory)
    assert not initialize_page_scales(third, LAYOUT)
    assert scales_of(third) == {0.25}


def test_storage_of_another_type_is_seen_as_bytes(poisoned) -> None:
    storage = poisoned(4, PAGE).view(torch.bfloat16)
    assert initialize_page_scales(storage.view(torch.uint8), LAYOUT)
    write_scales(storage.view(torch.uint8), 0.25)
    assert not initialize_page_scales(storage.view(torch.uint8), LAYOUT)
    assert scales_of(storage.view(torch.uint8)) == {0.25}


@pytest.mark.parametrize("axis", [0, 1], ids=["stacked", "interleaved"])
def test_layers_in_one_storage_are_each_set_and_do_not_disturb_each_other(poisoned, axis) -> None:
    buffer = poisoned(*((4, 5, PAGE) if axis == 0 else (5, 4, PAGE)))
    layers = buffer.unbind(axis)
    for index, pages in enumerate(layers):
        assert initialize_page_scales(pages, LAYOUT)
        assert scales_of(pages) == {1.0}
        write_scales(pages, 0.25 + index)
    assert [scales_of(pages) for pages in layers] == [{0.25}, {1.25}, {2.25}, {3.25}]


def test_k_and_v_buffers_one_behind_the_other_are_told_apart(poisoned) -> None:
    layout = PageLayout(1, 8, 8, format=INT8)
    size = layout.page_size(2)
    buffer = poisoned(2, 3, size)
    assert initialize_page_scales(buffer[1], layout)
    assert (buffer[0] == 0xFF).all()
    write_scales(buffer[1], 0.5, layout)
    assert initialize_page_scales(buffer[0], layout)
    assert scales_of(buffer[1], layout) == {0.5}


def test_storage_allocated_again_at_the_same_address_is_set_again(poisoned) -> None:
    memory = poisoned(4, PAGE)
    first = torch.from_dlpack(memory)
    address = first.data_ptr()
    assert initialize_page_scales(first, LAYOUT)
    write_scales(first, 0.25)
    del first
    again = torch.from_dlpack(memory)
    assert again.data_ptr() == address
    assert initialize_page_scales(again, LAYOUT)
    assert scales_of(again) == {1.0}


def test_every_allocation_of_many_is_set_once(poisoned) -> None:
    addresses = set()
    for _ in range(200):
        pages = poisoned(4, PAGE)
        addresses.add(pages.data_ptr())
        assert initialize_page_scales(pages, LAYOUT)
        assert scales_of(pages) == {1.0}
        write_scales(pages, 0.25)
        del pages
    assert len(addresses) < 200, "no address came back, so this shows nothing"


@pytest.mark.gpu
def test_memory_that_went_back_to_the_driver_is_set_again() -> None:
    addresses = set()
    for _ in range(20):
        pages = torch.full((100_000, PAGE), 0xFF, dtype=torch.uint8, device="cuda")
        addresses.add(pages.data_ptr())
        assert initialize_page_scales(pages, LAYOUT)
        assert scales_of(pages) == {1.0}
        write_scales(pages, 0.25)
        del pages
        torch.cuda.empty_cache()
    if len(addresses) == 20:
        pytest.skip("the driver gave no address twice, so this shows nothing")


def test_groups_that_share_a_tensor_are_both_set_before_anything_is_written(poisoned) -> None:
    buffer = poisoned(4 * 240)
    other = PageLayout(1, 16, 16, format=INT8)
    ours, theirs = buffer.view(8, PAGE), buffer.view(4, 240)[:, : other.page_size(6)]
    assert initialize_page_scales(ours, LAYOUT)
    assert initialize_page_scales(theirs, other)
    assert scales_of(ours) == {1.0}
    assert scales_of(theirs, other) == {1.0}


def test_a_late_group_leaves_the_pages_that_another_wrote(poisoned) -> None:
    buffer = poisoned(4 * 240)
    other = PageLayout(1, 16, 16, format=INT8)
    ours, theirs = buffer.view(8, PAGE), buffer.view(4, 240)[:, : other.page_size(6)]
    assert initialize_page_scales(ours, LAYOUT)
    ours[3] = 0x11
    assert initialize_page_scales(theirs, other)
    assert (ours[3] == 0x11).all()
    assert scales_of(theirs[[0, 2, 3]].contiguous(), other) == {1.0}
    assert scales_of(theirs[1:2], other) != {1.0}


def test_a_late_group_that_finds_every_page_written_sets_nothing(poisoned) -> None:
    buffer = poisoned(4 * 240)
    other = PageLayout(1, 16, 16, format=INT8)
    ours, theirs = buffer.view(8, PAGE), buffer.view(4, 240)[:, : other.page_size(6)]
    initialize_page_scales(ours, LAYOUT)
    buffer.fill_(0x11)
    assert not initialize_page_scales(theirs, other)
    assert (buffer == 0x11).all()
    assert not initialize_page_scales(theirs, other)


def test_the_same_pages_in_another_layout_are_another_view(poisoned) -> None:
    pages = poisoned(2, PAGE)
    inline = PageLayout(2, 8, 4, format=INT8, scale_placement="inline")
    initialize_page_scales(pages, LAYOUT)
    pages[1] = 0x11
    assert initialize_page_scales(pages, inline)
    assert scales_of(pages[:1], inline) == {1.0}
    assert (pages[1] == 0x11).all()


def test_a_cache_that_grows_over_its_pages_sets_only_the_new_ones(poisoned) -> None:
    buffer = poisoned(6, PAGE)
    assert initialize_page_scales(buffer[:4], LAYOUT)
    write_scales(buffer[:4], 0.25)
    assert initialize_page_scales(buffer, LAYOUT)
    assert scales_of(buffer[:4]) == {0.25}
    assert scales_of(buffer[4:]) == {1.0}


def test_int4_offsets_show_that_a_page_was_written(poisoned) -> None:
    int4 = parse_kv_cache_dtype("int4_per_token_head")
    layout = PageLayout(1, 8, 8, format=int4)
    buffer = poisoned(6, layout.page_size(2))
    initialize_page_scales(buffer[:4], layout)
    layout.key_scale_view(buffer)[2, 0, 0, 1] = -3.0
    initialize_page_scales(buffer, layout)
    assert layout.key_scale_view(buffer)[2, 0, 0].tolist() == [1.0, -3.0]


@pytest.mark.parametrize("part", [slice(2), slice(2, 4), slice(4, 6)], ids=["head", "mid", "tail"])
def test_pages_known_only_through_a_storage_out_of_reach_are_left_alone(poisoned, part) -> None:
    memory = poisoned(6, PAGE)
    whole = torch.from_dlpack(memory)
    assert initialize_page_scales(whole, LAYOUT)
    assert not initialize_page_scales(torch.from_dlpack(memory[part]), LAYOUT)


def test_forgotten_pages_are_set_again_for_every_view_of_them(poisoned) -> None:
    buffer = poisoned(2, 4, 240)
    other = PageLayout(1, 16, 16, format=INT8)
    ours, theirs = buffer[0].view(8, PAGE), buffer[0, :, : other.page_size(6)]
    beside = buffer[1].view(8, PAGE)
    for pages, layout in ((ours, LAYOUT), (theirs, other), (beside, LAYOUT)):
        initialize_page_scales(pages, layout)
    buffer.fill_(0xFF)
    forget_page_scales(ours)
    assert initialize_page_scales(theirs, other)
    assert initialize_page_scales(ours, LAYOUT)
    assert not initialize_page_scales(beside, LAYOUT)


def test_forgetting_one_interleaved_layer_leaves_the_others(poisoned) -> None:
    buffer = poisoned(5, 3, PAGE)
    for pages in buffer.unbind(1):
        initialize_page_scales(pages, LAYOUT)
    forget_page_scales(buffer[:, 1].view(torch.float32))
    again = [initialize_page_scales(pages, LAYOUT) for pages in buffer.unbind(1)]
    assert again == [False, True, False]


def test_a_cache_trusts_nothing_that_was_known_of_its_memory(poisoned, monkeypatch) -> None:
    # As when a storage that still lives has given its memory back to the allocator.
    memory = poisoned(1, 4, PAGE)
    before = torch.from_dlpack(memory)
    initialize_page_scales(before[0], LAYOUT)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.from_dlpack(memory).zero_())
    cache = PagedKVCache(1, 4, 3, 2, 8, head_dim_v=4, kv_cache_dtype=INT8.name)
    assert cache.layer(0).data_ptr() == before.data_ptr()
    assert scales_of(cache.layer(0)) == {1.0}


@pytest.mark.parametrize("name", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_formats_without_scales_in_the_pages_are_left_alone(poisoned, name) -> None:
    fmt = parse_kv_cache_dtype(name)
    pages = poisoned(4, 96)
    assert not initialize_page_scales(pages, PageLayout(2, 8, 4, format=fmt))
    assert (pages == 0xFF).all()


def test_tensors_without_data_are_left_alone(poisoned) -> None:
    with FakeTensorMode():
        fake = torch.empty(4, PAGE, dtype=torch.uint8)
    for pages in (fake, torch.empty(4, PAGE, dtype=torch.uint8, device="meta"), poisoned(0, PAGE)):
        assert not initialize_page_scales(pages, LAYOUT)
        forget_page_scales(pages)


def test_misaligned_pages_are_refused(poisoned) -> None:
    buffer = poisoned(4 * PAGE + 4)
    with pytest.raises(FormatError, match="multiple of 4"):
        initialize_page_scales(buffer[2 : 2 + 4 * PAGE].view(4, PAGE), LAYOUT)
    assert (buffer == 0xFF).all()


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (torch.zeros(4, PAGE + 4, dtype=torch.uint8), "no multiple"),
        (torch.zeros(4, PAGE, dtype=torch.int8), "dtype"),
        (torch.zeros(1, PAGE, dtype=torch.uint8).expand(4, PAGE), "do not overlap"),
    ],
    ids=["size", "dtype", "overlap"],
)
def test_pages_that_do_not_fit_are_refused(pages, message) -> None:
    with pytest.raises(FormatError, match=message):
        initialize_page_scales(pages, LAYOUT)


def test_of_many_threads_one_sets_the_scales(poisoned) -> None:
    for _ in range(20):
        pages, start, answers = poisoned(64, PAGE), threading.Barrier(8), []

        def run(pages=pages, start=start, answers=answers) -> None:
            start.wait()
            answers.append(initialize_page_scales(pages, LAYOUT))
            answers.append(scales_of(pages) == {1.0})

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers.count(False) == 7
        assert answers.count(True) == 9


def test_a_repeated_call_costs_microseconds(poisoned) -> None:
    pages = poisoned(64, PAGE)
    initialize_page_scales(pages, LAYOUT)
    seconds = min(timeit.repeat(lambda: initialize_page_scales(pages, LAYOUT), number=1000)) / 1000
    assert seconds < 20e-6


@pytest.mark.parametrize("name", PAGE_FORMATS)
@pytest.mark.parametrize("placement", ["page", "inline"])
def test_resetting_some_blocks_sets_their_scale_bytes_only(poisoned, name, placement) -> None:
    layout = PageLayout(3, 8, 16, format=parse_kv_cache_dtype(name), scale_placement=placement)
    scales, offsets, size = number_places(name, placement, "NHD", 5, 3, (8, 16))
    pages = poisoned(4, size)
    reset_page_scales(pages, layout, torch.tensor([2, 0], device=pages.device))
    assert (pages[[1, 3]] == 0xFF).all()
    for page in pages[[0, 2]]:
        assert words_at(page, scales) == {ONE}
        assert words_at(page, offsets) <= {ZERO}
        assert set(without(page, scales + offsets)) == {0xFF}


GEOMETRIES = st.tuples(
    st.integers(0, 40), st.integers(1, 6), st.integers(0, 30), st.sampled_from([1, 2])
)


@given(st.lists(st.tuples(GEOMETRIES, st.lists(st.integers(0, 5), max_size=3)), max_size=5))
@settings(max_examples=60)
def test_no_order_of_views_and_writes_loses_a_written_page(steps) -> None:
    buffer = torch.zeros(640, dtype=torch.uint8)
    known: list[set[int]] = []  # the bytes of each page that was ever seen
    written: set[int] = set()
    for (offset, count, gap, block_size), blocks in steps:
        layout = PageLayout(1, 4, 4, format=INT8)
        size = layout.page_size(block_size)
        stride = size + 4 * gap
        count = min(count, (640 - 4 * offset - size) // stride + 1)
        starts = [4 * offset + index * stride for index in range(count)]
        page_bytes = [set(range(start, start + size)) for start in starts]
        # A page that overlaps a written one may look written itself, whatever was written where.
        suspect = set(written)
        while more := [page for page in known if page & suspect and not page <= suspect]:
            suspect.update(*more)
        pages = buffer.as_strided((count, size), (stride, 1), 4 * offset)
        initialize_page_scales(pages, layout)
        assert all(buffer[at] == 0x11 for at in written)
        for index, own in enumerate(page_bytes):
            assert own & suspect or scales_of(pages[index : index + 1], layout) == {1.0}
        known += page_bytes
        for block in {block % count for block in blocks}:
            pages[block] = 0x11
            written |= page_bytes[block]


@pytest.mark.gpu
def test_a_captured_graph_never_sets_scales() -> None:
    pages = torch.full((4, PAGE), 0xFF, dtype=torch.uint8, device="cuda")
    counter = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        counter.add_(1)  # torch warns of a graph without work
        with pytest.raises(FormatError, match="before the capture"):
            initialize_page_scales(pages, LAYOUT)
        graph.capture_end()
    assert initialize_page_scales(pages, LAYOUT)
    assert scales_of(pages) == {1.0}
