"""Attention of queries of any length: one program a tile of query rows and KV head."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from quantattn.kernels._attend_rows import (
    find_sequence,
    finish_rows,
    first_tile,
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
from quantattn.kernels._counts import cdiv

__all__ = ["launch_prefill", "prefill_kernel", "tile_sizes"]


@triton.jit(do_not_specialize=["batch", "decode_limit"])
def prefill_kernel(
    output,
    query,
    keys,
    values,
    scales,
    sinks,
    batch,
    softmax_scale,
    decode_limit,
    SPEC: tl.constexpr,
    OUTPUT: tl.constexpr,
) -> None:
    """Attend with a tile of rows to all keys that they see.

    Grid: `_max_tiles` * KV heads, a tile's heads adjacent, the last tiles first: where masks are
        causal they are the longest. Which tile is whose is read from `batch`, on the device.
    Layout: a row is a token and query head; the rows of a token that share a KV head are adjacent.
        Sequences of up to `decode_limit` tokens are skipped; where it is not 0, padding too.
    Precision: products in SPEC.compute, accumulated in float32; softmax in float32.
    """
    head = tl.program_id(0) % SPEC.num_kv_heads
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // SPEC.num_kv_heads
    sequence = find_sequence(batch, tile, SPEC)
    start, query_len = sequence_rows(batch, sequence)
    first_row = (tile - first_tile(start, sequence, SPEC)) * SPEC.block_m
    if first_row >= query_len * SPEC.group_size:
        return
    is_padding = sequence == batch.num_seqs
    if (decode_limit > 0) & (is_padding | (query_len <= decode_limit)):
        return

    rows = first_row + tl.arange(0, SPEC.block_m)
    exists = rows < query_len * SPEC.group_size
    tokens = start.to(tl.int64) + rows // SPEC.group_size
    heads = head * SPEC.group_size + rows % SPEC.group_size
    table, num_keys = sequence_keys(batch, sequence, SPEC)
    shift = num_keys - query_len
    last_row = tl.minimum(first_row + SPEC.block_m, query_len * SPEC.group_size) - 1
    lowest = shift + first_row // SPEC.group_size
    highest = shift + last_row // SPEC.group_size
    oldest, first, full_first, full_end, end = key_range(lowest, highest, num_keys, SPEC)
    x, x_sum, factor = load_query(query, scales, softmax_scale, head, tokens, heads, exists, SPEC)
    prob_scale = load_prob_scale(scales.prob, head, SPEC)
    weighted, largest, total = attend_keys(
        (x, x_sum, factor, prob_scale, shift + rows // SPEC.group_size),
        (keys, values, table, head, oldest, num_keys),
        (first, full_first, full_end, end),
        SPEC,
    )
    v_scale = load_scale(scales.value, head)
    out, lse = finish_rows(weighted, largest, total, sinks, heads, exists, v_scale)
    divisor = load_out_divisor(output, heads, exists, SPEC, OUTPUT)
    store_rows(output, out, lse, tokens, heads, exists, divisor, SPEC, OUTPUT)


def _max_tiles(num_tokens: int, num_seqs: int, group_size: int, block_m: int) -> int:
    """Tiles that hold the rows of any `num_seqs` sequences, and of padding, of so many tokens."""
    whole: int = cdiv(num_tokens * group_size, block_m)
    return whole + num_seqs + 1


def launch_prefill(arguments: Arguments, decode_limit: int, sizes: TileSizes | None) -> None:
    """Attend with all queries of more than `decode_limit` tokens; where it is 0, write padding."""
    sizes = sizes or tile_sizes(arguments.spec, is_hopper=arguments.is_hopper)
    spec = arguments.spec_for(sizes.block_m, sizes.block_n)
    batch = arguments.batch
    tiles = _max_tiles(batch.num_tokens, batch.num_seqs, spec.group_size, spec.block_m)
    prefill_kernel[(tiles * spec.num_kv_heads,)](
        arguments.output,
        arguments.query,
        arguments.keys,
        arguments.values,
        arguments.scales,
        arguments.sinks,
        batch,
        arguments.softmax_scale,
        decode_limit,
        SPEC=spec,
        OUTPUT=arguments.output_spec,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def tile_sizes(spec: Spec, *, is_hopper: bool) -> TileSizes:
    """Tiles that fit in 99 KB of shared memory; for Hopper, those that were the fastest.

    On an H200, 1 x 16384 tokens, 32 / 8 heads of 128, causal, pages of 16, in TFLOP/s: auto 398,
    fp8 338, fp8 and int8 per token and head 245, int4 124 (2026-12-01).
    """
    if spec.compute.primitive_bitwidth == 32:
        return TileSizes(32, 32, 4, 1)
    if max(spec.keys.columns, spec.values.columns) > 128:
        return TileSizes(64, 32, 8, 2)
    if not is_hopper:
        return TileSizes(64, 64, 8, 2)
    if spec.codes is None:
        return TileSizes(128, 64, 4, 3)
    return TileSizes(128, 64, 8, 3) if spec.codes == "int4" else TileSizes(64, 128, 4, 2)
