"""Caches whose bytes mean different things have different fingerprints, all others the same."""

from __future__ import annotations

import itertools

import pytest
import torch

from quantattn import QuantAttention
from quantattn.cache import PagedKVCache
from quantattn.cache_identity import (
    cache_identity,
    check_same_identity,
    identity_fingerprint,
    layer_scales,
)
from quantattn.errors import FormatError, ScaleError
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout


def pair(k: float | list[float], v: float | list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(k), torch.tensor(v)


def fingerprint(scales=((0.01, 0.03),), **changed) -> str:
    sizes = {"num_blocks": 3, "block_size": 4, "num_kv_heads": 2, "head_dim": 16, **changed}
    cache = PagedKVCache(len(scales), **sizes)
    return cache.fingerprint([pair(*both) for both in scales])


def test_whatever_the_bytes_depend_on_changes_the_fingerprint() -> None:
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    int8 = {"kv_cache_dtype": "int8_per_token_head"}
    found = [
        fingerprint(dtype=torch.float16),
        fingerprint(dtype=torch.bfloat16),
        fingerprint(dtype=torch.float32),
        fingerprint(**fp8),
        fingerprint(kv_cache_dtype="fp8_e5m2"),
        fingerprint(kv_cache_dtype="fp8_per_token_head"),
        fingerprint(**int8),
        fingerprint(kv_cache_dtype="int4_per_token_head"),
        fingerprint(**int8, scale_placement="inline"),
        fingerprint(**int8, layout="HND"),
        fingerprint(**int8, block_size=8),
        fingerprint(**int8, num_kv_heads=4),
        fingerprint(**int8, head_dim=8),
        fingerprint(**int8, head_dim_v=8),
        fingerprint(**int8, scales=((0.01, 0.03), (0.01, 0.03))),
        fingerprint(**fp8, scales=((0.02, 0.03),)),
        fingerprint(**fp8, scales=((0.01, 0.02),)),
        fingerprint(**fp8, scales=((0.03, 0.01),)),
        fingerprint(**fp8, scales=((0.01, 0.03), (0.02, 0.04))),
        fingerprint(**fp8, scales=((0.02, 0.04), (0.01, 0.03))),
        fingerprint(**fp8, scales=(([0.01, 0.02], 0.03),)),
        fingerprint(**fp8, scales=(([0.02, 0.01], 0.03),)),
    ]
    assert len(set(found)) == len(found)
    assert all(len(text) == 64 and set(text) <= set("0123456789abcdef") for text in found)


def test_a_scale_that_differs_in_its_last_bit_changes_the_fingerprint() -> None:
    k = torch.tensor(0.01)
    cache = PagedKVCache(1, 3, 4, 2, 16, kv_cache_dtype="fp8")
    next_k = torch.nextafter(k, torch.tensor(1.0))
    assert cache.fingerprint([(k, k)]) != cache.fingerprint([(next_k, k)])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"num_blocks": 3}, {"num_blocks": 9}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8", "dtype": torch.float16}),
        ({"scale_placement": "page"}, {"scale_placement": "inline"}),
        ({"scales": ((0.01, 0.03),)}, {"scales": ((0.02, 0.04),)}),
        (
            {"kv_cache_dtype": "fp8", "scales": ((0.01, 0.03),)},
            {"kv_cache_dtype": "fp8", "scales": (([0.01, 0.01], [0.03]),)},
        ),
    ],
    ids=["blocks", "alias", "model dtype", "placement", "scales of auto", "equal heads"],
)
def test_what_the_bytes_do_not_depend_on_leaves_the_fingerprint(one, other) -> None:
    assert fingerprint(**one) == fingerprint(**other)


def test_borrowed_pages_have_the_fingerprint_of_owned_ones() -> None:
    owned = PagedKVCache(2, 3, 4, 2, 16, kv_cache_dtype="fp8")
    raw = [owned.layer(index).view(torch.uint8) for index in range(2)]
    borrowed = PagedKVCache.borrow(raw, num_kv_heads=2, head_dim=16, kv_cache_dtype="fp8")
    scales = [pair(0.01, 0.03), pair(0.02, 0.04)]
    assert borrowed.fingerprint(scales) == owned.fingerprint(scales)


def test_hardware_that_reads_e4m3_as_half_its_value_has_another_fingerprint(monkeypatch) -> None:
    before = {name: fingerprint(kv_cache_dtype=name) for name in ("auto", "fp8", "fp8_e5m2")}
    monkeypatch.setattr("quantattn.cache_identity.fnuz_factor", lambda: 2.0)
    after = {name: fingerprint(kv_cache_dtype=name) for name in before}
    assert [name for name in before if before[name] != after[name]] == ["fp8"]


def test_a_fingerprint_does_not_depend_on_the_order_of_the_facts() -> None:
    facts = [("a", 1), ("b", [0.5]), ("c", None)]
    found = {identity_fingerprint(dict(order)) for order in itertools.permutations(facts)}
    assert len(found) == 1


def test_the_scales_of_a_model_are_those_of_layers_with_pages() -> None:
    owner = QuantAttention(4, 8, num_kv_heads=2, kv_cache_dtype="fp8", layer_name="0")
    sharing = QuantAttention(
        4, 8, num_kv_heads=2, kv_cache_dtype="fp8", layer_name="1", kv_sharing_target=owner
    )
    last = QuantAttention(4, 8, num_kv_heads=2, kv_cache_dtype="fp8", layer_name="2")
    owner.set_scale("k", 0.25)
    last.set_scale("v", 0.5)
    model = torch.nn.ModuleList([owner, sharing, last])
    found = layer_scales(model)
    assert [(k.item(), v.item()) for k, v in found] == [(0.25, 1.0), (1.0, 0.5)]
    assert found[0][0] is owner.k_scale
    assert found[1][1] is last.v_scale


def test_scales_are_read_with_one_transfer(monkeypatch) -> None:
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t), original(t))[1])
    layout = PageLayout(2, 16, 16, format=parse_kv_cache_dtype("fp8"))
    identity = cache_identity(layout, 4, torch.float8_e4m3fn, 3, [pair(0.25, [0.5, 2.0])] * 3)
    assert len(reads) == 1
    assert identity["v_scale of layer 2"] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "got None for 1 layers"),
        ([], "got 0 pairs for 1 layers"),
        ([pair([0.1, 0.2, 0.3], 0.1)], "k_scale of layer 0: got shape"),
        ([(torch.tensor(0.1), torch.tensor(0.1).half())], "v_scale of layer 0: got dtype"),
    ],
    ids=["absent", "none", "heads", "dtype"],
)
def test_scales_that_do_not_fit_are_refused(scales, message) -> None:
    cache = PagedKVCache(1, 3, 4, 2, 16, kv_cache_dtype="fp8")
    with pytest.raises(ScaleError, match=message):
        cache.fingerprint(scales)


def test_differences_are_named_and_the_many_are_counted() -> None:
    saved = {"format": "auto", **{f"fact {index}": index for index in range(9)}}
    own = {"format": "auto", "more": 1, **{f"fact {index}": -index for index in range(9)}}
    with pytest.raises(FormatError) as caught:
        check_same_identity(saved, own)
    message = str(caught.value)
    assert "more (saved None, this cache 1), fact 1 (saved 1, this cache -1)" in message
    assert "and 5 more;" in message
    assert "format" not in message
