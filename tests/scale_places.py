"""Where the float32 numbers of a page lie, counted out row by row in plain Python."""

from __future__ import annotations

import torch

# Bits of a code and float32 numbers of a row.
PAGE_FORMATS = {
    "fp8_per_token_head": (8, 1),
    "int8_per_token_head": (8, 1),
    "int4_per_token_head": (4, 2),
}
PLACEMENTS = [("page", "NHD"), ("page", "HND"), ("inline", "NHD"), ("inline", "HND")]

ONE = bytes([0x00, 0x00, 0x80, 0x3F])
ZERO = bytes(4)


def number_places(
    name: str, placement: str, order: str, block_size: int, heads: int, widths: tuple[int, int]
) -> tuple[list[int], list[int], int]:
    """Byte offsets of all scales and of all offsets in a page, and the bytes of a page."""
    bits, numbers = PAGE_FORMATS[name]
    code_bytes = [width * bits // 8 for width in widths]
    scales: list[int] = []
    offsets: list[int] = []
    at = 0
    if placement == "page":
        at = block_size * heads * sum(code_bytes)
        for _side, _head in ((s, h) for s in range(2) for h in range(heads)):
            for into in (scales, offsets)[:numbers]:
                for _token in range(block_size):
                    into.append(at)
                    at += 4
    else:
        # NHD and HND differ in which record is whose, not in where the numbers are.
        for _record in range(block_size * heads):
            for side in range(2):
                at += code_bytes[side]
                for into in (scales, offsets)[:numbers]:
                    into.append(at)
                    at += 4
    return scales, offsets, at


def words_at(page: torch.Tensor, places: list[int]) -> set[bytes]:
    """The different 4-byte words at some places of a page."""
    raw = bytes(page.tolist())
    return {raw[place : place + 4] for place in places}


def without(page: torch.Tensor, places: list[int]) -> bytes:
    """A page's bytes, those of the numbers at some places left out."""
    taken = {place + byte for place in places for byte in range(4)}
    return bytes(value for at, value in enumerate(page.tolist()) if at not in taken)
