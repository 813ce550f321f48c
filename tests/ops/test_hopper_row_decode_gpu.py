"""The Hopper decode kernel on a GPU over pages with numbers for each row, against float64."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from quantattn.ops import static_quant_fp8
from tests.ops.decode_cases import (
    E4M3,
    LENGTHS,
    MASKS_AND_SCORES,
    RowCase,
    attend,
    compare,
    decode,
)
from tests.ops.on_hopper import on_hopper
from tests.ops.page_oracle import FORMATS

pytestmark = [*on_hopper, pytest.mark.parametrize("name", FORMATS)]


@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 1), (8, 8)], ids=str)
def test_any_group_size(name, heads) -> None:
    case = RowCase(LENGTHS, heads=heads, name=name)
    compare(case, case.call())


@pytest.mark.parametrize(
    ("block_size", "order"), [(32, "HND"), (64, "NHD"), (128, "HND"), (256, "NHD")]
)
def test_any_block_size_and_order(name, block_size, order) -> None:
    case = RowCase(
        LENGTHS, heads=(14, 2), block_size=block_size, order=order, padding=3, gap=48, name=name
    )
    compare(case, case.call())


@pytest.mark.parametrize("head_dim", [64, 256])
def test_any_width(name, head_dim) -> None:
    case = RowCase(LENGTHS, heads=(8, 2), head_dim=head_dim, name=name)
    compare(case, case.call(sliding_window=700))


@pytest.mark.parametrize("dtype", [torch.float16, E4M3], ids=str)
def test_queries_of_other_types(name, dtype) -> None:
    case = RowCase(LENGTHS, dtype=dtype, name=name)
    compare(case, case.call())


@pytest.mark.parametrize(("longest", "heads"), [(8, (8, 8)), (5, (32, 8)), (8, (64, 8))], ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_queries_of_several_tokens(name, longest, heads, head_dim) -> None:
    query_lens = [longest, 1, 2, 0, longest, 2, 1, longest]
    seq_lens = [longest, 1, 129, 90, 130, 2, 500, 3000]
    case = RowCase(seq_lens, query_lens, heads=heads, head_dim=head_dim, padding=2, name=name)
    compare(case, case.call(sliding_window=70 if longest == 5 else None))


@pytest.mark.parametrize("options", MASKS_AND_SCORES, ids=str)
def test_any_mask_and_score(name, options) -> None:
    lengths = [min(n, 3) for n in LENGTHS]
    case = RowCase(LENGTHS, lengths, heads=(8, 2), block_size=32, name=name)
    compare(case, case.call(**options))


def test_what_lies_before_the_window_may_be_anything(name) -> None:
    case = RowCase([100, 517, 1000, 3000], name=name)
    call = case.call(sliding_window=100)
    want, _ = attend(case, call)
    codes = [call.layout.key_view(case.pages), call.layout.value_view(case.pages)]
    for sequence, length in enumerate(case.seq_lens):
        entry, forgotten = divmod(length - 100, case.block_size)
        call.block_table[sequence, :entry] = 2**30
        block = case.table[sequence, entry]
        for view in codes:
            view[block, :forgotten] = 255
        for view in call.layout.scale_views(case.pages):
            view[block, :forgotten] = math.nan
    out, _ = decode(call)
    assert ((out.double() - want).norm() / want.norm()).item() <= 4e-3


def test_sinks_join_the_denominator_once(name) -> None:
    """D12: whichever number of workers share a sequence."""
    case = RowCase([0, 1, 70, 9000], heads=(32, 8), name=name)
    compare(case, case.call(sinks=3 * torch.randn(32, device="cuda").bfloat16()))


@pytest.mark.parametrize("v_size", [1e-24, 1e28])
@pytest.mark.parametrize("spread", [0.5, 24.0])
def test_values_of_any_size(name, v_size, spread) -> None:
    case = RowCase([129, 1024, 5000], spread=spread, v_size=v_size, name=name)
    compare(case, case.call(out_dtype=torch.float32))


def test_terms_carry_the_query_and_the_probabilities(name) -> None:
    """A miscompiled pair of terms gives NaN, or errors beyond 0.1."""
    for factor in (1.0, 4.0, 1 / 64):
        case = RowCase([129, 1024, 5000], heads=(64, 8), name=name)
        case.query = (torch.randn_like(case.query) * factor).bfloat16()
        compare(case, case.call(out_dtype=torch.float32), bound=2e-3)


def test_one_long_sequence_is_shared_by_all_workers(name) -> None:
    case = RowCase([70_001], heads=(8, 1), name=name)
    compare(case, case.call())


def test_runs_of_more_tiles_than_shared_memory_holds(name) -> None:
    case = RowCase([9000, 8000, 1, 9500, 8100], heads=(32, 8), name=name)
    compare(case, case.call())


def test_a_fused_output_is_the_quantized_one(name) -> None:
    case = RowCase(LENGTHS, padding=1, name=name)
    scale = torch.rand(64, device="cuda") / 50 + 0.002
    fused, _ = decode(case.call(out_scale=scale))
    unfused, _ = decode(case.call(out_dtype=torch.float32))
    codes = static_quant_fp8(unfused.flatten(1), scale).view(torch.uint8)
    assert torch.equal(fused.flatten(1).view(torch.uint8), codes)


def test_a_captured_call_serves_other_lengths_tables_and_numbers(name) -> None:
    first, second = (RowCase(lengths, name=name) for lengths in (LENGTHS, LENGTHS[::-1]))
    call, other = first.call(), second.call()
    decode(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(call)
    for field in ("kv_cache", "query", "seq_lens", "block_table"):
        getattr(call, field).copy_(getattr(other, field))
    graph.replay()
    for replayed, eager in zip(captured, decode(other), strict=True):
        assert torch.equal(replayed, eager)
