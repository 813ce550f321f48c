"""Attention of short queries: the keys of all sequences are dealt out evenly, then merged.

The tiles of keys of all sequences, one behind the other, are cut into runs of equal length, one a
worker. A worker attends to its run sequence by sequence and writes one partial result each. Worker
w's result for sequence s has index w + s, which no other has. Which runs there are follows from the
batch on the device, so a captured launch serves any lengths.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantattn.kernels._attend_rows import (
    finish_rows,
    load_out_divisor,
    load_prob_scale,
    load_query,
    load_scale,
    sequence_keys,
    sequence_rows,
    store_rows,
)
from quantattn.kernels._attend_spec import Spec
from quantattn.kernels._attend_tiles import attend_keys, key_range
from quantattn.kernels._attention_arguments import Arguments, TileSizes
from quantattn.kernels._counts import cdiv, next_power_of_2
from quantattn.kernels._devices import multiprocessors
from quantattn.kernels._partials import (
    merge_partials,
    new_partials,
    new_state,
    write_padding,
)

__all__ = ["decode_kernel", "launch_decode", "merge_kernel", "tile_sizes"]

DECODERS_PER_SM = 2
PADDERS_PER_SM = 4
INTERPRETED_SMS = 3

SEQUENCES: tl.constexpr = tl.constexpr(256)
"""Sequences whose tiles are counted at once."""
WORKERS: tl.constexpr = tl.constexpr(16)
"""Partial results that are merged at once."""


@triton.jit
def _count_tiles(batch, sequences, decode_limit, SPEC: tl.constexpr) -> tl.tensor:
    """Tiles of keys that the queries of some sequences see; none where another kernel serves it."""
    is_real = sequences < batch.num_seqs
    start = tl.load(batch.cu_seqlens_q + sequences, mask=is_real, other=0)
    query_len = tl.load(batch.cu_seqlens_q + sequences + 1, mask=is_real, other=0) - start
    num_keys = tl.load(batch.keys + sequences, mask=is_real, other=0)
    num_keys = tl.minimum(num_keys, batch.max_keys)
    _, first, _, _, end = key_range(num_keys - query_len, num_keys - 1, num_keys, SPEC)
    is_decode = (query_len > 0) & (query_len <= decode_limit)
    return tl.where(is_decode, (end - first) // SPEC.block_n, 0)


@triton.jit
def _count_all_tiles(batch, before, decode_limit, SPEC: tl.constexpr) -> tl.tuple:
    """Tiles of all sequences, and of those before one."""
    total = 0
    earlier = 0
    for start in range(0, batch.num_seqs, SEQUENCES):
        sequences = start + tl.arange(0, SEQUENCES)
        counts = _count_tiles(batch, sequences, decode_limit, SPEC)
        total += tl.sum(counts)
        earlier += tl.sum(tl.where(sequences < before, counts, 0))
    return total, earlier


@triton.jit
def _find_tile(batch, tile, decode_limit, SPEC: tl.constexpr) -> tl.tuple:
    """The sequence that a tile belongs to, and its first tile."""
    sequence = 0
    first = 0
    seen = 0
    for start in range(0, batch.num_seqs, SEQUENCES):
        counts = _count_tiles(batch, start + tl.arange(0, SEQUENCES), decode_limit, SPEC)
        ends = seen + tl.cumsum(counts, 0)
        is_before = ends <= tile
        sequence += tl.sum(is_before.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(is_before, ends, 0)))
        seen += tl.sum(counts)
    return sequence, first


@triton.jit
def _partial_rows(worker, sequence, head, decode_limit, SPEC: tl.constexpr) -> tl.tensor:
    """Index of the first row of a worker's partial result."""
    partial = (worker + sequence).to(tl.int64) * SPEC.num_kv_heads + head
    return partial * (decode_limit * SPEC.group_size)


