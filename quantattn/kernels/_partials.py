"""Partial results of decode: what workers keep of a sequence, and how they are merged."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quantattn.kernels._attend_spec import Spec

__all__ = ["Partials", "merge_partials", "new_partials", "new_state", "write_padding"]


class Partials(NamedTuple):
    """Pointers to partial results of all workers.

    Attributes:
        rows: float32 `[workers + sequences, num_kv_heads, rows, head_dim_v]`.
        weights: Log 2 of their denominators, float32 `[workers + sequences, num_kv_heads, rows]`.
    """

    rows: Any
    weights: Any


def new_partials(
    spec: Spec, num_workers: int, num_seqs: int, rows: int, device: torch.device
) -> Partials:
    """Uninitialized room for what workers keep of so many rows a KV head."""
    shape = (num_workers + num_seqs, spec.num_kv_heads, rows)
    return Partials(
        torch.empty(*shape, spec.values.width, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


@triton.jit
def new_state(ROWS: tl.constexpr, SPEC: tl.constexpr) -> tl.tuple:
    """Of ROWS merged rows: the largest weight, the sum of all relative to it, and weighted sums."""
    return (
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.full((ROWS,), 0.0, tl.float32),
        tl.full((ROWS, SPEC.values.columns), 0.0, tl.float32),
    )


@triton.jit
def merge_partials(state, partials, kept, exists, SPEC: tl.constexpr) -> tl.tuple:
    """Merge workers' rows, whose places are `kept`, `[workers, rows]`, into a state."""
    WIDTH: tl.constexpr = SPEC.values.width
    COLUMNS: tl.constexpr = SPEC.values.columns
    largest, total, weighted = state
    columns = tl.arange(0, COLUMNS)[None, None, :]
    weights = tl.load(partials.weights + kept, mask=exists, other=float("-inf"))
    places = kept[:, :, None] * WIDTH + columns
    means = tl.load(partials.rows + places, exists[:, :, None] & (columns < WIDTH), other=0.0)
    new_largest = tl.maximum(largest, tl.max(weights, 0))
    ceiling = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shares = tl.exp2(weights - ceiling[None, :])
    shrink = tl.exp2(largest - ceiling)
    total = total * shrink + tl.sum(shares, 0)
    weighted = weighted * shrink[:, None] + tl.sum(means * shares[:, :, None], 0)
    return new_largest, total, weighted


@triton.jit
def write_padding(output, batch, writer, num_writers, heads, exists, SPEC: tl.constexpr) -> None:
    """Write one writer's part of the padding rows of some heads: 0, and LSE -inf.

    0 stays 0 whatever the scale.
    """
    first = tl.load(batch.cu_seqlens_q + batch.num_seqs) + writer
    WIDTH: tl.constexpr = SPEC.values.width
    columns = tl.arange(0, SPEC.values.columns)[None, :]
    mask = exists[:, None] & (columns < WIDTH)
    for token in range(first, batch.num_tokens, num_writers):
        rows = tl.cast(token, tl.int64) * SPEC.num_heads + heads
        tl.store(output.rows + rows[:, None] * WIDTH + columns, 0.0, mask=mask)
        if output.lse is not None:
            tl.store(output.lse + rows, float("-inf"), mask=exists)
