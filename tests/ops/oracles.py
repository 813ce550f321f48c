"""Attention in float64 by loops over tokens and heads, over what the bytes of the pages mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests import fp8_oracle

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def per_head(scale: Tensor | None, heads: int) -> list[float]:
    """One Python float a head."""
    values = [1.0] if scale is None else scale.flatten().tolist()
    return values * heads if len(values) == 1 else values


def read_rows(
    pages: Tensor, slots: list[int], width: int, heads: int, start: int, order: str, size: int
) -> Tensor:
    """Raw stored numbers of some slots `[len(slots), heads, width]`, by hand-made indices."""
    rows = []
    for slot in slots if width else []:
        block, offset = divmod(slot, size)
        for head in range(heads):
            row = offset * heads + head if order == "NHD" else head * size + offset
            rows.append(pages[block, start + row * width :][:width])
    stacked = torch.stack([r.view(torch.uint8) for r in rows]) if rows else torch.empty(0)
    return stacked.view(pages.dtype).view(len(slots), heads, width) if rows else stacked


def read_cache(
    pages: Tensor,
    slots: list[int],
    *,
    heads: int,
    dims: tuple[int, int],
    order: str,
    kv_cache_dtype: str,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Dequantized keys and values of some slots, float64 `[len(slots), heads, width]`."""
    size = pages.shape[1] // (heads * sum(dims))
    sides = []
    for width, start, scale in zip(dims, (0, size * heads * dims[0]), scales, strict=True):
        raw = read_rows(pages, slots, width, heads, start, order, size)
        if raw.numel() == 0:
            sides.append(torch.zeros(len(slots), heads, width, dtype=torch.float64))
        elif kv_cache_dtype == "auto":
            sides.append(raw.double())
        else:
            values = fp8_oracle.decode(raw, FP8[kv_cache_dtype])
            factor = torch.tensor(per_head(scale, heads), dtype=torch.float64)
            sides.append(values * factor[:, None])
    return sides[0], sides[1]


@dataclass
class Options:
    """Arguments of paged_attention that change the result."""

    softmax_scale: float
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: Tensor | None = None
    prob_scale: Tensor | None = None


def as_fp8(x: Tensor, scale: float) -> Tensor:
    """What is left of x once it is stored as e4m3."""
    codes = torch.from_numpy(fp8_oracle.encode((x / scale).numpy(), torch.float8_e4m3fn))
    return fp8_oracle.decode(codes, torch.float8_e4m3fn) * scale


def attend_row(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    opt: Options,
    sink: float | None,
    prob_scale: float | None,
) -> tuple[Tensor, float]:
    """One row of one head: `[head_dim]` against `[keys, head_dim]`."""
    visible = [
        j
        for j in range(len(keys))
        if (not opt.causal or j <= position)
        and (opt.sliding_window is None or j > position - opt.sliding_window)
    ]
    if not visible:
        return torch.zeros(values.shape[1], dtype=torch.float64), -math.inf
    logits = (keys[visible] @ query) * opt.softmax_scale
    if opt.logits_soft_cap is not None:
        logits = opt.logits_soft_cap * torch.tanh(logits / opt.logits_soft_cap)
    if sink is not None:
        logits = torch.cat([logits, torch.tensor([sink], dtype=torch.float64)])
    lse = torch.logsumexp(logits, 0)
    weights = torch.exp(logits - lse)[: len(visible)]
    if prob_scale is not None:
        weights = as_fp8(weights, prob_scale)
    return weights @ values[visible], lse.item()


def attend(
    query: Tensor,
    sequences: list[tuple[Tensor, Tensor]],
    query_lens: list[int],
    opt: Options,
) -> tuple[Tensor, Tensor]:
    """All rows of a float64 query `[num_tokens, num_heads, head_dim]`; padding is 0 and -inf."""
    num_tokens, num_heads = query.shape[:2]
    heads, width = sequences[0][1].shape[1:]
    out = torch.zeros(num_tokens, num_heads, width, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -math.inf, dtype=torch.float64)
    token = 0
    for (keys, values), query_len in zip(sequences, query_lens, strict=True):
        for i in range(query_len):
            for head in range(num_heads):
                kv_head = head // (num_heads // heads)
                sink = None if opt.sinks is None else float(opt.sinks[head])
                out[token, head], lse[token, head] = attend_row(
                    query[token, head],
                    keys[:, kv_head],
                    values[:, kv_head],
                    len(keys) - query_len + i,
                    opt,
                    sink,
                    None if opt.prob_scale is None else per_head(opt.prob_scale, heads)[kv_head],
                )
            token += 1
    return out, lse
