"""The Hopper prefill kernel on a GPU, against attention in float64 over what the bytes mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from quantattn.ops import static_quant_fp8
from tests.ops.on_hopper import on_hopper
from tests.ops.prefill_batches import E4M3, KEYS, QUERIES, Case, attend, compare, run

pytestmark = on_hopper


@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (3, 3), (40, 8)], ids=str)
@pytest.mark.parametrize("block_size", [None, 16])
def test_any_group_size(heads, block_size) -> None:
    case = Case(QUERIES, KEYS, heads=heads, block_size=block_size, padding=5)
    compare(case, case.call())


@pytest.mark.parametrize(("block_size", "order"), [(32, "HND"), (64, "NHD"), (256, "HND")])
def test_any_block_size_and_order(block_size, order) -> None:
    case = Case(QUERIES, KEYS, block_size=block_size, order=order)
    compare(case, case.call())


@pytest.mark.parametrize(
    "head_dims", [(64, 64), (256, 256), (96, 96), (192, 128), (64, 256)], ids=str
)
@pytest.mark.parametrize("block_size", [None, 32])
def test_any_width(head_dims, block_size) -> None:
    case = Case(QUERIES, KEYS, head_dims=head_dims, block_size=block_size)
    compare(case, case.call())


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("block_size", [None, 32])
def test_any_width_without_an_lse(head_dims, block_size) -> None:
    """The denominator is then another: that of the rounded probabilities."""
    case = Case(QUERIES, KEYS, head_dims=head_dims, block_size=block_size)
    compare(case, replace(case.call(), return_lse=False), bound=2.5e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"sliding_window": 1},
        {"sliding_window": 200},
        {"sliding_window": 300, "causal": False},
        {"logits_soft_cap": 3.0},
        {"softmax_scale": 0.0, "prob_scale": torch.tensor(0.5)},
        {"softmax_scale": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [None, 16])
def test_any_mask_and_score(options, block_size) -> None:
    case = Case(QUERIES, KEYS, block_size=block_size, per_head=False)
    on_device = {
        name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    compare(case, case.call(**on_device))


def test_sinks_join_the_denominator_once() -> None:
    case = Case(QUERIES, KEYS)
    compare(case, case.call(sinks=3 * torch.randn(8, device="cuda").bfloat16()))
    compare(case, case.call(sinks=60 + torch.randn(8, device="cuda").bfloat16()))


@pytest.mark.parametrize("block_size", [None, 64])
def test_a_chunk_of_a_long_sequence(block_size) -> None:
    case = Case([130, 65], [131_072, 70_001], heads=(4, 1), block_size=block_size)
    compare(case, case.call())


def test_values_with_an_offset_over_a_flat_softmax() -> None:
    """Sums of numbers of one sign grow: the tensor cores would lose what they add last."""
    case = Case([70], [131_072], heads=(2, 1))
    case.query = (case.query.float() / 8).to(E4M3)
    case.value = (case.value.float() / 4 + 8).to(E4M3)
    compare(case, case.call(prob_scale=torch.tensor(0.5).cuda()), bound=1.5e-2)


def test_a_key_that_stands_out() -> None:
    case = Case([300], [9000], heads=(4, 2))
    rows = case.key.float()
    rows[4000] *= 20
    case.key = rows.clamp(-448, 448).to(E4M3)
    compare(case, case.call())


@pytest.mark.parametrize(("groups", "round_through"), [(None, False), (1, True), (8, False)])
def test_a_fused_output_is_the_quantized_one(groups, round_through) -> None:
    case = Case(QUERIES, KEYS, padding=2)
    shape = () if groups is None else (groups,)
    scale = torch.rand(shape, device="cuda") / 50 + 0.002
    fused, _ = run(case.call(out_scale=scale, round_through=round_through))
    source = torch.bfloat16 if round_through else torch.float32
    unfused, _ = run(case.call(out_dtype=source))
    codes = static_quant_fp8(unfused.flatten(1), scale).view(torch.uint8)
    apart = (fused.flatten(1).view(torch.uint8).int() - codes.int()).abs()
    # Not rounded first, rows are multiplied with a quotient in place of being divided.
    assert apart.max() <= (0 if round_through else 1)
    assert apart.count_nonzero() <= 2e-5 * apart.numel()


def test_a_mixed_batch_is_shared_with_decode() -> None:
    case = Case([1, 300, 1, 2, 129], [700, 300, 31, 90, 5000], block_size=16, padding=3)
    call = case.call()
    assert call.decode_limit >= 2
    compare(case, call)


def test_batches_of_any_size_one_after_another() -> None:
    """Triton compiles for a number that is 1, or a multiple of 16."""
    for count in (1, 4, 1):
        case = Case(QUERIES[4:8] * (count // 4) or [130], KEYS[4:8] * (count // 4) or [777])
        compare(case, case.call())


def test_many_sequences() -> None:
    lengths = [1 + 37 * i % 190 for i in range(1500)]
    case = Case(lengths, [n + 29 * n % 411 for n in lengths], heads=(2, 1))
    compare(case, case.call())


def test_a_captured_call_serves_other_lengths_tables_and_scales() -> None:
    first = Case(QUERIES, KEYS, block_size=16)
    second = Case(QUERIES[::-1], KEYS[::-1], block_size=16)
    call, other = first.call(), second.call()
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call)
    call.kv_cache.view(torch.uint8).copy_(other.kv_cache.view(torch.uint8))
    for name in ("query", "cu_seqlens_q", "seq_lens", "block_table", "k_scale", "prob_scale"):
        mine = getattr(call, name)
        mine.view(torch.uint8).copy_(getattr(other, name).view(torch.uint8))
    graph.replay()
    for replayed, eager in zip(captured, run(replace(call)), strict=True):
        assert torch.equal(replayed, eager)
    second.q_scale, second.v_scale = first.q_scale, first.v_scale
    want, _ = attend(second, second.call())
    torch.testing.assert_close(captured[0].double(), want, rtol=0.1, atol=0.1)


def test_repeated_launches_agree() -> None:
    case = Case(QUERIES, KEYS, heads=(32, 8))
    call = case.call()
    first = run(call)
    for _ in range(200):
        for once, again in zip(first, run(call), strict=True):
            assert torch.equal(once, again)
