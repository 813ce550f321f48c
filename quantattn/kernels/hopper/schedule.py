"""How decode deals out keys: the tiles of all sequences in a row, cut into equal runs for workers.

Worker w's partial result for sequence s has index w + s, which no other has. Everything follows
from the batch on the device, so a captured launch serves any lengths.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from quantattn.kernels._attend_tiles import key_range

__all__ = ["SEQUENCES", "first_partial_row", "first_tile_of", "sequence_tiles", "worker_of"]

SEQUENCES: tl.constexpr = tl.constexpr(128)
"""Sequences whose tiles are counted at once."""


@triton.jit
def sequence_tiles(batch, sequence, decode_limit, SPEC: tl.constexpr) -> tl.tuple:
    """First token, tokens, keys, first tile and number of tiles of a sequence, or of several.

    A sequence has no tiles where another kernel serves it, and behind the last one.
    """
    is_real = sequence < batch.num_seqs
    start = tl.load(batch.cu_seqlens_q + sequence, mask=is_real, other=0)
    query_len = tl.load(batch.cu_seqlens_q + sequence + 1, mask=is_real, other=0) - start
    num_keys = tl.load(batch.keys + sequence, mask=is_real, other=0)
    num_keys = tl.minimum(num_keys, batch.max_keys)
    _, first, _, _, end = key_range(num_keys - query_len, num_keys - 1, num_keys, SPEC)
    is_decode = (query_len > 0) & (query_len <= decode_limit)
    count = tl.where(is_decode, (end - first) // SPEC.block_n, 0)
    return start, query_len, num_keys, first // SPEC.block_n, count


@triton.jit
def first_tile_of(worker, num_tiles, num_workers) -> tl.tensor:
    """First tile of a worker's run; some runs at the front are a tile longer."""
    return worker * (num_tiles // num_workers) + tl.minimum(worker, num_tiles % num_workers)


@triton.jit
def worker_of(tile, num_tiles, num_workers) -> tl.tensor:
    """Which worker's run a tile is in."""
    run = num_tiles // num_workers
    longer = num_tiles % num_workers
    behind = tile - longer * (run + 1)
    return tl.where(behind < 0, tile // (run + 1), longer + behind // tl.maximum(run, 1))


@triton.jit
def first_partial_row(worker, sequence, head, ROWS: tl.constexpr, SPEC: tl.constexpr) -> tl.tensor:
    """Index of the first of the ROWS rows of a worker's partial result for one KV head."""
    return ((worker + sequence).to(tl.int64) * SPEC.num_kv_heads + head) * ROWS
