"""The Hopper decode kernel on a GPU, against attention in float64 over what the pages mean."""

from __future__ import annotations

from copy import copy

import pytest
import torch

pytest.importorskip("triton")

from quantattn.ops import static_quant_fp8
from tests.ops.decode_cases import (
    E4M3,
    LENGTHS,
    MASKS_AND_SCORES,
    Case,
    attend,
    compare,
    decode,
)
from tests.ops.on_hopper import on_hopper

pytestmark = on_hopper


@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 1)], ids=str)
def test_any_group_size(heads) -> None:
    case = Case(LENGTHS, heads=heads)
    compare(case, case.call())


@pytest.mark.parametrize(("block_size", "order"), [(32, "HND"), (256, "NHD")])
def test_any_block_size_and_order(block_size, order) -> None:
    case = Case(LENGTHS, heads=(14, 2), block_size=block_size, order=order, padding=3, gap=48)
    compare(case, case.call())


STORED = [
    (64, E4M3),
    (256, E4M3),
    (128, torch.float8_e5m2),
    (64, torch.float16),
    (128, torch.bfloat16),
    (256, torch.bfloat16),
]


@pytest.mark.parametrize(("head_dim", "stored"), STORED, ids=str)
def test_any_format_and_width(head_dim, stored) -> None:
    dtype = torch.bfloat16 if stored.itemsize == 1 else stored
    case = Case(LENGTHS, heads=(8, 2), head_dim=head_dim, dtype=dtype, pages_dtype=stored)
    compare(case, case.call(sliding_window=700))


@pytest.mark.parametrize("dtype", [torch.float16, E4M3], ids=str)
def test_queries_of_other_types(dtype) -> None:
    case = Case(LENGTHS, dtype=dtype, per_head=False)
    compare(case, case.call())


@pytest.mark.parametrize(
    ("longest", "heads", "stored"),
    [(8, (8, 8), E4M3), (5, (32, 8), torch.bfloat16), (8, (64, 8), E4M3)],
    ids=str,
)
def test_queries_of_several_tokens(longest, heads, stored) -> None:
    query_lens = [longest, 1, 2, 0, longest, 2, 1, longest]
    seq_lens = [longest, 1, 129, 90, 130, 2, 500, 3000]
    case = Case(seq_lens, query_lens, heads=heads, padding=2, pages_dtype=stored)
    compare(case, case.call(sliding_window=70 if longest == 5 else None))


@pytest.mark.parametrize("options", MASKS_AND_SCORES, ids=str)
def test_any_mask_and_score(options) -> None:
    case = Case(LENGTHS, [min(n, 3) for n in LENGTHS], heads=(8, 2), block_size=32)
    compare(case, case.call(**options))


def test_sinks_join_the_denominator_once() -> None:
    """D12: whichever number of workers share a sequence."""
    case = Case([0, 1, 70, 9000], heads=(32, 8))
    compare(case, case.call(sinks=3 * torch.randn(32, device="cuda").bfloat16()))


def test_more_sequences_than_are_counted_at_once() -> None:
    case = Case(LENGTHS * 30, heads=(4, 1))
    compare(case, case.call())


def test_one_long_sequence_is_shared_by_all_workers() -> None:
    case = Case([70_001], heads=(8, 1))
    compare(case, case.call())


def test_runs_of_more_tiles_than_shared_memory_holds() -> None:
    case = Case([9000, 8000, 1, 9500, 8100], heads=(32, 8))
    compare(case, case.call())


def test_sequences_that_another_kernel_serves_are_skipped() -> None:
    query_lens = [1, 40, 2, 100, 1]
    case = Case([300, 40, 2, 1000, 129], query_lens, padding=3)
    call = case.call()
    assert call.decode_limit < 40
    out, _ = decode(call)
    want, _ = attend(case, call)
    skipped = torch.zeros(len(out), dtype=torch.bool, device="cuda")
    skipped[1:41] = skipped[43:143] = True
    torch.testing.assert_close(out[~skipped].double(), want[~skipped], rtol=0.02, atol=0.02)


def test_terms_carry_eight_bits_of_query_and_probabilities() -> None:
    """A miscompiled pair of terms gives NaN, or errors beyond 0.1."""
    for factor in (1.0, 4.0, 1 / 64):
        case = Case([129, 1024, 5000], heads=(64, 8))
        case.query = (torch.randn_like(case.query) * factor).bfloat16()
        compare(case, case.call(out_dtype=torch.float32), bound=2e-3)


@pytest.mark.parametrize(("groups", "round_through"), [(None, False), (64, True), (32, False)])
def test_a_fused_output_is_the_quantized_one(groups, round_through) -> None:
    case = Case(LENGTHS, padding=1)
    scale = torch.rand(() if groups is None else groups, device="cuda") / 50 + 0.002
    fused, _ = decode(case.call(out_scale=scale, round_through=round_through))
    source = torch.bfloat16 if round_through else torch.float32
    unfused, _ = decode(case.call(out_dtype=source))
    codes = static_quant_fp8(unfused.flatten(1), scale).view(torch.uint8)
    assert torch.equal(fused.flatten(1).view(torch.uint8), codes)


def test_a_captured_call_serves_other_lengths_tables_and_scales() -> None:
    first, second = (Case(lengths, heads=(32, 8)) for lengths in (LENGTHS, LENGTHS[::-1]))
    call = first.call()
    other = second.call()
    decode(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(call)
    call.kv_cache.view(torch.uint8).copy_(other.kv_cache.view(torch.uint8))
    for name in ("query", "seq_lens", "block_table", "k_scale", "v_scale"):
        getattr(call, name).copy_(getattr(other, name))
    graph.replay()
    for replayed, eager in zip(captured, decode(other), strict=True):
        assert torch.equal(replayed, eager)


def test_calls_of_one_shape_that_need_other_binaries() -> None:
    """Launches go by key: what Triton compiles for must tell calls apart, in any order."""
    case = Case([0, 17, 300, 1023], heads=(8, 2))
    shape = case.query.shape
    odd = torch.empty(case.query.numel() + 3, dtype=case.dtype, device="cuda")[3:].view(shape)
    wide = torch.empty(shape[0], shape[1], shape[2] + 5, dtype=case.dtype, device="cuda")
    queries = [case.query, odd.copy_(case.query), wide[..., :-5].copy_(case.query)]
    assert odd.data_ptr() % 16 != 0
    sinks = torch.randn(8, device="cuda")
    changes = [
        *({"query": query} for query in queries),
        {"query": case.query.half(), "out_dtype": torch.bfloat16},
        {"query": case.query.to(E4M3), "q_scale": torch.tensor(0.7, device="cuda")},
        {"sinks": sinks},
        {"sinks": sinks.bfloat16()},
        {"sinks": sinks[::2].repeat_interleave(2).half()},
        {"k_scale": case.k_scale[0], "v_scale": case.v_scale[1:]},
        {"out_dtype": torch.float32},
    ]
    for _ in range(2):
        for change in changes:
            call, other = case.call(**change), copy(case)
            other.k_scale, other.v_scale = call.k_scale, call.v_scale
            compare(other, call)
        changes.reverse()


def test_pages_further_apart_than_two_to_the_31_elements() -> None:
    case = Case([100, 17], heads=(8, 2))
    count, size = case.pages.shape
    storage = torch.empty((count - 1) * 2**29 + size, dtype=torch.uint8, device="cuda")
    pages = storage.as_strided((count, size), (2**29, 1))
    pages.copy_(case.pages.view(torch.uint8))
    assert storage.numel() > 2**31
    compare(case, case.call(kv_cache=pages.view(E4M3)))
