"""The Hopper decode kernel on a GPU, against attention in float64 over what the pages' bytes mean.

Bytes that no key was written to are NaN, ids behind the end of a sequence's blocks are garbage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quantattn.formats import format_of_numbers
from quantattn.kernels import _hopper_decode
from quantattn.kernels._attention_call import AttentionCall
from quantattn.layout import PageLayout
from quantattn.ops import static_quant_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

E4M3 = torch.float8_e4m3fn
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 3000]


@dataclass
class Case:
    """A batch on the GPU, its pages made by hand, and what a call with it needs."""

    seq_lens: list[int]
    query_lens: list[int] | None = None
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    block_size: int = 16
    order: str = "NHD"
    gap: int = 0
    padding: int = 0
    dtype: torch.dtype = torch.bfloat16
    per_head: bool = True
    pages_dtype: torch.dtype = E4M3

    def __post_init__(self) -> None:
        self.query_lens = self.query_lens or [1] * len(self.seq_lens)
        num_heads, kv_heads = self.heads
        blocks = [-(-n // self.block_size) for n in self.seq_lens]
        order = torch.randperm(sum(blocks) + 3)
        self.table = torch.full((len(blocks), max(blocks) + 2), 2**30, dtype=torch.int32)
        self.table[:, -1] = -1
        shape = (len(order), 2, self.block_size, kv_heads, self.head_dim)
        codes = torch.full(shape, math.nan).to(self.pages_dtype)
        first = 0
        for row, count, length in zip(self.table, blocks, self.seq_lens, strict=True):
            ids = order[first : first + count]
            row[:count] = ids
            rows = torch.full((2, count * self.block_size, *shape[3:]), math.nan)
            rows[:, :length] = torch.randn(2, length, kv_heads, self.head_dim) + 0.25
            rows = rows.unflatten(1, (count, self.block_size)).transpose(0, 1)
            codes[ids] = rows.to(self.pages_dtype)
            first += count
        self.codes = codes.cuda()
        if self.order == "HND":
            codes = codes.transpose(2, 3)
        size = codes[0].numel()
        self.pages = torch.full((len(order), size + self.gap), math.nan).to(self.pages_dtype)
        self.pages[:, :size] = codes.flatten(1)
        self.pages = self.pages.cuda()[:, :size]
        tokens = sum(self.query_lens) + self.padding
        query = torch.randn(tokens, num_heads, self.head_dim, device="cuda")
        query *= torch.exp2(torch.randint(-6, 3, (tokens, num_heads, 1), device="cuda"))
        query[sum(self.query_lens) :] = math.nan
        self.query = query.to(self.dtype)
        scales = torch.rand(3, kv_heads, device="cuda") + 0.3
        self.q_scale, self.k_scale, self.v_scale = scales if self.per_head else scales[:, 0]

    def call(self, **options) -> AttentionCall:
        ends = torch.tensor([0, *self.query_lens]).cumsum(0)
        fmt = format_of_numbers(self.pages_dtype)
        arguments = {
            "query": self.query,
            "kv_cache": self.pages,
            "layout": PageLayout(self.heads[1], self.head_dim, self.head_dim, self.order, fmt),
            "cu_seqlens_q": ends.int().cuda(),
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32, device="cuda"),
            "block_table": self.table.cuda(),
            "max_seqlen_q": max(self.query_lens),
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "q_scale": self.q_scale if self.dtype == E4M3 else None,
            "prob_scale": None,
            "softmax_scale": self.head_dim**-0.5,
            "causal": True,
            "sliding_window": None,
            "logits_soft_cap": None,
            "sinks": None,
            "out_scale": None,
            "round_through": False,
            "out_dtype": torch.bfloat16 if self.dtype == E4M3 else self.dtype,
            "return_lse": True,
        }
        return AttentionCall(**{**arguments, **options})

    def keys_and_values(self, sequence: int) -> tuple[Tensor, Tensor]:
        length = self.seq_lens[sequence]
        ids = self.table[sequence, : -(-length // self.block_size)].long().cuda()
        rows = self.codes[ids].double().transpose(0, 1).flatten(1, 2)[:, :length]
        scales = (self.k_scale, self.v_scale)
        if self.pages_dtype.itemsize > 1:
            return rows.unbind(0)
        key, value = (x * s.double().view(-1, 1) for x, s in zip(rows, scales, strict=True))
        return key, value


def attend(case: Case, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64; 0 and -inf for padding."""
    out = torch.zeros(call.query.shape, dtype=torch.float64, device="cuda")
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64, device="cuda")
    query = call.query.double()
    if call.q_scale is not None:
        group = query.unflatten(1, (case.heads[1], -1))
        query = (group * call.q_scale.double().view(-1, 1, 1)).flatten(1, 2)
    start = 0
    for sequence, (tokens, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        rows = slice(start, start + tokens)
        start += tokens
        if length == 0:
            continue
        key, value = (
            x.repeat_interleave(call.group_size, 1) for x in case.keys_and_values(sequence)
        )
        scores = torch.einsum("qhd,khd->qhk", query[rows], key) * call.softmax_scale
        if call.logits_soft_cap is not None:
            scores = call.logits_soft_cap * torch.tanh(scores / call.logits_soft_cap)
        places = torch.arange(length, device="cuda")
        own = length - tokens + torch.arange(tokens, device="cuda")[:, None]
        visible = places <= own if call.causal else places >= 0 * own
        if call.sliding_window is not None:
            visible = visible & (places > own - call.sliding_window)
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        if call.sinks is not None:
            sink = call.sinks.double()[None, :, None].expand(tokens, -1, 1)
            scores = torch.cat([scores, sink], 2)
        lse[rows] = scores.logsumexp(2)
        prob = scores.softmax(2)[:, :, :length]
        out[rows] = torch.einsum("qhk,khd->qhd", prob, value)
    return out, lse


def decode(call: AttentionCall) -> tuple[Tensor, Tensor]:
    assert _hopper_decode.unsupported(call) is None
    return _hopper_decode.decode(call)


def compare(case: Case, call: AttentionCall, bound: float = 4e-3) -> None:
    """Compare all rows together, and each row of each head by three times the bound.

    The tensor cores keep 13 fraction bits of a sum of FP8 products. Scores here reach 30, which can
    be off by 2^-8, and so can the weights of a row in which they stand out.
    """
    out, lse = decode(call)
    want, want_lse = attend(case, call)
    error = (out.double() - want).norm(dim=2)
    whole = (error.norm() / want.norm().clamp(min=1e-30)).item()
    assert whole <= bound, whole
    size = want.norm(dim=2).square().mean(1, keepdim=True).sqrt()
    worst = (error / size.clamp(min=1e-30)).flatten().argmax().item()
    place = divmod(worst, want.shape[1])
    assert (error <= 3 * bound * size).all(), (place, error[place].item(), size[place[0]].item())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=5e-3)


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


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"sliding_window": 1},
        {"sliding_window": 128, "logits_soft_cap": 3.0},
        {"softmax_scale": -0.2},
        {"softmax_scale": 0.0},
    ],
    ids=str,
)
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


@pytest.mark.parametrize(("groups", "round_through"), [(None, False), (64, True)])
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


def test_pages_further_apart_than_two_to_the_31_elements() -> None:
    case = Case([100, 17], heads=(8, 2))
    count, size = case.pages.shape
    storage = torch.empty((count - 1) * 2**29 + size, dtype=torch.uint8, device="cuda")
    pages = storage.as_strided((count, size), (2**29, 1))
    pages.copy_(case.pages.view(torch.uint8))
    assert storage.numel() > 2**31
    compare(case, case.call(kv_cache=pages.view(E4M3)))
