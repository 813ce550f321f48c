"""Batches for the Hopper prefill kernel, and attention in float64 over what their bytes mean.

Slots that no key was written to are NaN, ids behind the end of a sequence's blocks are garbage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantattn.formats import parse_kv_cache_dtype
from quantattn.kernels._attention_call import AttentionCall, Call, PackedCall
from quantattn.kernels.hopper import prefill
from quantattn.kernels.paged_attention import paged_attention
from quantattn.kernels.varlen_attention import varlen_attention
from quantattn.layout import PageLayout

E4M3 = torch.float8_e4m3fn
QUERIES = [1, 2, 63, 64, 65, 127, 129, 1000, 300, 0, 17, 200]
KEYS = [1, 900, 63, 129, 65, 128, 5000, 1000, 300, 40, 0, 77]
FP8 = parse_kv_cache_dtype("fp8_e4m3")


@dataclass
class Case:
    """A batch on the GPU, its query, keys and values in e4m3, and the calls that take it."""

    query_lens: list[int]
    key_lens: list[int]
    heads: tuple[int, int] = (8, 2)
    head_dims: tuple[int, int] = (128, 128)
    block_size: int | None = None
    order: str = "NHD"
    padding: int = 0
    per_head: bool = True

    def __post_init__(self) -> None:
        num_heads, kv_heads = self.heads
        tokens, keys = sum(self.query_lens) + self.padding, sum(self.key_lens)
        query = torch.randn(tokens, num_heads, self.head_dims[0], device="cuda")
        query[sum(self.query_lens) :] = math.nan
        self.query = query.to(E4M3)
        # Rows behind the last key are nobody's.
        self.key, self.value = (
            torch.full((keys + 3, kv_heads, width), math.nan, device="cuda")
            for width in self.head_dims
        )
        self.key[:keys] = torch.randn_like(self.key[:keys])
        self.value[:keys] = torch.randn_like(self.value[:keys]) + 0.25
        self.key, self.value = self.key.to(E4M3), self.value.to(E4M3)
        scales = torch.rand(3, kv_heads, device="cuda") + 0.3
        # A probability of 1 has a code of its own, as it has if the scale is 1 / 448.
        codes = torch.tensor([448.0, 1.0, 13.0, 1.25, 240.0, 0.5, 15.0, 1.875])[:kv_heads].cuda()
        scales = [*scales, 1 / codes]
        if not self.per_head:
            scales = [numbers[0] for numbers in scales]
        self.q_scale, self.k_scale, self.v_scale, self.prob_scale = scales

    def call(self, **options) -> Call:
        arguments = {
            "query": self.query,
            "cu_seqlens_q": self.ends(self.query_lens),
            "max_seqlen_q": max(self.query_lens),
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "q_scale": self.q_scale,
            "prob_scale": self.prob_scale,
            "softmax_scale": self.head_dims[0] ** -0.5,
            "causal": True,
            "sliding_window": None,
            "logits_soft_cap": None,
            "sinks": None,
            "out_scale": None,
            "round_through": False,
            "out_dtype": torch.bfloat16,
            "return_lse": True,
        }
        where = self.pages() if self.block_size else self.rows()
        kind = AttentionCall if self.block_size else PackedCall
        return kind(**{**arguments, **where, **options})

    @staticmethod
    def ends(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int().cuda()

    def rows(self) -> dict[str, Tensor]:
        return {"key": self.key, "value": self.value, "cu_seqlens_k": self.ends(self.key_lens)}

    def pages(self) -> dict[str, object]:
        size, heads = self.block_size, self.heads[1]
        blocks = [-(-n // size) for n in self.key_lens]
        order = torch.randperm(sum(blocks) + 3)
        table = torch.full((len(blocks), max(blocks) + 2), 2**30, dtype=torch.int32)
        layout = PageLayout(heads, *self.head_dims, self.order, FP8)
        pages = torch.full((len(order), layout.page_size(size)), 0x7F, dtype=torch.uint8).cuda()
        views = layout.key_view(pages), layout.value_view(pages)
        first_block = first_key = 0
        for row, count, length in zip(table, blocks, self.key_lens, strict=True):
            row[:count] = order[first_block : first_block + count]
            token = torch.arange(length)
            where = row[token // size].long().cuda(), (token % size).cuda()
            for view, rows in zip(views, (self.key, self.value), strict=True):
                view[where] = rows[first_key : first_key + length].view(torch.uint8)
            first_block += count
            first_key += length
        return {
            "kv_cache": pages.view(E4M3),
            "layout": layout,
            "seq_lens": torch.tensor(self.key_lens, dtype=torch.int32).cuda(),
            "block_table": table.cuda(),
        }


def attend(case: Case, call: Call) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64; 0 and -inf for padding and for rows that see no key."""
    tokens, num_heads, _ = call.query.shape
    group = num_heads // case.heads[1]
    out = torch.zeros(tokens, num_heads, case.head_dims[1], dtype=torch.float64, device="cuda")
    lse = torch.full((tokens, num_heads), -math.inf, dtype=torch.float64, device="cuda")
    scales = [s.double().expand(case.heads[1]) for s in (call.q_scale, call.k_scale, call.v_scale)]
    start = first = 0
    for count, length in zip(case.query_lens, case.key_lens, strict=True):
        rows, keys = slice(start, start + count), slice(first, first + length)
        start, first = start + count, first + length
        own = length - count + torch.arange(count, device="cuda")[:, None]
        places = torch.arange(length, device="cuda")
        visible = places <= own if call.causal else places >= 0 * own
        if call.sliding_window is not None:
            visible = visible & (places > own - call.sliding_window)
        seen = visible.any(1)
        if not seen.any():
            continue
        for head in range(num_heads):
            q_scale, k_scale, v_scale = (s[head // group] for s in scales)
            key = case.key[keys, head // group].double() * k_scale
            value = case.value[keys, head // group].double() * v_scale
            logits = call.query[rows, head].double() * q_scale @ key.T * call.softmax_scale
            if call.logits_soft_cap is not None:
                logits = call.logits_soft_cap * torch.tanh(logits / call.logits_soft_cap)
            logits = logits.masked_fill(~visible, -math.inf)
            if call.sinks is not None:
                sink = call.sinks[head].double().expand(count, 1)
                logits = torch.cat([logits, sink], 1)
            total = logits.logsumexp(1)
            prob = (logits - total[:, None]).exp()[:, :length]
            out[rows, head] = torch.where(seen[:, None], prob @ value, 0.0)
            lse[rows, head] = torch.where(seen, total, -math.inf)
    return out, lse


def run(call: Call) -> tuple[Tensor, Tensor]:
    assert prefill.unsupported(call) is None, prefill.unsupported(call)
    serve = paged_attention if isinstance(call, AttentionCall) else varlen_attention
    return serve(call)


def compare(case: Case, call: Call, bound: float = 3e-2) -> None:
    """Compare each sequence, whose probabilities carry four significant bits, and all of them."""
    out, lse = run(call)
    want, want_lse = attend(case, call)
    assert torch.isfinite(out.float()).all()
    for start, count in zip(case.ends(case.query_lens).tolist(), case.query_lens, strict=False):
        rows = slice(start, start + count)
        error = (out[rows].double() - want[rows]).norm()
        assert error <= 1.2 * bound * want[rows].norm(), (start, count, error / want[rows].norm())
    error = ((out.double() - want).norm() / want.norm()).item()
    print(f"error {error:.2e}")
    assert error <= bound
    assert not out[sum(case.query_lens) :].any()
    if call.return_lse:
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=5e-3)
