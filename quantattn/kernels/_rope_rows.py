"""Rotary embedding on the device: rows that turn between their load and their store."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

from quantattn.kernels._row_codes import code_rows
from quantattn.kernels._row_tiles import load_rows, store_rows
from quantattn.kernels._tiles import convert

__all__ = ["turn_and_write"]


@triton.jit
def turn_and_write(
    pages_ptr,
    new_ptr,
    table_ptr,
    scale_ptr,
    slot_mapping_ptr,
    positions_ptr,
    num_tokens,
    max_positions,
    num_pages,
    page_stride,
    table_stride,
    strides,
    tile,
    PLACES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    CODE_WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,
    IS_PER_HEAD: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    """Write some heads of some tokens, turned unless ROTARY_DIM is None.

    Into pages by slot; where BLOCK_SIZE is None, token n is the n-th page.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    heads = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    if ROTARY_DIM is None:
        rows = load_rows(new_ptr, tokens, heads, strides, num_tokens, NUM_HEADS, WIDTH, 1)
    else:
        rows = _load_turned_rows(
            new_ptr,
            table_ptr,
            positions_ptr,
            tokens,
            slots,
            heads,
            strides,
            table_stride,
            num_tokens,
            max_positions,
            NUM_HEADS,
            WIDTH,
            ROTARY_DIM,
            IS_INTERLEAVED,
            NATIVE,
        )
    coded = code_rows(
        rows,
        scale_ptr,
        heads // (NUM_HEADS // NUM_KV_HEADS),
        pages_ptr.dtype.element_ty,
        NUM_KV_HEADS,
        WIDTH,
        FORMAT,
        IS_PER_HEAD,
        NATIVE,
    )
    store_rows(
        pages_ptr,
        coded,
        tl.where(tokens < num_tokens, tokens, -1) if BLOCK_SIZE is None else slots,
        heads,
        num_pages,
        page_stride,
        PLACES,
        1 if BLOCK_SIZE is None else BLOCK_SIZE,
        NUM_HEADS,
        CODE_WIDTH,
        1,
    )


@triton.jit
def _load_turned_rows(
    new_ptr,
    table_ptr,
    positions_ptr,
    tokens,
    slots,
    heads,
    strides,
    table_stride,
    num_tokens,
    max_positions,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Load new rows as `load_rows` does, `[tokens * heads, columns]`, and turn them.

    Each number is a * cos + b * sin with its partner b in the pair, the sine negative where a comes
    first. NaN where a token with a slot has a position that the table has no row for.
    """
    COLUMNS: tl.constexpr = triton.next_power_of_2(WIDTH)
    PAIRS: tl.constexpr = ROTARY_DIM // 2
    columns = tl.arange(0, COLUMNS)[None, None, :]
    starts = heads.to(tl.int64)[:, None] * strides[1] + tokens[None, :] * strides[0]
    starts = starts[:, :, None]
    mask = ((heads < NUM_HEADS)[:, None] & (tokens < num_tokens)[None, :])[:, :, None]
    new = tl.load(new_ptr + (starts + columns), mask=mask & (columns < WIDTH), other=0.0)
    x = new.to(tl.float32)

    positions = tl.load(positions_ptr + tokens, mask=tokens < num_tokens, other=0)
    nearest = tl.minimum(tl.maximum(positions, 0), max_positions - 1)
    is_known = ((positions == nearest) | (slots < 0))[None, :, None]
    # Each head loads them again: reads of a cache cost less than an exchange between threads.
    angles = tl.broadcast_to((nearest * table_stride)[None, :, None], starts.shape)
    if IS_INTERLEAVED:
        even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], COLUMNS // 2, 2))
        partner = tl.join(odd, even).reshape(x.shape)
        pairs = tl.arange(0, COLUMNS // 2)[None, None, :]
        cos = tl.load(table_ptr + (angles + pairs), mask=pairs < PAIRS, other=0.0)
        sin = tl.load(table_ptr + (angles + PAIRS + pairs), mask=pairs < PAIRS, other=0.0)
        cos = tl.join(cos, cos).reshape(x.shape)
        sin = tl.join(sin, sin).reshape(x.shape)
        is_first = columns % 2 == 0
    else:
        turns = columns < ROTARY_DIM
        others = starts + (columns + PAIRS) % ROTARY_DIM
        partner = tl.load(new_ptr + others, mask=mask & turns, other=0.0).to(tl.float32)
        pairs = columns % PAIRS
        cos = tl.load(table_ptr + (angles + pairs), mask=turns, other=0.0)
        sin = tl.load(table_ptr + (angles + PAIRS + pairs), mask=turns, other=0.0)
        is_first = columns < PAIRS
    # Only a factor negates without a change of a zero's sign: Triton's -x is 0 - x.
    signed = sin.to(tl.float32) * tl.where(is_first, -1.0, 1.0)
    turned = tl.where(is_known, x * cos.to(tl.float32) + partner * signed, float("nan"))
    rows = tl.where(columns < ROTARY_DIM, convert(turned, new.dtype, NATIVE), new)
    return rows.permute(1, 0, 2).reshape(tokens.shape[0] * heads.shape[0], COLUMNS)
