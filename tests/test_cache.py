"""PagedKVCache owns or borrows pages, and says how large they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from quantattn.cache import PagedKVCache
from quantattn.cache_writes import holds_entries
from quantattn.errors import FormatError
from quantattn.ops import write_kv
from quantattn.testing import poisoned_pages
from tests.scale_places import ONE, PAGE_FORMATS, PLACEMENTS, ZERO, number_places, without, words_at


@pytest.mark.parametrize(
    ("kv_cache_dtype", "stored"),
    [
        ("auto", torch.float16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_pages_are_zero_and_stored_as_the_format_says(kv_cache_dtype, stored) -> None:
    cache = PagedKVCache(
        3, 5, 4, 2, 6, head_dim_v=3, kv_cache_dtype=kv_cache_dtype, dtype=torch.float16
    )
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (3, 5, 4)
    for index in range(3):
        pages = cache.layer(index)
        assert pages.shape == (5, 4 * 2 * (6 + 3))
        assert pages.dtype == stored
        assert not pages.view(torch.uint8).any()
    assert cache.nbytes == 3 * 5 * 4 * 2 * (6 + 3) * stored.itemsize


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_or_a_pickle_is_refused_and_says_what_keeps_blocks(act) -> None:
    with pytest.raises(FormatError, match=r"swap_out .* save_blocks"):
        act(PagedKVCache(1, 2, 4, 1, 8))


@pytest.mark.parametrize("name", PAGE_FORMATS)
@pytest.mark.parametrize(("placement", "order"), PLACEMENTS)
def test_scales_in_new_and_in_cleared_pages_are_one(name, placement, order) -> None:
    scales, offsets, size = number_places(name, placement, order, 5, 3, (16, 8))
    cache = PagedKVCache(
        2, 4, 5, 3, 16, head_dim_v=8, kv_cache_dtype=name, layout=order, scale_placement=placement
    )
    for _ in range(2):
        for page in torch.cat([cache.layer(0), cache.layer(1)]):
            assert len(page) == size
            assert words_at(page, scales) == {ONE}
            assert words_at(page, offsets) <= {ZERO}
            assert set(without(page, scales + offsets)) == {0}
        cache.layer(1).fill_(0x11)
        cache.clear()


def test_a_block_of_eight_heads_of_128_is_counted_with_its_scales() -> None:
    cache = PagedKVCache(3, 5, 16, 8, 128, kv_cache_dtype="int8_per_token_head")
    assert cache.block_nbytes == 33_792
    assert cache.nbytes == 3 * 5 * 33_792


def test_layers_do_not_share_pages() -> None:
    cache = PagedKVCache(2, 2, 4, 1, 2, dtype=torch.float32)
    cache.layer(0).fill_(3.0)
    assert not cache.layer(1).any()


def test_a_latent_cache_holds_one_row_a_token() -> None:
    cache = PagedKVCache(1, 2, 4, 1, 20, head_dim_v=0, kv_cache_dtype="fp8")
    assert cache.layer(0).shape == (2, 80)


def test_borrowed_pages_are_the_engines_own() -> None:
    pages = [poisoned_pages(3, 4 * 2 * 12, torch.bfloat16, gap=8) for _ in range(2)]
    cache = PagedKVCache.borrow(pages, num_kv_heads=2, head_dim=6)
    assert cache.layer(1).data_ptr() == pages[1].data_ptr()
    assert cache.layer(1).isnan().all()
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (2, 3, 4)
    assert cache.nbytes == 2 * 3 * 4 * 2 * 12 * 2


def test_clearing_zeroes_pages_but_not_what_lies_between_them() -> None:
    buffer = torch.full((3, 104), 7.0)
    cache = PagedKVCache.borrow([buffer[:, :96]], num_kv_heads=2, head_dim=6)
    cache.clear()
    assert not buffer[:, :96].any()
    assert (buffer[:, 96:] == 7.0).all()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_clearing_lets_scales_change_again(kv_cache_dtype) -> None:
    cache = PagedKVCache(2, 2, 4, 1, 2, kv_cache_dtype=kv_cache_dtype)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor(0.25)
    for index in range(2):
        write_kv(
            torch.ones(1, 1, 2),
            torch.ones(1, 1, 2),
            cache.layer(index),
            torch.tensor([3]),
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype=kv_cache_dtype,
        )
    assert holds_entries(k_scale)
    assert holds_entries(v_scale)
    cache.clear_blocks([0])
    assert holds_entries(k_scale), "block 1 may still hold an entry"
    cache.clear()
    assert not holds_entries(k_scale)
    assert not holds_entries(v_scale)
    assert not cache.layer(0).view(torch.uint8).any()


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_counts_below_one_are_refused(sizes) -> None:
    with pytest.raises(FormatError, match="expected at least 1 each"):
        PagedKVCache(*sizes, 2, 6)


def test_a_dtype_that_no_model_has_is_refused() -> None:
    with pytest.raises(FormatError, match=r"dtype: got torch.int8"):
        PagedKVCache(1, 1, 4, 2, 6, dtype=torch.int8)


def test_borrowing_nothing_is_refused() -> None:
    with pytest.raises(FormatError, match="got no tensors"):
        PagedKVCache.borrow([], num_kv_heads=2, head_dim=6)


def test_borrowing_layers_that_differ_is_refused() -> None:
    with pytest.raises(FormatError, match="pages_per_layer"):
        PagedKVCache.borrow([torch.zeros(2, 96), torch.zeros(3, 96)], num_kv_heads=2, head_dim=6)


def test_borrowing_pages_of_another_format_is_refused() -> None:
    pages = torch.zeros(2, 96, dtype=torch.float8_e5m2)
    with pytest.raises(FormatError, match="float8_e5m2"):
        PagedKVCache.borrow([pages], num_kv_heads=2, head_dim=6, kv_cache_dtype="fp8_e4m3")
