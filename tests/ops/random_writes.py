"""Writes drawn at random: any format, layout, shape and place in memory, and what they leave."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantattn import ops
from tests import fp8_oracle
from tests.ops.oracles import FP8, per_head
from tests.ops.page_oracle import FORMATS, ORDERS, PLACEMENTS, Pages
from tests.ops.rope_oracle import make_table, turn

NAMES = ("auto", "fp8_e4m3", "fp8_e5m2", *FORMATS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RandomWrite:
    """One write; `rotation` is None, or positions, table and whether pairs are neighbours."""

    where: Pages
    stored: torch.dtype
    num_blocks: int
    start: int
    gap: int
    rows: list[Tensor]
    slots: Tensor
    scales: list[Tensor]
    rotation: tuple[Tensor, Tensor, bool] | None
    buffer: Tensor

    def act(self, device: str) -> np.ndarray:
        """The buffer after the operation on a device."""
        buffer, slots = self.buffer.to(device), self.slots.to(device)
        pages = self._pages(buffer.view(self.stored))
        key, value = (_moved(rows, device) for rows in self.rows)
        options = {
            "k_scale": _moved(self.scales[0], device),
            "v_scale": _moved(self.scales[1], device),
            "kv_cache_dtype": self.where.name,
            "layout": self.where.order,
            "scale_placement": self.where.placement,
        }
        if self.rotation is None:
            ops.write_kv(key, value, pages, slots, **options)
        else:
            positions, table, interleaved = self.rotation
            options |= {"positions": positions.to(device), "cos_sin_cache": table.to(device)}
            options |= {"interleaved": interleaved}
            ops.rope_write_kv(key, key, value, pages, slots, **options)
        return buffer.cpu().numpy()

    def expected(self) -> np.ndarray:
        """The buffer as it must be, by numpy and the definition of each format."""
        buffer = self.buffer.clone()
        pages = self._pages(buffer.view(self.stored)).view(torch.uint8).numpy()
        key, value = self.rows
        if self.rotation is not None:
            positions, table, interleaved = self.rotation
            key = turn(key, positions.tolist(), table, interleaved=interleaved)
        if len(self.slots) == 0:
            return buffer.numpy()
        if self.where.name in FORMATS:
            self.where.write_tokens(pages, key, value, self.slots.tolist())
            return buffer.numpy()
        for side, new in enumerate((key, value)):
            codes = self._codes(side, new)
            rows = self.where.size * self.where.heads
            width = codes.shape[2]
            first = side * rows * self.where.dims[0] * self.stored.itemsize
            for token, slot in enumerate(self.slots.tolist()):
                block, offset = divmod(slot, self.where.size)
                for head in range(self.where.heads if slot >= 0 else 0):
                    place = first + self.where.row_index(offset, head) * width
                    pages[block, place : place + width] = codes[token, head]
        return buffer.numpy()

    def _pages(self, numbers: Tensor) -> Tensor:
        """Pages in the buffer, seen as what they store."""
        stride = (len(numbers) - self.start) // self.num_blocks
        pages = numbers[self.start :].view(self.num_blocks, stride)
        return pages[:, : stride - self.gap]

    def _codes(self, side: int, new: Tensor) -> np.ndarray:
        if self.where.name == "auto":
            return new.to(self.stored).contiguous().view(torch.uint8).numpy()
        scale = np.array(per_head(self.scales[side], self.where.heads), np.float32)[:, None]
        quotient = fp8_oracle.quotient(new.float().numpy(), scale)
        return fp8_oracle.encode(quotient, FP8[self.where.name])


def draw(seed: int) -> RandomWrite:
    """Draw a write; the same seed gives the same one."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    name, heads, size = pick.choice(NAMES), pick.choice([1, 2, 3, 8]), pick.choice([1, 3, 5, 16])
    widths = (8, 24, 64, 80, 128) if name in FORMATS else (2, 6, 24, 80, 130)
    dims = (pick.choice(widths), pick.choice(widths))
    placement = pick.choice(PLACEMENTS) if name in FORMATS else "page"
    where = Pages(name, dims, heads, size, pick.choice(ORDERS), placement)
    stored = pick.choice(DTYPES) if name == "auto" else torch.uint8
    tokens = pick.choice([0, 1, 2, 7, 40])
    num_blocks = -(-tokens // size) + pick.randint(1, 3)
    start, gap = 4 * pick.choice([0, 1, 5]), 4 * pick.choice([0, 1, 6])
    page = where.page_bytes if name in FORMATS else size * heads * sum(dims)
    buffer = torch.randint(0, 256, (start + num_blocks * (page + gap), stored.itemsize)).byte()
    slots = torch.randperm(num_blocks * size)[:tokens]
    slots[torch.rand(tokens) < 0.2] = pick.choice([-1, -(2**62)])
    dtype = pick.choice(DTYPES)
    rows = [_rows(pick, tokens, heads, width).to(dtype) for width in dims]
    scales = [torch.rand(pick.choice([(), (1,), (heads,)])) + 0.2 for _ in dims]
    rotation = None
    if pick.random() < 0.5:
        table = make_table(9, 2 * pick.randint(1, dims[0] // 2), pick.choice(DTYPES))
        rotation = (torch.randint(0, 9, (tokens,)), table, pick.random() < 0.5)
    return RandomWrite(
        where, stored, num_blocks, start, gap, rows, slots, scales, rotation, buffer.flatten()
    )


def _rows(pick: random.Random, tokens: int, heads: int, width: int) -> Tensor:
    """Rows of several magnitudes: contiguous, part of a wider tensor, or transposed."""
    louder = 2.0 ** torch.randint(-6, 6, (tokens, heads, 1))
    kind = pick.choice(["contiguous", "packed", "transposed"])
    if kind == "contiguous":
        return torch.randn(tokens, heads, width) * louder
    if kind == "packed":
        return (torch.randn(tokens, 2 * heads, width + 3) * louder.repeat(1, 2, 1))[:, ::2, 3:]
    return (torch.randn(tokens, width, heads) * louder.mT).mT


def _moved(x: Tensor, device: str) -> Tensor:
    """A tensor on another device, with the strides that it has."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
