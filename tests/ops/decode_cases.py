"""Batches for the Hopper decode kernel, and attention in float64 over what their pages mean.

Bytes that no key was written to are NaN, ids behind the end of a sequence's blocks are garbage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantattn.formats import CacheFormat, format_of_numbers, parse_kv_cache_dtype
from quantattn.kernels._attention_arguments import paged_arguments
from quantattn.kernels._attention_call import AttentionCall
from quantattn.kernels.hopper import decode as launcher
from quantattn.layout import PageLayout
from tests.ops.page_oracle import rotation

E4M3 = torch.float8_e4m3fn
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1023, 3000]
MASKS_AND_SCORES = [
    {"causal": False},
    {"sliding_window": 1},
    {"sliding_window": 128, "logits_soft_cap": 3.0},
    {"softmax_scale": -0.2},
    {"softmax_scale": 0.0},
]


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
        self._place_blocks()
        self._make_pages()
        self._make_query()

    def _place_blocks(self) -> None:
        blocks = [-(-n // self.block_size) for n in self.seq_lens]
        self.order_of_blocks = torch.randperm(sum(blocks) + 3)
        self.table = torch.full((len(blocks), max(blocks) + 2), 2**30, dtype=torch.int32)
        self.table[:, -1] = -1
        ids = self.order_of_blocks.split([*blocks, 3])
        for row, some in zip(self.table, ids, strict=False):
            row[: len(some)] = some

    def ids(self, sequence: int) -> Tensor:
        return self.table[sequence, : -(-self.seq_lens[sequence] // self.block_size)].long()

    def _make_pages(self) -> None:
        rows = (self.heads[1], self.head_dim)
        shape = (len(self.order_of_blocks), 2, self.block_size, *rows)
        codes = torch.full(shape, math.nan).to(self.pages_dtype)
        for sequence, length in enumerate(self.seq_lens):
            ids = self.ids(sequence)
            new = torch.full((2, len(ids) * self.block_size, *rows), math.nan)
            new[:, :length] = torch.randn(2, length, *rows) + 0.25
            new = new.unflatten(1, (len(ids), self.block_size)).transpose(0, 1)
            codes[ids] = new.to(self.pages_dtype)
        self.codes = codes.cuda()
        if self.order == "HND":
            codes = codes.transpose(2, 3)
        size = codes[0].numel()
        self.pages = torch.full((len(codes), size + self.gap), math.nan).to(self.pages_dtype)
        self.pages[:, :size] = codes.flatten(1)
        self.pages = self.pages.cuda()[:, :size]

    def _make_query(self) -> None:
        num_heads, kv_heads = self.heads
        tokens = sum(self.query_lens) + self.padding
        query = torch.randn(tokens, num_heads, self.head_dim, device="cuda")
        query *= torch.exp2(torch.randint(-6, 3, (tokens, num_heads, 1), device="cuda"))
        query[sum(self.query_lens) :] = math.nan
        self.query = query.to(self.dtype)
        scales = torch.rand(3, kv_heads, device="cuda") + 0.3
        self.q_scale, self.k_scale, self.v_scale = scales if self.per_head else scales[:, 0]

    @property
    def format(self) -> CacheFormat:
        return format_of_numbers(self.pages_dtype)

    def call(self, **options) -> AttentionCall:
        ends = torch.tensor([0, *self.query_lens]).cumsum(0)
        widths = (self.head_dim, self.head_dim)
        arguments = {
            "query": self.query,
            "kv_cache": self.pages,
            "layout": PageLayout(self.heads[1], *widths, self.order, self.format),
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
        rows = self.codes[self.ids(sequence).cuda()].double()
        rows = rows.transpose(0, 1).flatten(1, 2)[:, :length]
        scales = (self.k_scale, self.v_scale)
        if self.pages_dtype.itemsize > 1:
            return rows.unbind(0)
        key, value = (x * s.double().view(-1, 1) for x, s in zip(rows, scales, strict=True))
        return key, value


@dataclass
class RowCase(Case):
    """The same over pages with numbers for each row; codes and numbers are drawn at random.

    `spread` is the range of V scales in binades, around `v_size`.
    """

    name: str = "int8_per_token_head"
    spread: float = 6.0
    v_size: float = 1.0

    @property
    def format(self) -> CacheFormat:
        return parse_kv_cache_dtype(self.name)

    def _make_pages(self) -> None:
        kv_heads, size = self.heads[1], self.block_size
        kinds = 2 if self.name.startswith("int4") else 1
        blocks = len(self.order_of_blocks)
        codes = torch.full((blocks, 2, size, kv_heads, self.head_dim // kinds), 255).byte()
        numbers = torch.full((blocks, 2, size, kv_heads, kinds), math.nan)
        numbers[:, :, ::3] = -math.inf
        numbers[:, :, 1::3] = 3e38
        for sequence, length in enumerate(self.seq_lens):
            for place, block in enumerate(self.ids(sequence).tolist()):
                used = min(size, length - place * size)
                codes[block, :, :used] = self._draw_codes(2, used, *codes.shape[3:])
                numbers[block, :, :used] = self._draw_numbers(2, used, kv_heads, kinds)
        self.codes, self.numbers = codes.cuda(), numbers.cuda()
        placed = codes.transpose(2, 3) if self.order == "HND" else codes
        runs = numbers.permute(0, 1, 3, 4, 2).contiguous().view(torch.uint8)
        page = torch.cat([placed.flatten(1), runs.flatten(1)], 1)
        self.pages = torch.full((blocks, page.shape[1] + self.gap), 255).byte()
        self.pages[:, : page.shape[1]] = page
        self.pages = self.pages.cuda()[:, : page.shape[1]]

    def _draw_codes(self, *shape: int) -> Tensor:
        if self.name.startswith("fp8"):
            return (torch.randn(shape) * 90 + 20).clamp(-448, 448).to(E4M3).view(torch.uint8)
        if self.name.startswith("int8"):
            return torch.randint(-127, 128, shape).to(torch.int8).view(torch.uint8)
        return torch.randint(0, 256, shape).byte()

    def _draw_numbers(self, *shape: int) -> Tensor:
        steps = {"fp8": 90.0, "int8": 73.0, "int4": 4.6}[self.name.split("_")[0]]
        numbers = torch.exp2(torch.rand(shape) - 0.5) / steps
        numbers[1] *= torch.exp2(self.spread * (torch.rand(shape[1:]) - 0.5)) * self.v_size
        if shape[-1] == 2:
            numbers[..., 1] = -numbers[..., 0] * (7.5 + torch.randn(shape[:-1]))
        return numbers

    def keys_and_values(self, sequence: int) -> tuple[Tensor, Tensor]:
        length, ids = self.seq_lens[sequence], self.ids(sequence).cuda()
        codes, numbers = (
            t[ids].transpose(0, 1).flatten(1, 2)[:, :length] for t in (self.codes, self.numbers)
        )
        scale = numbers[..., :1].double()
        if self.name.startswith("fp8"):
            rows = codes.view(E4M3).double() * scale
        elif self.name.startswith("int8"):
            rows = codes.view(torch.int8).double() * scale
        else:
            halves = torch.stack([codes % 16, codes // 16], -1).flatten(-2).double()
            rows = halves * scale + numbers[..., 1:].double()
            rows = rows @ torch.from_numpy(rotation(self.head_dim)).cuda().T
        return rows[0], rows[1]


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
    assert launcher.unsupported(call) is None
    out, lse = call.new_outputs()
    launcher.launch(call, paged_arguments(call, out, lse))
    return out, lse


def compare(case: Case, call: AttentionCall, bound: float = 4e-3) -> None:
    """Compare all rows together, and each row of each head by three times the bound.

    A row is measured against itself or the usual row of its token, whichever is larger. The tensor
    cores keep 13 fraction bits of a sum of FP8 products. Scores here reach 30, which can be off by
    2^-8, and so can the weights of a row in which they stand out.
    """
    out, lse = decode(call)
    want, want_lse = attend(case, call)
    error, size = (out.double() - want).norm(dim=2), want.norm(dim=2)
    whole = (error.norm() / size.norm().clamp(min=1e-30)).item()
    assert whole <= bound, whole
    size = torch.maximum(size, size.square().mean(1, keepdim=True).sqrt())
    worst = (error / size.clamp(min=1e-30)).flatten().argmax().item()
    place = divmod(worst, want.shape[1])
    assert (error <= 3 * bound * size).all(), (place, error[place].item(), size[place].item())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=5e-3)
