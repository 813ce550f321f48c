"""Blocks of a cache are copied, swapped, forked and cleared with every byte they have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantattn.cache import PagedKVCache
from quantattn.cache_identity import layer_scales
from quantattn.cache_writes import holds_entries
from quantattn.errors import FormatError, ScaleError
from quantattn.host_blocks import HostBlocks, load_blocks, save_blocks
from quantattn.metadata import AttentionMetadata
from quantattn.ops import paged_attention, write_kv
from quantattn.page_scales import initialize_page_scales
from tests.scale_places import ONE, PAGE_FORMATS, ZERO, number_places, without, words_at

NUM_BLOCKS = 7
FORMATS = ["auto", "fp8_e4m3", "fp8_e5m2", *PAGE_FORMATS]
BOUND = [(torch.tensor(0.01), torch.tensor(0.07)), (torch.tensor(0.02), torch.tensor(0.05))]


def new_cache(name: str, *, placement: str = "page", num_blocks: int = NUM_BLOCKS) -> PagedKVCache:
    return PagedKVCache(
        2, num_blocks, 5, 3, 16, head_dim_v=8, kv_cache_dtype=name, scale_placement=placement
    )


def scramble(cache: PagedKVCache) -> None:
    for index in range(cache.num_layers):
        raw = cache.layer(index).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))


def all_bytes(cache: PagedKVCache) -> list[list[bytes]]:
    """The bytes of each block of each layer."""
    return [
        [bytes(page.tolist()) for page in cache.layer(index).view(torch.uint8)]
        for index in range(cache.num_layers)
    ]


def scales_for(name: str) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    return BOUND if name in ("fp8_e4m3", "fp8_e5m2") else None


def attend(cache: PagedKVCache, block: int, query: torch.Tensor) -> torch.Tensor:
    """Attention of one token over the five tokens of one block of layer 1."""
    table = torch.tensor([[block]], dtype=torch.int32)
    metadata = AttentionMetadata.from_lengths([1], [5], table, 5)
    scaled = cache.format.uses_layer_scales
    out = paged_attention(
        query,
        cache.layer(1),
        cu_seqlens_q=metadata.cu_seqlens_q,
        seq_lens=metadata.seq_lens,
        block_table=table,
        max_seqlen_q=1,
        num_kv_heads=3,
        kv_cache_dtype=cache.format.name,
        k_scale=BOUND[1][0] if scaled else None,
        v_scale=BOUND[1][1] if scaled else None,
        scale_placement=cache.page_layout.scale_placement,
        head_dim_v=8,
    )
    assert isinstance(out, torch.Tensor)
    return out


def fill_block(cache: PagedKVCache, block: int) -> None:
    """Write five tokens into one block of layer 1."""
    scaled = cache.format.uses_layer_scales
    write_kv(
        torch.randn(5, 3, 16, dtype=torch.bfloat16),
        torch.randn(5, 3, 8, dtype=torch.bfloat16) * 3,
        cache.layer(1),
        torch.arange(5) + 5 * block,
        kv_cache_dtype=cache.format.name,
        k_scale=BOUND[1][0] if scaled else None,
        v_scale=BOUND[1][1] if scaled else None,
        scale_placement=cache.page_layout.scale_placement,
    )


@pytest.mark.parametrize("placement", ["page", "inline"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_copied_block_has_every_byte_of_its_source_in_every_layer(name, placement) -> None:
    cache = new_cache(name, placement=placement)
    scramble(cache)
    before = all_bytes(cache)
    cache.copy_blocks([(2, 0), (2, 5), (6, 3)])
    for old, new in zip(before, all_bytes(cache), strict=True):
        assert new == [old[2], old[1], old[2], old[6], old[4], old[2], old[6]]


def test_copies_read_all_sources_before_they_write() -> None:
    cache = new_cache("int8_per_token_head")
    scramble(cache)
    before = all_bytes(cache)
    cache.copy_blocks(torch.tensor([(0, 1), (1, 2), (2, 0), (3, 3)], dtype=torch.int32))
    for old, new in zip(before, all_bytes(cache), strict=True):
        assert new == [old[2], old[0], old[1], *old[3:]]


def test_layers_that_share_pages_exchange_their_blocks_once() -> None:
    pages = torch.arange(3 * 96, dtype=torch.float32).view(3, 96)
    before = pages.clone()
    cache = PagedKVCache.borrow([pages, pages.view(3, 96)], num_kv_heads=2, head_dim=6)
    cache.copy_blocks([(0, 2), (2, 0)])
    assert torch.equal(pages, before[[2, 1, 0]])


def test_moves_leave_what_lies_between_padded_pages() -> None:
    # Pages of two head sizes, unified by padding the smaller to the larger.
    small, large = 4 * 2 * (8 + 4), 4 * 2 * (16 + 4)
    buffer = torch.randint(0, 256, (2, 6, large), dtype=torch.uint8)
    before = buffer.clone()
    shape = {"num_kv_heads": 1, "kv_cache_dtype": "int8_per_token_head"}
    of_8 = PagedKVCache.borrow([buffer[0, :, :small]], head_dim=8, **shape)
    of_16 = PagedKVCache.borrow([buffer[1]], head_dim=16, **shape)
    assert (of_8.block_nbytes, of_16.block_nbytes) == (small, large)
    of_8.copy_blocks([(1, 4), (4, 1)])
    of_8.swap_in(of_8.swap_out([0, 5]), [5, 0])
    of_8.clear_blocks([2])
    assert torch.equal(buffer[0, :, small:], before[0, :, small:])
    assert torch.equal(buffer[0, 4, :64], before[0, 1, :64])
    of_16.copy_blocks([(1, 4)])
    assert torch.equal(buffer[1, 4], buffer[1, 1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_swapped_block_comes_back_whole_wherever_it_goes(name) -> None:
    cache, scales = new_cache(name), scales_for(name)
    scramble(cache)
    before = all_bytes(cache)
    saved = cache.swap_out([3, 1], scales=scales)
    assert saved.data.device.type == "cpu"
    assert saved.num_blocks == 2
    assert saved.nbytes == 2 * 2 * cache.block_nbytes
    assert saved.fingerprint == cache.fingerprint(scales)
    assert all_bytes(cache) == before, "the cache keeps what was read"
    scramble(cache)
    scrambled = all_bytes(cache)
    cache.swap_in(saved, [6, 3], scales=scales)
    for old, noise, new in zip(before, scrambled, all_bytes(cache), strict=True):
        assert new == [*noise[:3], old[1], *noise[4:6], old[3]]


def test_swapping_out_eight_heads_of_128_moves_33792_bytes_a_block() -> None:
    cache = PagedKVCache(1, 3, 16, 8, 128, kv_cache_dtype="int8_per_token_head")
    key, value = torch.randn(2, 16, 8, 128)
    slots, none = torch.arange(16) + 16, {"k_scale": None, "v_scale": None}
    write_kv(key, value, cache.layer(0), slots, **none, kv_cache_dtype=cache.format.name)
    before = cache.layer(0)[1].clone()
    saved = cache.swap_out([1])
    scramble(cache)
    cache.swap_in(saved, [1])
    assert saved.nbytes == 33_792
    assert torch.equal(cache.layer(0)[1], before)


@pytest.mark.parametrize("name", FORMATS)
def test_a_saved_block_reads_the_same_from_a_fresh_pool(name, tmp_path) -> None:
    first, scales = new_cache(name), scales_for(name)
    fill_block(first, 3)
    query = torch.randn(1, 3, 16, dtype=torch.bfloat16)
    expected = attend(first, 3, query)
    assert expected.abs().max() > 0.1
    save_blocks(first.swap_out([3], scales=scales), tmp_path / "block.safetensors")
    fresh = new_cache(name, num_blocks=9)
    scramble(fresh)
    fresh.swap_in(load_blocks(tmp_path / "block.safetensors"), [7], scales=scales)
    assert torch.equal(attend(fresh, 7, query), expected)


@pytest.mark.parametrize("other", FORMATS)
def test_a_file_of_another_format_is_refused_by_name(other, tmp_path) -> None:
    name = "int8_per_token_head" if other != "int8_per_token_head" else "fp8_per_token_head"
    save_blocks(new_cache(name).swap_out([3]), tmp_path / "block.safetensors")
    cache = new_cache(other)
    before = all_bytes(cache)
    with pytest.raises(FormatError, match=rf"format \(saved '{name}', this cache '{other}'\)"):
        cache.swap_in(load_blocks(tmp_path / "block.safetensors"), [0], scales=scales_for(other))
    assert all_bytes(cache) == before


def test_blocks_written_under_another_scale_are_refused_by_layer() -> None:
    cache = new_cache("fp8_e4m3")
    saved = cache.swap_out([0], scales=BOUND)
    changed = [BOUND[0], (BOUND[1][0], torch.tensor(0.06))]
    with pytest.raises(FormatError, match=r"differ .* in v_scale of layer 1 \(saved \[0\.05"):
        cache.swap_in(saved, [0], scales=changed)


def test_blocks_swapped_in_hold_their_scales() -> None:
    cache = new_cache("fp8_e4m3")
    scales = [(k.clone(), v.clone()) for k, v in BOUND]
    saved = cache.swap_out([0, 1], scales=scales)
    cache.swap_in(saved, [4, 5], scales=scales)
    assert all(holds_entries(scale) for pair in scales for scale in pair)
    cache.clear_blocks(range(1, NUM_BLOCKS))
    assert all(holds_entries(scale) for pair in scales for scale in pair)
    cache.clear_blocks(range(NUM_BLOCKS))
    assert not any(holds_entries(scale) for pair in scales for scale in pair)


def test_a_refit_cannot_reinterpret_restored_blocks() -> None:
    from quantattn import QuantAttention

    layers = torch.nn.ModuleList(
        QuantAttention(3, 16, kv_cache_dtype="fp8", scale_granularity="head") for _ in range(2)
    )
    layers[0].set_scale("k", [0.01, 0.03, 0.02])
    cache = new_cache("fp8_e4m3")
    saved = cache.swap_out([2], scales=layer_scales(layers))
    cache.swap_in(saved, [3], scales=layer_scales(layers))
    with pytest.raises(ScaleError, match="holds entries"):
        layers[0].set_scale("k", [0.03, 0.01, 0.02])
    cache.clear()
    layers[0].set_scale("k", [0.03, 0.01, 0.02])
    with pytest.raises(FormatError, match="k_scale of layer 0"):
        cache.swap_in(saved, [3], scales=layer_scales(layers))


def test_formats_that_use_layer_scales_cannot_be_saved_without_them() -> None:
    cache = new_cache("fp8_e5m2")
    for act in (cache.fingerprint, lambda: cache.swap_out([0])):
        with pytest.raises(ScaleError, match=r"scales: got None .*layer_scales\(model\)"):
            act()
    saved = cache.swap_out([0], scales=BOUND)
    with pytest.raises(ScaleError, match="scales: got 1 pairs for 2 layers"):
        cache.swap_in(saved, [0], scales=BOUND[:1])


def test_saved_bytes_of_the_wrong_size_are_refused() -> None:
    cache = new_cache("int8_per_token_head")
    saved = cache.swap_out([0, 1])
    with pytest.raises(FormatError, match="saved blocks: got shape"):
        cache.swap_in(saved, [0])
    with pytest.raises(FormatError, match="saved blocks: got shape"):
        cache.swap_in(HostBlocks(saved.data[:, :, :-4], saved.identity), [0, 1])


def test_a_fork_copies_into_free_blocks_only() -> None:
    cache = new_cache("int4_per_token_head")
    scramble(cache)
    before = all_bytes(cache)
    cache.fork([1, 4], into=[0, 6])
    for old, new in zip(before, all_bytes(cache), strict=True):
        assert new == [old[1], *old[1:6], old[4]]
    for kind in (list, torch.tensor):
        with pytest.raises(FormatError, match="block 4 in both"):
            cache.fork(kind([1, 4]), into=kind([4, 6]))
    with pytest.raises(FormatError, match="got 2 and 1"):
        cache.fork([1, 4], into=[6])


@pytest.mark.parametrize("placement", ["page", "inline"])
@pytest.mark.parametrize("name", PAGE_FORMATS)
def test_cleared_blocks_are_zero_with_scales_of_one_and_the_rest_stays(name, placement) -> None:
    scales, offsets, _ = number_places(name, placement, "NHD", 5, 3, (16, 8))
    cache = new_cache(name, placement=placement)
    scramble(cache)
    before = all_bytes(cache)
    cache.clear_blocks([5, 2])
    for old, new, pages in zip(before, all_bytes(cache), map(cache.layer, (0, 1)), strict=True):
        assert [new[block] for block in (0, 1, 3, 4, 6)] == [old[b] for b in (0, 1, 3, 4, 6)]
        for page in pages[[2, 5]]:
            assert words_at(page, scales) == {ONE}
            assert words_at(page, offsets) <= {ZERO}
            assert set(without(page, scales + offsets)) == {0}


def test_cleared_pages_still_count_as_initialised() -> None:
    cache = new_cache("int8_per_token_head")
    cache.clear()
    assert not initialize_page_scales(cache.layer(0), cache.page_layout)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda c: c.copy_blocks([(0, 7)]), "pairs: got block 7, expected blocks from 0 to 6"),
        (lambda c: c.copy_blocks([(-1, 0)]), "pairs: got block -1"),
        (lambda c: c.copy_blocks([(0, 3), (1, 3)]), "pairs: destination: block 3 is there more"),
        (lambda c: c.clear_blocks([7]), "blocks: got block 7"),
        (lambda c: c.clear_blocks([2, 2]), "blocks: block 2 is there more than once"),
        (lambda c: c.swap_out([-1]), "blocks: got block -1"),
        (lambda c: c.swap_in(c.swap_out([0, 1]), [1, 1]), "blocks: block 1 is there more"),
    ],
    ids=["copy-high", "copy-negative", "copy-twice", "clear", "clear-twice", "out", "in-twice"],
)
def test_a_refused_move_changes_nothing(act, message) -> None:
    cache = new_cache("int8_per_token_head")
    scramble(cache)
    before = all_bytes(cache)
    with pytest.raises(FormatError, match=message):
        act(cache)
    assert all_bytes(cache) == before


def test_moving_nothing_changes_nothing() -> None:
    cache = new_cache("fp8_per_token_head")
    scramble(cache)
    before = all_bytes(cache)
    cache.copy_blocks([])
    cache.fork([], [])
    cache.clear_blocks([])
    cache.swap_in(cache.swap_out([]), [])
    assert all_bytes(cache) == before


BLOCKS = st.integers(0, NUM_BLOCKS - 1)
SOME = st.lists(BLOCKS, unique=True, max_size=4)
MOVES = st.one_of(
    st.tuples(st.just("copy"), SOME.flatmap(lambda d: st.tuples(*[BLOCKS] * len(d), st.just(d)))),
    st.tuples(st.just("out"), SOME),
    st.tuples(st.just("in"), st.permutations(range(NUM_BLOCKS))),
    st.tuples(st.just("clear"), SOME),
)


@given(st.sampled_from(sorted(PAGE_FORMATS)), st.lists(MOVES, max_size=12))
def test_random_moves_follow_a_dictionary_of_blocks(name, moves) -> None:
    cache = PagedKVCache(1, NUM_BLOCKS, 2, 1, 8, kv_cache_dtype=name)
    empty = all_bytes(cache)[0][0]
    scramble(cache)
    model = dict(enumerate(all_bytes(cache)[0]))
    saved, kept = cache.swap_out([]), []
    for move, blocks in moves:
        if move == "copy":
            *sources, destinations = blocks
            cache.copy_blocks(list(zip(sources, destinations, strict=True)))
            model |= dict(zip(destinations, [model[s] for s in sources], strict=True))
        elif move == "out":
            saved, kept = cache.swap_out(blocks), [model[block] for block in blocks]
        elif move == "in":
            cache.swap_in(saved, blocks[: len(kept)])
            model |= dict(zip(blocks, kept, strict=False))
        else:
            cache.clear_blocks(blocks)
            model |= dict.fromkeys(blocks, empty)
        assert all_bytes(cache)[0] == [model[block] for block in range(NUM_BLOCKS)]


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["page", "inline"])
@pytest.mark.parametrize("name", FORMATS)
def test_moves_on_a_gpu_are_those_on_the_cpu(name, placement) -> None:
    shape = {"head_dim_v": 8, "kv_cache_dtype": name, "scale_placement": placement}
    ours = PagedKVCache(2, NUM_BLOCKS, 5, 3, 16, device="cuda", **shape)
    theirs = PagedKVCache(2, NUM_BLOCKS, 5, 3, 16, device="cpu", **shape)
    scramble(theirs)
    scales = scales_for(name)
    on_gpu = scales and [(k.cuda(), v.cuda()) for k, v in scales]
    ours.swap_in(
        theirs.swap_out(range(NUM_BLOCKS), scales=scales), range(NUM_BLOCKS), scales=on_gpu
    )
    for cache in (ours, theirs):
        cache.copy_blocks([(0, 1), (1, 0), (3, 5)])
        cache.clear_blocks([6, 2])
        cache.fork([1], into=[6])
    assert all_bytes(ours) == all_bytes(theirs)
    assert torch.equal(
        ours.swap_out([5, 1], scales=on_gpu).data, theirs.swap_out([5, 1], scales=scales).data
    )
    assert ours.fingerprint(on_gpu) == theirs.fingerprint(scales)
