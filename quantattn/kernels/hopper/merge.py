"""Merges what the workers of the Hopper decode kernel found, and finishes the output."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quantattn.kernels._attend_rows import finish_rows, load_out_divisor, load_scale, store_rows
from quantattn.kernels._partials import merge_partials, new_state, write_padding
from quantattn.kernels.hopper.schedule import (
    SEQUENCES,
    first_partial_row,
    sequence_tiles,
    worker_of,
)

__all__ = ["hopper_merge_kernel"]


@triton.jit
def _count_tiles(batch, before, decode_limit, SPEC: tl.constexpr) -> tl.tuple:
    """Tiles of all sequences, and of those before one."""
    total = 0
    earlier = 0
    for first in range(0, batch.num_seqs, SEQUENCES):
        sequences = first + tl.arange(0, SEQUENCES)
        _, _, _, _, counts = sequence_tiles(batch, sequences, decode_limit, SPEC)
        total += tl.sum(counts)
        earlier += tl.sum(tl.where(sequences < before, counts, 0))
    return total, earlier


@triton.jit(do_not_specialize=["scales", "sinks", "batch", "num_workers", "decode_limit"])
def hopper_merge_kernel(
    output,
    partials,
    scales,
    sinks,
    batch,
    num_workers,
    decode_limit,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    WORKERS: tl.constexpr,
    SPEC: tl.constexpr,
    OUTPUT: tl.constexpr,
) -> None:
    """Merge the partial results of one token and some heads; write padding as 0 and -inf.

    Launched while the decode kernel runs: what to merge is found out before that ends.

    Grid: sequences * `decode_limit`, KV heads * cdiv(group size, HEADS).
    Layout: as the decode kernel writes partial results; WORKERS of them are merged at once.
    Precision: float32.
    """
    G: tl.constexpr = SPEC.group_size
    PARTS: tl.constexpr = (G + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // PARTS
    group = tl.program_id(1) % PARTS * HEADS + tl.arange(0, HEADS)
    heads = kv_head * G + group
    exists = group < G
    write_padding(output, batch, tl.program_id(0), tl.num_programs(0), heads, exists, SPEC)
    sequence = tl.program_id(0) // decode_limit
    token = tl.program_id(0) % decode_limit
    start, query_len, _, _, count = sequence_tiles(batch, sequence, decode_limit, SPEC)
    num_tiles, first = _count_tiles(batch, sequence, decode_limit, SPEC)
    earliest = worker_of(first, num_tiles, num_workers)
    last = worker_of(first + count - 1, num_tiles, num_workers)
    last = tl.where(count > 0, last, earliest - 1)
    rows = tl.where(exists, token * G + group, ROWS)
    state = new_state(HEADS, SPEC)
    v_scale = load_scale(scales.value, kv_head)
    divisor = load_out_divisor(output, heads, exists, SPEC, OUTPUT)
    gdc_wait()
    if (token >= query_len) | (query_len > decode_limit):
        return
    for worker in range(earliest, last + 1, WORKERS):
        workers = worker + tl.arange(0, WORKERS)
        kept = first_partial_row(workers, sequence, kv_head, ROWS, SPEC)[:, None] + rows[None, :]
        is_merged = (workers <= last)[:, None] & (rows < ROWS)[None, :]
        state = merge_partials(state, partials, kept, is_merged, SPEC)
    largest, total, weighted = state
    out, lse = finish_rows(weighted, largest, total, sinks, heads, exists, v_scale)
    tokens = start.to(tl.int64) + token + tl.zeros_like(heads)
    store_rows(output, out, lse, tokens, heads, exists, divisor, SPEC, OUTPUT)
