"""Batches over pages of any length, on any device, compared with float64 at some of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quantattn import ops
from quantattn.arithmetic import dequantize_rows
from quantattn.formats import parse_kv_cache_dtype
from quantattn.layout import PageLayout
from quantattn.rotation import rotate_back
from quantattn.testing import GARBAGE_BLOCK, assert_matches

BLOCK_SIZE, HEADS, KV_HEADS, DIM = 16, 8, 2, 128
SEEN = 6
"""Rows of a sequence that are compared, beside its first and last."""


@dataclass(frozen=True)
class LongBatch:
    """Random keys and values, written to blocks in random order among bytes that are NaN."""

    layout: PageLayout
    query: Tensor
    pages: Tensor
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    block_table: Tensor
    scales: dict[str, Tensor]

    def attend(self, **changes: Any) -> tuple[Tensor, Tensor]:
        return ops.paged_attention(self.query, self.pages, **{**self.arguments(), **changes})

    def arguments(self) -> dict[str, Any]:
        device = self.pages.device
        return {
            "cu_seqlens_q": _ends(self.query_lens).to(device),
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32, device=device),
            "block_table": self.block_table,
            "max_seqlen_q": max(self.query_lens),
            "num_kv_heads": KV_HEADS,
            "kv_cache_dtype": self.layout.format.name,
            "scale_placement": self.layout.scale_placement,
            "return_lse": True,
            **self.scales,
        }

    def part(self, first: int, end: int) -> LongBatch:
        """Of a batch of one sequence, its queries from the first to before the end."""
        behind = self.query_lens[0] - end
        return replace(
            self,
            query=self.query[first:end],
            query_lens=[end - first],
            seq_lens=[self.seq_lens[0] - behind],
        )

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Compare the first, last and some other rows of each sequence."""
        chosen, wanted = [], []
        for row, *right in self._expected():
            chosen.append((out[row], lse[row]))
            wanted.append(right)
        got, got_lse = (torch.stack(x) for x in zip(*chosen, strict=True))
        want, want_lse = (torch.stack(x) for x in zip(*wanted, strict=True))
        assert_matches(got, want)
        torch.testing.assert_close(got_lse.double(), want_lse, rtol=1e-3, atol=2e-3)

    def _expected(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        starts = _ends(self.query_lens).tolist()
        for number, (tokens, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if tokens == 0:
                continue
            key, value = self.keys_and_values(number, length)
            for token in sorted({0, tokens - 1, *torch.randint(tokens, (SEEN,)).tolist()}):
                position = length - tokens + token
                seen = (x[: position + 1] for x in (key, value))
                yield starts[number] + token, *_attend(self.query[starts[number] + token], *seen)

    def keys_and_values(self, sequence: int, length: int) -> tuple[Tensor, Tensor]:
        blocks = self.block_table[sequence, : -(-length // BLOCK_SIZE)].long()
        layout, fmt = self.layout, self.layout.format
        views = (layout.key_view(self.pages), layout.value_view(self.pages))
        if fmt.has_page_scales:
            scales = layout.scale_views(self.pages)
            sides = [
                dequantize_rows(codes[blocks], numbers[blocks], fmt)
                for codes, numbers in zip(views, scales, strict=True)
            ]
            sides = [rotate_back(x) if fmt.is_rotated else x for x in sides]
        else:
            sides = [x.view(torch.uint8)[blocks].view(x.dtype).double() for x in views]
            factors = (self.scales.get(name) for name in ("k_scale", "v_scale"))
            sides = [
                x if factor is None else x * factor.double()[:, None]
                for x, factor in zip(sides, factors, strict=True)
            ]
        key, value = (x.flatten(0, 1)[:length].double() for x in sides)
        return key, value


def draw(
    name: str,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    device: str,
    *,
    scale_placement: str = "page",
    first_block: int = 0,
) -> LongBatch:
    """Draw a batch whose blocks are numbered from `first_block` on."""
    fmt = parse_kv_cache_dtype(name)
    layout = PageLayout(KV_HEADS, DIM, DIM, "NHD", fmt, scale_placement)
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
    dtype = fmt.storage_dtype or torch.bfloat16
    size = layout.page_size(BLOCK_SIZE) * dtype.itemsize
    bytes_ = torch.empty(first_block + sum(counts), size, dtype=torch.uint8, device=device)
    bytes_[first_block:] = 0xFF
    table = torch.full((len(counts), max(counts) + 1), GARBAGE_BLOCK, dtype=torch.int32)
    order = torch.randperm(sum(counts)).int() + first_block
    for row, ids in zip(table, order.split(counts), strict=True):
        row[: len(ids)] = ids
    scales = {}
    if fmt.uses_layer_scales:
        scales = {"k_scale": torch.tensor([0.02, 0.013]), "v_scale": torch.tensor([0.011, 0.03])}
    batch = LongBatch(
        layout,
        torch.randn(sum(query_lens), HEADS, DIM, device=device).bfloat16(),
        bytes_.view(dtype),
        query_lens,
        seq_lens,
        table.to(device),
        {side: scale.to(device) for side, scale in scales.items()},
    )
    for row, length in zip(batch.block_table, seq_lens, strict=True):
        _write(batch, row, length)
    return batch


def _write(batch: LongBatch, blocks: Tensor, length: int) -> None:
    device, layout = blocks.device, batch.layout
    places = torch.arange(length, device=device)
    slots = blocks.long()[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    key, value = torch.randn(2, length, KV_HEADS, DIM, device=device).bfloat16() + 0.25
    ops.write_kv(
        key,
        value,
        batch.pages,
        slots,
        k_scale=batch.scales.get("k_scale"),
        v_scale=batch.scales.get("v_scale"),
        kv_cache_dtype=layout.format.name,
        scale_placement=layout.scale_placement,
    )


def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """One token over the keys that it sees: output `[heads, width]` and LSE, float64."""
    if len(key) == 0:
        nothing = torch.zeros(HEADS, value.shape[2], dtype=torch.float64, device=query.device)
        return nothing, torch.full_like(nothing[:, 0], -math.inf)
    groups = query.double().unflatten(0, (KV_HEADS, -1))
    scores = torch.einsum("hgd,khd->hgk", groups, key) * query.shape[-1] ** -0.5
    out = torch.einsum("hgk,khd->hgd", scores.softmax(2), value)
    return out.flatten(0, 1), scores.logsumexp(2).flatten()


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
