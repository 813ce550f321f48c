"""The ends of attention kernels: read a tile of query rows, finish and write a tile of output."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from quantattn.kernels._attend_tiles import LOG2_E
from quantattn.kernels._rotation_tiles import rotate_back_tile, rotate_tile
from quantattn.kernels._stored_rows import decode_fp8
from quantattn.kernels._tiles import convert, divide_by, divisor, encode_fp8

__all__ = [
    "Batch",
    "Output",
    "OutputSpec",
    "Query",
    "Scale",
    "Scales",
    "find_sequence",
    "finish_rows",
    "first_tile",
    "load_out_divisor",
    "load_prob_scale",
    "load_query",
    "load_scale",
    "sequence_keys",
    "sequence_rows",
    "store_rows",
]


class Query(NamedTuple):
    """Pointer to the query and its strides between tokens and between heads, in elements."""

    numbers: Any
    token_stride: Any
    head_stride: Any


class Scale(NamedTuple):
    """Pointer to a float32 scale, None for 1.0, and the step between the numbers of two heads."""

    numbers: Any
    head_stride: Any


class Scales(NamedTuple):
    """Scales of an e4m3 query, of K, of V and of the probabilities."""

    query: Any
    key: Any
    value: Any
    prob: Any


class Batch(NamedTuple):
    """Which rows and keys each sequence has.

    Attributes:
        cu_seqlens_q: Pointer to the prefix sums of the query lengths.
        keys: Pointer to the lengths in keys; without blocks, to their prefix sums.
        block_table: Pointer to the block ids; None without blocks.
        table_stride: Ids between two sequences.
        max_keys: Most keys that the table has room for.
        num_seqs: Sequences.
        num_tokens: Query rows, padding included.
    """

    cu_seqlens_q: Any
    keys: Any
    block_table: Any
    table_stride: Any
    max_keys: Any
    num_seqs: Any
    num_tokens: Any


class Output(NamedTuple):
    """Pointers to the output, its LSE (None: not asked for) and its scale (None: unquantized)."""

    rows: Any
    lse: Any
    scale: Any


@dataclass(frozen=True)
class OutputSpec:
    """How the output is rounded.

    Attributes:
        dtype: The model's dtype.
        round_through: Whether a quantized output is rounded to it first.
        group_columns: Columns, over all heads, that share an `out_scale`; None: all.
    """

    dtype: Any
    round_through: bool
    group_columns: int | None


@triton.jit
def load_scale(scale, head) -> tl.tensor:
    """Load the scale of a KV head; 1.0 where there is none."""
    if scale.numbers is None:
        return tl.full((), 1.0, tl.float32)
    else:
        return tl.load(scale.numbers + head * scale.head_stride)


@triton.jit
def load_out_divisor(output, heads, exists, SPEC: tl.constexpr, OUTPUT: tl.constexpr) -> tl.tuple:
    """Load what `store_rows` divides rows by, which takes long: early, where it can be.

    Of one number, of one a row, or of one a number of the output.
    """
    WIDTH: tl.constexpr = SPEC.values.width
    if output.scale is None:
        scale = tl.full((), 1.0, tl.float32)
    elif OUTPUT.group_columns is None:
        scale = tl.load(output.scale)
    elif OUTPUT.group_columns % WIDTH == 0:
        groups = heads * WIDTH // OUTPUT.group_columns
        scale = tl.load(output.scale + groups, mask=exists, other=1.0)[:, None]
    else:
        columns = tl.arange(0, SPEC.values.columns)[None, :]
        groups = (heads[:, None] * WIDTH + columns) // OUTPUT.group_columns
        mask = exists[:, None] & (columns < WIDTH)
        scale = tl.load(output.scale + groups, mask=mask, other=1.0)
    return divisor(scale, SPEC.native)


@triton.jit
def load_prob_scale(scale, head, SPEC: tl.constexpr) -> tl.tensor:
    """Load the scale to quantize a tile's probabilities with.

    A power of two raises it to where the largest of them, 2^headroom, fits in e4m3.
    """
    given = load_scale(scale, head)
    steps = tl.maximum(tl.ceil(-tl.log2(given * 448.0)), 0.0) + SPEC.headroom
    return given * tl.exp2(steps)


@triton.jit
def find_sequence(batch, tile, SPEC: tl.constexpr) -> tl.tensor:
    """Find the sequence of a tile of rows; padding counts as a sequence behind the last."""
    low = 0
    high = batch.num_seqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = first_tile(tl.load(batch.cu_seqlens_q + middle), middle, SPEC) <= tile
        low = tl.where(is_behind, middle, low)
        high = tl.where(is_behind, high, middle)
    return low


@triton.jit
def first_tile(start, sequence, SPEC: tl.constexpr) -> tl.tensor:
    """First tile of a sequence whose first token is `start`.

    No two sequences share a tile, so some tiles between them are empty.
    """
    return start * SPEC.group_size // SPEC.block_m + sequence


@triton.jit
def sequence_rows(batch, sequence) -> tl.tuple:
    """First token of a sequence and how many it has; behind the last sequence lies the padding."""
    is_real = sequence < batch.num_seqs
    start = tl.load(batch.cu_seqlens_q + sequence)
    end = tl.load(batch.cu_seqlens_q + sequence + 1, mask=is_real, other=0)
    return start, tl.where(is_real, end, batch.num_tokens) - start


@triton.jit
def sequence_keys(batch, sequence, SPEC: tl.constexpr) -> tl.tuple:
    """Where a sequence's keys are (see `attend_keys`), and how many it has; padding has none."""
    is_real = sequence < batch.num_seqs
    length = tl.load(batch.keys + sequence, mask=is_real, other=0)
    if SPEC.block_size is None:
        end = tl.load(batch.keys + sequence + 1, mask=is_real, other=0)
        return length.to(tl.int64), end - length
    else:
        table = batch.block_table + sequence.to(tl.int64) * batch.table_stride
        return table, tl.minimum(length, batch.max_keys)