@triton.jit(do_not_specialize=["batch", "decode_limit"])
def decode_kernel(
    partials,
    query,
    keys,
    values,
    scales,
    batch,
    softmax_scale,
    decode_limit,
    SPEC: tl.constexpr,
) -> None:
    """Attend to one worker's run of tiles, for one KV head.

    Grid: workers * KV heads, a worker's heads adjacent, since their pages are.
    Layout: a row is a token and query head of one KV head, all of a sequence in one tile; a partial
        result has room for those of `decode_limit` tokens. Sequences of no token, or of more, are
        skipped.
    Precision: products in SPEC.compute, accumulated in float32; softmax in float32.
    """
    head = tl.program_id(0) % SPEC.num_kv_heads
    worker = tl.program_id(0) // SPEC.num_kv_heads
    num_workers = tl.num_programs(0) // SPEC.num_kv_heads
    num_tiles, _ = _count_all_tiles(batch, 0, decode_limit, SPEC)
    run = tl.cdiv(num_tiles, num_workers)
    tile = worker * run
    run_end = tl.minimum(tile + run, num_tiles)
    if tile >= run_end:
        return
    rows = tl.arange(0, SPEC.block_m)
    sequence, sequence_start = _find_tile(batch, tile, decode_limit, SPEC)
    while tile < run_end:
        sequence_end = sequence_start + _count_tiles(batch, sequence, decode_limit, SPEC)
        stop = tl.minimum(sequence_end, run_end)
        if stop > tile:
            start, query_len = sequence_rows(batch, sequence)
            exists = rows < query_len * SPEC.group_size
            tokens = start.to(tl.int64) + rows // SPEC.group_size
            heads = head * SPEC.group_size + rows % SPEC.group_size
            table, num_keys = sequence_keys(batch, sequence, SPEC)
            shift = num_keys - query_len
            oldest, first, full_first, full_end, _ = key_range(shift, num_keys - 1, num_keys, SPEC)
            low = first + (tile - sequence_start) * SPEC.block_n
            high = first + (stop - sequence_start) * SPEC.block_n
            x, x_sum, factor = load_query(
                query, scales, softmax_scale, head, tokens, heads, exists, SPEC
            )
            prob_scale = load_prob_scale(scales.prob, head, SPEC)
            full_first = tl.minimum(tl.maximum(full_first, low), high)
            full_end = tl.maximum(tl.minimum(full_end, high), full_first)
            weighted, largest, total = attend_keys(
                (x, x_sum, factor, prob_scale, shift + rows // SPEC.group_size),
                (keys, values, table, head, oldest, num_keys),
                (low, full_first, full_end, high),
                SPEC,
            )
            is_empty = largest == float("-inf")
            weighted /= tl.where(is_empty, 1.0, total)[:, None]
            weight = tl.where(is_empty, float("-inf"), largest + tl.log2(total))
            kept = _partial_rows(worker, sequence, head, decode_limit, SPEC) + rows
            columns = tl.arange(0, SPEC.values.columns)[None, :]
            mask = exists[:, None] & (columns < SPEC.values.width)
            places = kept[:, None] * SPEC.values.width + columns
            tl.store(partials.rows + places, weighted, mask=mask)
            tl.store(partials.weights + kept, weight, mask=exists)
        tile = stop
        sequence_start = sequence_end
        sequence += 1


@triton.jit(do_not_specialize=["batch", "num_workers", "decode_limit"])
def merge_kernel(
    output,
    partials,
    scales,
    sinks,
    batch,
    num_workers,
    decode_limit,
    SPEC: tl.constexpr,
    OUTPUT: tl.constexpr,
) -> None:
    """Merge the partial results of one token and head; further programs write the padding.

    Grid: sequences * `decode_limit` + any number for the padding, query heads.
    Layout: as `decode_kernel` writes partial results. A row of padding is 0, its LSE -inf.
    Precision: float32.
    """
    place = tl.program_id(0)
    head = tl.program_id(1)
    heads = head + tl.arange(0, 1)
    is_head = heads >= 0
    padder = place - batch.num_seqs * decode_limit
    if padder >= 0:
        num_padders = tl.num_programs(0) - batch.num_seqs * decode_limit
        write_padding(output, batch, padder, num_padders, heads, is_head, SPEC)
        return
    sequence = place // decode_limit
    start, query_len = sequence_rows(batch, sequence)
    token = place % decode_limit
    if (token >= query_len) | (query_len > decode_limit):
        return
    kv_head = head // SPEC.group_size
    row = token * SPEC.group_size + head % SPEC.group_size
    num_tiles, first = _count_all_tiles(batch, sequence, decode_limit, SPEC)
    count = _count_tiles(batch, sequence, decode_limit, SPEC)
    run = tl.maximum(tl.cdiv(num_tiles, num_workers), 1)
    divisor = load_out_divisor(output, heads, is_head, SPEC, OUTPUT)
    state = new_state(1, SPEC)
    earliest = first // run
    last = tl.where(count > 0, (first + count - 1) // run, earliest - 1)
    for worker in range(earliest, last + 1, WORKERS):
        workers = (worker + tl.arange(0, WORKERS))[:, None]
        kept = _partial_rows(workers, sequence, kv_head, decode_limit, SPEC) + row
        state = merge_partials(state, partials, kept, workers <= last, SPEC)
    largest, total, weighted = state
    v_scale = load_scale(scales.value, kv_head)
    out, lse = finish_rows(weighted, largest, total, sinks, heads, is_head, v_scale)
    tokens = start + token + tl.zeros_like(heads).to(tl.int64)
    store_rows(output, out, lse, tokens, heads, is_head, divisor, SPEC, OUTPUT)


def launch_decode(arguments: Arguments, decode_limit: int, sizes: TileSizes | None) -> None:
    """Attend with all queries of up to `decode_limit` tokens, and write all padding."""
    sizes = sizes or tile_sizes(arguments.spec, decode_limit, is_hopper=arguments.is_hopper)
    spec = arguments.spec_for(sizes.block_m, sizes.block_n)
    batch = arguments.batch
    device = arguments.query.numbers.device
    num_workers = cdiv(DECODERS_PER_SM * _num_sms(device), spec.num_kv_heads)
    num_padders = cdiv(PADDERS_PER_SM * _num_sms(device), spec.num_heads)
    rows = decode_limit * spec.group_size
    partials = new_partials(spec, num_workers, batch.num_seqs, rows, device)
    if decode_limit > 0:
        decode_kernel[(num_workers * spec.num_kv_heads,)](
            partials,
            arguments.query,
            arguments.keys,
            arguments.values,
            arguments.scales,
            batch,
            arguments.softmax_scale,
            decode_limit,
            SPEC=spec,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )
    merge_kernel[(batch.num_seqs * decode_limit + num_padders, spec.num_heads)](
        arguments.output,
        partials,
        arguments.scales,
        arguments.sinks,
        batch,
        num_workers,
        decode_limit,
        SPEC=spec,
        OUTPUT=arguments.output_spec,
        num_warps=1,
    )


def _num_sms(device: torch.device) -> int:
    return multiprocessors(device) if device.type == "cuda" else INTERPRETED_SMS


def tile_sizes(spec: Spec, decode_limit: int, *, is_hopper: bool) -> TileSizes:
    """Tiles that hold all rows of a KV head; for Hopper, those that were the fastest.

    On an H200, 128 x 8192 keys, 32 / 8 heads of 128, e4m3 pages of 16: 2710 GB/s, with tiles of 64
    keys 2083 (2026-12-01).
    """
    block_m = max(16, next_power_of_2(decode_limit * spec.group_size))
    if spec.compute.primitive_bitwidth == 32:
        return TileSizes(block_m, 32, 4, 1)
    if block_m * max(spec.keys.columns, spec.values.columns) > 16 * 128:
        return TileSizes(block_m, 32, 8 if block_m > 64 else 4, 2)
    return TileSizes(block_m, 128 if is_hopper and spec.codes != "int8" else 64, 4, 2)
