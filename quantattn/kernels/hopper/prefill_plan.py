"""Which query rows a CTA of a Hopper prefill works on: strips, those with the most tiles first.

A strip is 64 tokens and one query head. The strips of a KV head are numbered token block by token
block, so that neighbours see almost the same keys; an item is GROUPS neighbours.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from quantattn.kernels._attend_rows import Batch, sequence_rows
from quantattn.kernels._attend_tiles import LOG2_E, key_range

__all__ = [
    "ENTRY",
    "HEAD",
    "HEADS",
    "entries_of_a_sequence",
    "first_entry",
    "hopper_prefill_plan_kernel",
    "most_entries",
]

ENTRY: tl.constexpr = tl.constexpr(9)
"""Numbers of an entry: see `Item` in `prefill_items`, up to `visible`."""
HEAD: tl.constexpr = tl.constexpr(4)
"""Numbers of a KV head: the last of an `Item`."""
BUCKETS: tl.constexpr = tl.constexpr(128)
DROPPED: tl.constexpr = tl.constexpr(20)
"""Bits of a float32 that do not count: entries whose numbers of tiles agree in 4 share a bucket."""
ONE: tl.constexpr = tl.constexpr(127 << 23 - DROPPED.value)
"""1.0 as float32 without these bits."""
HEADS: tl.constexpr = tl.constexpr(4 + BUCKETS.value)
"""Where in a plan the heads are: behind its two counters and the ends of the buckets."""


@triton.constexpr_function
def first_entry(num_kv_heads: int) -> int:
    """Where in a plan the entries are."""
    return int(HEADS.value + num_kv_heads * HEAD.value)


def entries_of_a_sequence(group_size: int, rows: int, groups: int) -> int:
    """Entries that are set aside for a sequence besides those of its whole items."""
    return -(-((rows - 1) * group_size + (groups - 1) * rows) // (rows * groups)) + 1


def most_entries(num_tokens: int, num_seqs: int, group_size: int, rows: int, groups: int) -> int:
    """Entries that any `num_seqs` sequences of so many tokens, padding included, can have."""
    whole = num_tokens * group_size // (rows * groups)
    return whole + (num_seqs + 1) * entries_of_a_sequence(group_size, rows, groups)


@triton.jit
def _num_keys(batch, sequence, SPEC: tl.constexpr) -> tl.tensor:
    """Keys of a sequence, or of several; padding has none."""
    is_real = sequence < batch.num_seqs
    length = tl.load(batch.keys + sequence, mask=is_real, other=0)
    if SPEC.block_size is None:
        return tl.load(batch.keys + sequence + 1, mask=is_real, other=0) - length
    else:
        return tl.minimum(length, batch.max_keys)


@triton.jit
def _first_slot(
    start, sequence, GROUPS: tl.constexpr, SPARE: tl.constexpr, SPEC: tl.constexpr
) -> tl.tensor:
    """First slot of a sequence whose first token is `start`; no two sequences share a slot."""
    return start * SPEC.group_size // (SPEC.block_m * GROUPS) + sequence * SPARE


@triton.jit
def _find_sequences(
    batch, slots, GROUPS: tl.constexpr, SPARE: tl.constexpr, SPEC: tl.constexpr
) -> tl.tensor:
    """Sequence of each slot; padding counts as a sequence behind the last."""
    low = tl.zeros_like(slots)
    high = low + batch.num_seqs + 1
    steps = batch.num_seqs
    while steps > 0:
        middle = (low + high) // 2
        start = tl.load(batch.cu_seqlens_q + middle)
        is_behind = _first_slot(start, middle, GROUPS, SPARE, SPEC) <= slots
        low = tl.where(is_behind, middle, low)
        high = tl.where(is_behind, high, middle)
        steps //= 2
    return low


@triton.jit
def _read_slots(
    batch, slots, decode_limit, GROUPS: tl.constexpr, SPARE: tl.constexpr, SPEC: tl.constexpr
) -> tl.tuple:
    """Entries of some slots, and whether there are any."""
    sequence = _find_sequences(batch, slots, GROUPS, SPARE, SPEC)
    start, query_len = sequence_rows(batch, sequence)
    slot = slots - _first_slot(start, sequence, GROUPS, SPARE, SPEC)
    top = SPEC.group_size * tl.cdiv(query_len, SPEC.block_m) - 1 - slot * GROUPS
    is_padding = sequence == batch.num_seqs
    is_elsewhere = (decode_limit > 0) & (is_padding | (query_len <= decode_limit))

    num_keys = _num_keys(batch, sequence, SPEC)
    position = num_keys - query_len
    lowest = position + tl.maximum(top - GROUPS + 1, 0) // SPEC.group_size * SPEC.block_m
    tokens = tl.minimum((top // SPEC.group_size + 1) * SPEC.block_m, query_len)
    oldest, first, _, _, end = key_range(lowest, position + tokens - 1, num_keys, SPEC)
    visible = tl.minimum(position + tokens, num_keys) if SPEC.causal else num_keys
    place = sequence
    if SPEC.block_size is None:
        place = tl.load(batch.keys + sequence, mask=sequence < batch.num_seqs, other=0)
    N: tl.constexpr = SPEC.block_n
    entry = (first // N, end // N, top, start, query_len, num_keys, place, oldest, visible)
    return entry, (top >= 0) & ~is_elsewhere


@triton.jit
def _bucket(tiles) -> tl.tensor:
    """Bucket of entries with so many tiles; those with the most have the first."""
    size = (tiles.to(tl.float32).to(tl.int32, bitcast=True) >> DROPPED) - ONE
    return tl.minimum(tl.maximum(size, 0), BUCKETS - 1) ^ (BUCKETS - 1)


@triton.jit
def _load_scale(scale, heads, exists) -> tl.tensor:
    """Load the scales of KV heads; 1.0 where there is none."""
    if scale.numbers is None:
        return tl.full(heads.shape, 1.0, tl.float32)
    else:
        return tl.load(scale.numbers + heads * scale.head_stride, mask=exists, other=1.0)


@triton.jit
def _store_heads(
    plan, scales, softmax_scale, HEADROOM: tl.constexpr, COUNT: tl.constexpr, SPEC: tl.constexpr
) -> None:
    """Store what the scales of each KV head come to.

    Codes of probabilities are these over the mantissa of their scale, times a power of two, which
    all cancel in the division by the denominator.
    """
    heads = tl.arange(0, COUNT)
    exists = heads < SPEC.num_kv_heads
    factor = softmax_scale * LOG2_E * _load_scale(scales.query, heads, exists)
    # A row without keys is all -inf, which times 0 is NaN.
    factor = tl.maximum(factor * _load_scale(scales.key, heads, exists), 2.0**-126)
    prob = _load_scale(scales.prob, heads, exists)
    headroom = HEADROOM - (tl.log2(prob) - tl.floor(tl.log2(prob)))
    v_scale = _load_scale(scales.value, heads, exists)
    place = plan + HEADS + heads * HEAD
    tl.store(place, factor.to(tl.int32, bitcast=True), mask=exists)
    tl.store(place + 1, headroom.to(tl.int32, bitcast=True), mask=exists)
    tl.store(place + 2, v_scale.to(tl.int32, bitcast=True), mask=exists)
    tl.store(place + 3, heads, mask=exists)


@triton.jit(
    do_not_specialize=[
        "softmax_scale",
        "decode_limit",
        "max_keys",
        "num_seqs",
        "num_tokens",
        "num_slots",
    ]
)
def hopper_prefill_plan_kernel(
    plan,
    scales,
    cu_seqlens_q,
    keys,
    softmax_scale,
    decode_limit,
    max_keys,
    num_seqs,
    num_tokens,
    num_slots,
    GROUPS: tl.constexpr,
    SPARE: tl.constexpr,
    HEADROOM: tl.constexpr,
    HEAD_COUNT: tl.constexpr,
    SPEC: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Write the entries of a batch, longest first, their number, and that none is taken.

    Grid: one program. A slot is a place for an entry that follows from `cu_seqlens_q`; SLOTS of
        them are read at once.
    Layout: the rest of a `Batch` comes number by number: in a tuple each would be compiled for.
    Precision: integers. Which of two entries of a bucket is first is left to chance.
    """
    FIRST: tl.constexpr = first_entry(SPEC.num_kv_heads)
    batch = Batch(cu_seqlens_q, keys, None, 0, max_keys, num_seqs, num_tokens)
    gdc_launch_dependents()
    _store_heads(plan, scales, softmax_scale, HEADROOM, HEAD_COUNT, SPEC)
    counts = tl.zeros((BUCKETS,), tl.int32)
    for first in range(0, num_slots, SLOTS):
        slots = first + tl.arange(0, SLOTS)
        entry, exists = _read_slots(batch, slots, decode_limit, GROUPS, SPARE, SPEC)
        exists = exists & (slots < num_slots)
        counts += tl.histogram(_bucket(entry[1] - entry[0]), BUCKETS, mask=exists)
    tl.store(plan, tl.sum(counts, 0))
    tl.store(plan + 1, 0)
    tl.store(plan + 4 + tl.arange(0, BUCKETS), tl.cumsum(counts, 0) - counts)
    tl.debug_barrier()
    for first in range(0, num_slots, SLOTS):
        slots = first + tl.arange(0, SLOTS)
        entry, exists = _read_slots(batch, slots, decode_limit, GROUPS, SPARE, SPEC)
        exists = exists & (slots < num_slots)
        bucket = plan + 4 + _bucket(entry[1] - entry[0])
        place = tl.atomic_add(bucket, 1, mask=exists, sem="relaxed")
        for number in tl.static_range(len(entry)):
            tl.store(plan + FIRST + place * ENTRY + number, entry[number], mask=exists)