@triton.jit
def _load_columns(query, starts, exists, SIDE: tl.constexpr, SPEC: tl.constexpr) -> tl.tensor:
    """Load what of some query rows meets the columns of some K rows; an e4m3 query as float16."""
    columns = tl.arange(0, SIDE.columns)[None, :]
    mask = exists[:, None] & (columns < SIDE.width)
    pointers = query.numbers + starts[:, None] + (SIDE.first + columns)
    x = tl.load(pointers, mask=mask, other=0)
    if x.dtype == tl.uint8:
        x = decode_fp8(x, True, SPEC.native)
    if SPEC.codes == "int4":
        x = rotate_tile(x.to(tl.float32), SIDE.width)
    return x


@triton.jit
def load_query(
    query, scales, softmax_scale, head, tokens, heads, exists, SPEC: tl.constexpr
) -> tl.tuple:
    """Load a tile of query rows.

    Returns:
        The tile `[block_m, columns]` and, for SPEC.rope, the one beside it; the sum of each row;
        what turns a row's products with keys into scores. Where products are in float16, rows of
        another range are brought into float16's by a power of two; with SPEC.rope they fit.
    """
    KEYS: tl.constexpr = SPEC.keys
    ROPE: tl.constexpr = SPEC.rope
    ROWS: tl.constexpr = SPEC.block_m
    starts = tokens * query.token_stride + heads * query.head_stride
    x = _load_columns(query, starts, exists, KEYS, SPEC)
    rope = 0.0
    if ROPE is not None:
        rope = convert(_load_columns(query, starts, exists, ROPE, SPEC), SPEC.compute, SPEC.native)
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if SPEC.compute == tl.float16 and x.dtype != tl.float16:
        x = x.to(tl.float32)
        exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)
        factor = exponent.to(tl.float32, bitcast=True)
        x *= ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None]
    x = convert(x, SPEC.compute, SPEC.native)
    factor *= softmax_scale * LOG2_E * load_scale(scales.query, head) * load_scale(scales.key, head)
    return (x, rope), tl.sum(x.to(tl.float32), 1), factor


@triton.jit
def finish_rows(weighted, largest, total, sinks, heads, exists, v_scale) -> tl.tuple:
    """Divide by the denominator, to which sinks (pointer or None) add.

    Args:
        weighted: Sum of values, `[rows, columns]`, each times 2^(score - largest).
        largest: Running maximum of each row, -inf where it saw no key.
        total: Sum of 2^(score - largest).
        sinks: A logit a head.
        heads: Query head of each row.
        exists: Which rows there are.
        v_scale: Scale of the values.

    Returns:
        Output and natural-log LSE; 0 and -inf where a row saw no key.
    """
    is_empty = largest == float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=exists, other=0.0).to(tl.float32) * LOG2_E
        ceiling = tl.where(is_empty, 0.0, tl.maximum(largest, sink))
        shrink = tl.exp2(largest - ceiling)
        total = total * shrink + tl.exp2(sink - ceiling)
        weighted *= shrink[:, None]
        largest = ceiling
    out = weighted * (v_scale / tl.where(is_empty, 1.0, total))[:, None]
    lse = (largest + tl.log2(total)) / LOG2_E
    out = tl.where(is_empty[:, None], 0.0, out)
    return out, tl.where(is_empty, float("-inf"), lse)


@triton.jit
def store_rows(
    output, out, lse, tokens, heads, exists, divisor, SPEC: tl.constexpr, OUTPUT: tl.constexpr
) -> None:
    """Round or quantize a float32 tile `[rows, columns]` of output and store it with its LSE."""
    WIDTH: tl.constexpr = SPEC.values.width
    columns = tl.arange(0, SPEC.values.columns)[None, :]
    rows = tokens * SPEC.num_heads + heads
    mask = exists[:, None] & (columns < WIDTH)
    if SPEC.codes == "int4":
        out = rotate_back_tile(out, WIDTH)
    if output.scale is None:
        stored = convert(out, OUTPUT.dtype, SPEC.native)
    else:
        if OUTPUT.round_through:
            out = convert(out, OUTPUT.dtype, SPEC.native).to(tl.float32)
        stored = encode_fp8(divide_by(out, divisor, SPEC.native), 3, SPEC.native)
    tl.store(output.rows + rows[:, None] * WIDTH + columns, stored, mask=mask)
    if output.lse is not None:
        tl.store(output.lse + rows, lse, mask=exists)
