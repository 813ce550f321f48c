"""Tiles of new rows on the device: from their tensors, and into the pages they belong to.

Tiles are laid out with heads outermost, which gives neighbouring threads the heads of one token:
they lie side by side in memory.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_rows", "store_rows"]


@triton.jit
def load_rows(
    new_ptr,
    tokens,
    heads,
    strides,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Load new rows, `[tokens * heads, columns]`; what is outside is 0.

    Padding is loaded too, so that no load waits for the slots. PARTS cuts a row into runs of
    columns, of each of which a thread gets some: with more of them, fewer threads share a row.
    """
    COLUMNS: tl.constexpr = triton.next_power_of_2(WIDTH)
    columns = _columns(COLUMNS, PARTS)
    starts = heads.to(tl.int64)[:, None] * strides[1] + tokens[None, :] * strides[0]
    mask = (heads < NUM_HEADS)[:, None] & (tokens < num_tokens)[None, :]
    mask = mask[:, :, None, None] & (columns < WIDTH)
    parts = tl.load(new_ptr + (starts[:, :, None, None] + columns), mask=mask, other=0.0)
    return parts.permute(1, 0, 2, 3).reshape(tokens.shape[0] * heads.shape[0], COLUMNS)


@triton.jit
def store_rows(
    pages_ptr,
    coded,
    slots,
    heads,
    num_pages,
    page_stride,
    PLACES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    CODE_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Store by slot what `code_rows` gives; a negative slot is skipped.

    PLACES is a `RowPlaces`, in elements of the page, which codes may be wider than: words of int4.
    With TRITON_DEBUG=1, a slot behind the last page stops the kernel.
    """
    blocks = slots // BLOCK_SIZE
    tl.device_assert(blocks < num_pages, "slot_mapping: a slot lies behind the last page")
    rows = (slots - blocks * BLOCK_SIZE)[None, :]
    pages = (blocks * page_stride)[None, :]
    heads = heads[:, None]
    mask = (heads < NUM_HEADS) & (slots >= 0)[None, :]

    codes = coded[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    ELEMENT: tl.constexpr = pages_ptr.dtype.element_ty.primitive_bitwidth
    UNIT: tl.constexpr = codes.dtype.primitive_bitwidth // ELEMENT
    columns = _columns(COLUMNS, PARTS)
    codes_ptr = pages_ptr.to(tl.pointer_type(codes.dtype))
    starts = (pages + PLACES[0] + rows * PLACES[1] + heads * PLACES[2]) // UNIT
    tl.store(
        codes_ptr + (starts[:, :, None, None] + columns),
        codes.reshape(mask.shape[1], mask.shape[0], PARTS, COLUMNS // PARTS).permute(1, 0, 2, 3),
        mask=mask[:, :, None, None] & (columns < CODE_WIDTH // UNIT),
    )
    if PLACES[3] > 0:
        words_ptr = pages_ptr.to(tl.pointer_type(tl.float32))
        words = pages // 4 + PLACES[3] + rows * PLACES[4] + heads * PLACES[5]
        scale = coded[1].reshape(mask.shape[1], mask.shape[0]).permute(1, 0)
        tl.store(words_ptr + words, scale, mask=mask)
        if PLACES[6] > 0:
            offset = coded[2].reshape(mask.shape[1], mask.shape[0]).permute(1, 0)
            tl.store(words_ptr + (words + PLACES[6]), offset, mask=mask)


@triton.jit
def _columns(COLUMNS: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """Columns of a row as `[1, 1, PARTS, COLUMNS // PARTS]`."""
    PART: tl.constexpr = COLUMNS // PARTS
    starts = tl.arange(0, PARTS) * PART
    return (starts[:, None] + tl.arange(0, PART)[None, :])[None, None, :, :]
