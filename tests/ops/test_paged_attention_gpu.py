"""paged_attention on a GPU, by the kernels for every device, against float64 and itself.

Most tests share one shape, so that few kernels are compiled.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from quantattn import ops
from quantattn.kernels._attention_arguments import TileSizes, paged_arguments
from quantattn.kernels._prefill import tile_sizes
from quantattn.kernels.paged_attention import paged_attention
from quantattn.testing import assert_matches
from tests.ops.paged_cases import MIXED, Case, draw, fp8_query

pytestmark = pytest.mark.gpu

SINKS = torch.linspace(-1, 2, 6).bfloat16()


def attend(case: Case, **changes):
    """Run the decode and prefill kernels for every device, whatever this one's own are."""
    call = case.call("cuda", **changes)
    rows = max(16, 1 << (call.decode_limit * call.group_size - 1).bit_length())
    is_wide = case.layout.head_dim > 128 or call.query.dtype == torch.float32
    arguments = paged_arguments(call, *call.new_outputs())
    return paged_attention(
        call,
        decode_sizes=TileSizes(rows, 32 if is_wide else 64, 4, 2),
        prefill_sizes=tile_sizes(arguments.spec, is_hopper=arguments.is_hopper),
    )


def shared(lens=MIXED, **more) -> Case:
    return draw("fp8_e4m3", lens, dims=(64, 64), **more)


def assert_right(case: Case, result, bound: float = 4e-3, **expected) -> None:
    out, lse = (t.cpu() for t in result)
    want, want_lse = case.expected(**expected)
    assert_matches(out, want, rel_l2=bound)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "dims", "more"),
    [
        ("auto", (256, 256), {"order": "HND"}),
        ("auto", (80, 96), {"dtype": torch.float16, "block_size": 5}),
        ("fp8_e4m3", (64, 64), {"dtype": torch.float32}),
        ("fp8_e5m2", (192, 128), {"order": "HND", "block_size": 64}),
        ("fp8_per_token_head", (24, 16), {"block_size": 256}),
        ("int8_per_token_head", (128, 128), {"placement": "inline", "num_heads": 10}),
        ("int4_per_token_head", (64, 64), {"order": "HND"}),
    ],
    ids=str,
)
def test_mixed_batches_match_float64(name, dims, more) -> None:
    case = draw(name, dims=dims, padding=3, **more)
    is_exact = case.batch.query.dtype == torch.float32
    assert_right(case, attend(case), bound=1e-5 if is_exact else 4e-3)


def test_the_kernels_chosen_for_this_device_match_float64() -> None:
    case = draw("fp8_e4m3", ([1, 3, 0, 40, 1], [17, 300, 0, 50, 64]), dims=(128, 128), padding=3)
    assert_right(case, paged_attention(case.call("cuda")))


@pytest.mark.parametrize("tokens", range(1, 9))
def test_short_queries_match_float64(tokens) -> None:
    case = shared(([tokens] * 4, [tokens, 16 + tokens, 1000, 1023]))
    assert_right(case, attend(case))


def test_lengths_up_to_131072_match_float64() -> None:
    lengths = [0, 1, 15, 16, 17, 1023, 131_072, 40_001]
    case = shared(([min(1, length) for length in lengths], lengths))
    assert_right(case, attend(case))


@pytest.mark.parametrize("context", [0, 777])
def test_prefill_lengths_match_float64(context) -> None:
    queries = [1, 2, 63, 64, 65, 127, 129, 1000]
    case = shared((queries, [query + context for query in queries]))
    assert_right(case, attend(case))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False, "softmax_scale": -0.4},
        {"sinks": SINKS, "sliding_window": 70, "logits_soft_cap": 0.7},
    ],
    ids=str,
)
def test_options_match_float64(options) -> None:
    case = shared(([1, 2, 0, 3, 90], [70, 300, 0, 170, 200]))
    assert_right(case, attend(case, **options), **options)


def test_an_fp8_query_is_dequantized_with_its_scale() -> None:
    case, q_scale = shared(), torch.tensor([0.02, 0.013])
    codes, meaning = fp8_query(case, q_scale)
    assert_right(case, attend(case, query=codes, q_scale=q_scale), query=meaning)


def test_a_quantized_output_is_the_quantized_rounded_output() -> None:
    case, out_scale = shared(padding=1), torch.linspace(0.001, 0.004, 6)
    fused, _ = attend(case, out_scale=out_scale, round_through=True)
    unfused, _ = attend(case)
    codes = ops.static_quant_fp8(unfused, out_scale.cuda())
    assert torch.equal(fused.view(torch.uint8), codes.view(torch.uint8))
    assert not fused[-1].view(torch.uint8).any()


def test_a_prefill_in_chunks_is_the_whole_one_within_rounding() -> None:
    case = shared(([700], [700]))
    whole, whole_lse = attend(case)
    for first, end in pairwise([0, 5, 69, 70, 333, 700]):
        chunk = {
            "query": case.batch.query[first:end],
            "cu_seqlens_q": torch.tensor([0, end - first], dtype=torch.int32),
            "seq_lens": torch.tensor([end], dtype=torch.int32),
        }
        out, lse = attend(case, **chunk)
        assert_matches(out, whole[first:end].double().cpu(), rel_l2=2e-3)
        torch.testing.assert_close(lse, whole_lse[first:end], rtol=1e-4, atol=1e-4)


def test_a_captured_call_replays_other_batches_bit_by_bit() -> None:
    case = shared(([1, 1, 40, 2], [70, 1, 40, 200]))
    call, sizes = case.call("cuda"), TileSizes(16, 64, 4, 2)
    paged_attention(call, decode_sizes=sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = paged_attention(call, decode_sizes=sizes)
    # Other tables reach slots that no key was written to.
    call.kv_cache.view(torch.uint8).bitwise_and_(0x3F)
    call.cu_seqlens_q.copy_(torch.tensor([0, 20, 21, 40, 41]))
    call.seq_lens.copy_(torch.tensor([33, 64, 40, 3]))
    call.block_table.copy_(case.batch.metadata.block_table.flip(0).clamp(max=4))
    call.k_scale.copy_(torch.tensor([0.021, 0.04]))
    call.v_scale.copy_(torch.tensor([0.07, 0.011]))
    graph.replay()
    eager, eager_lse = paged_attention(call, decode_sizes=sizes)
    written = int(call.cu_seqlens_q[-1])
    assert torch.equal(out, eager)
    assert torch.equal(lse, eager_lse)
    assert out[:written].isfinite().all()
    assert out[:written].any(2).all()
    assert not out[written:].any()


def test_pages_beyond_two_to_the_31_elements() -> None:
    case = shared(([1, 30], [70, 30]))
    expected = attend(case)
    pages = case.batch.pages
    rows = 2**31 // pages.shape[1] + 100
    far = torch.empty(rows, pages.shape[1], dtype=torch.uint8, device="cuda")
    shift = len(far) - len(pages)
    far[shift:].copy_(pages.view(torch.uint8))
    table = case.batch.metadata.block_table
    table = torch.where(table < len(pages), table + shift, table)
    moved = attend(case, kv_cache=far.view(pages.dtype), block_table=table)
    assert all(torch.equal(*pair) for pair in zip(moved, expected, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_call_waits_for_the_gpu() -> None:
    case = shared()
    call, sizes = case.call("cuda"), TileSizes(16, 64, 4, 2)
    paged_attention(call, decode_sizes=sizes)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged_attention(call, decode_sizes=sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
