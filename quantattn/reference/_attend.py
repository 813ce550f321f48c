"""Attention over paged rows in plain torch: float32, keys and values as if dequantized exactly.

The query rows of each sequence are cut into tiles, so that prefill and decode mix without padding
every sequence to the longest; some tiles at a time are computed, so that memory stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantattn.arithmetic import dequantize_fp8, quantize_fp8
from quantattn.reference._pages import Rows
from quantattn.reference._tiling import Batch, Tiles, cut_tiles, known_size, rows_of_tokens
from quantattn.reference.static_quant_fp8 import static_quant_fp8

__all__ = ["Softmax", "attend", "finish_output", "load_query"]

WORKING_SET = 1 << 24
"""Numbers (scores, keys, values) that are in memory together."""


@dataclass(frozen=True)
class Softmax:
    """How scores become probabilities; the fields are the arguments of `paged_attention`."""

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: Tensor | None = None
    prob_scale: Tensor | None = None


def load_query(query: Tensor, q_scale: Tensor | None, num_kv_heads: int) -> Tensor:
    """Read a query as float32; an FP8 one is dequantized, per KV head where the scale is."""
    if q_scale is None:
        return query.float()
    groups = query.unflatten(1, (num_kv_heads, -1))
    return dequantize_fp8(groups, q_scale.reshape(-1, 1, 1), query.dtype).flatten(1, 2)


def finish_output(
    out: Tensor, out_scale: Tensor | None, round_through: bool, out_dtype: torch.dtype
) -> Tensor:
    """Round the float32 output to the model's dtype, or quantize it to e4m3 with `out_scale`."""
    if out_scale is None:
        return out.to(out_dtype)
    rounded = out.to(out_dtype) if round_through else out
    return static_quant_fp8(rounded, out_scale, torch.float8_e4m3fn)


def attend(
    query: Tensor, keys: Rows, values: Rows, batch: Batch, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Attend to paged keys and values.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float32.
        keys: K rows of the pages.
        values: V rows of the pages.
        batch: Rows and blocks of each sequence.
        softmax: How scores become probabilities.

    Returns:
        Output `[num_tokens, num_heads, head_dim_v]` and natural-log LSE `[num_tokens, num_heads]`,
        float32. A row that sees no key, and a row of padding, is 0 with LSE -inf.
    """
    num_tokens, num_heads, _ = query.shape
    num_pages, block_size = keys.rows.shape[:2]
    num_seqs, max_blocks = batch.block_table.shape
    if 0 in (num_tokens, num_seqs, max_blocks, num_pages):
        out = query.new_zeros(num_tokens, num_heads, values.width)
        return out, query.new_full((num_tokens, num_heads), -torch.inf)
    num_blocks = known_size((batch.seq_lens.max() - 1) // block_size + 1, max_blocks)
    tiles = cut_tiles(batch, num_tokens)
    row, padding = rows_of_tokens(batch, tiles.rows, num_tokens)
    num_kv_heads = keys.rows.shape[2]
    per_key = tiles.rows * num_heads + num_kv_heads * (keys.width + values.width)
    chunk = max(1, WORKING_SET // (num_blocks * block_size * per_key))
    with torch.autocast(query.device.type, enabled=False):
        parts = [
            _attend_tiles(query, keys, values, batch, softmax, some, num_blocks)
            for some in tiles.split(chunk)
        ]
    out, lse = (torch.cat(part).flatten(0, 1)[row] for part in zip(*parts, strict=True))
    out = out.masked_fill(padding[:, None, None], 0.0)
    return out, lse.masked_fill(padding[:, None], -torch.inf)


def _attend_tiles(
    query: Tensor,
    keys: Rows,
    values: Rows,
    batch: Batch,
    softmax: Softmax,
    tiles: Tiles,
    num_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Output `[tiles, rows, heads, head_dim_v]` and LSE `[tiles, rows, heads]` of some tiles."""
    seq_len = batch.seq_lens.long()[tiles.sequence, None]
    query_len = batch.query_lens.long()[tiles.sequence, None]
    index = tiles.first[:, None] + torch.arange(tiles.rows, device=query.device)
    token = (batch.cu_seqlens_q.long()[tiles.sequence, None] + index).clamp(max=len(query) - 1)

    block_size, num_kv_heads = keys.rows.shape[1:3]
    position = torch.arange(num_blocks * block_size, device=query.device)
    written = position < seq_len
    blocks = batch.block_table[tiles.sequence, :num_blocks].long()
    blocks = blocks.masked_fill(~written[:, ::block_size], 0)

    heads = query[token].unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scores = heads.flatten(2, 3) @ keys.load(blocks, written).mT
    scores = scores.unflatten(2, heads.shape[2:4]) * softmax.scale
    visible = _visible(position, written, seq_len - query_len + index, softmax)
    prob, lse = _softmax(scores, visible[:, None, None], softmax)
    out = prob.flatten(2, 3) @ values.load(blocks, written)
    out = out.unflatten(2, heads.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out, lse.permute(0, 3, 1, 2).flatten(2, 3)


def _visible(key: Tensor, written: Tensor, row: Tensor, softmax: Softmax) -> Tensor:
    """Which keys each row sees, `[tiles, rows, keys]`, from the positions of both."""
    visible = written[:, None].expand(-1, row.shape[1], -1)
    if softmax.causal:
        visible = visible & (key <= row[..., None])
    if softmax.sliding_window is not None:
        visible = visible & (key > row[..., None] - softmax.sliding_window)
    return visible


def _softmax(scores: Tensor, visible: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Probabilities and LSE of scores `[tiles, kv_heads, group, rows, keys]`."""
    if softmax.logits_soft_cap is not None:
        scores = softmax.logits_soft_cap * torch.tanh(scores / softmax.logits_soft_cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    sink = None
    if softmax.sinks is not None:
        sink = softmax.sinks.float().view(*scores.shape[1:3], 1, 1)
        largest = torch.maximum(largest, sink)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - largest)
    lse = (largest + total.log()).masked_fill(~visible.any(-1, keepdim=True), -torch.inf)
    prob = weights / total.masked_fill(total == 0, 1.0)
    if softmax.prob_scale is not None:
        scale = softmax.prob_scale.reshape(-1, 1, 1, 1)
        codes = quantize_fp8(prob, scale, torch.float8_e4m3fn)
        prob = dequantize_fp8(codes, scale, torch.float8_e4m3fn)
    return prob, lse.squeeze(-1)
