"""Pages with scales inside, in numpy: bytes placed and rows coded by hand, in another order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests import fp8_oracle

FORMATS = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
ORDERS = ("NHD", "HND")
PLACEMENTS = ("page", "inline")


@dataclass(frozen=True)
class Pages:
    """Where everything lies in pages of `size` tokens; `dims` are the widths of K and V."""

    name: str
    dims: tuple[int, int]
    heads: int
    size: int
    order: str = "NHD"
    placement: str = "page"

    @property
    def is_int4(self) -> bool:
        return self.name == "int4_per_token_head"

    @property
    def numbers(self) -> int:
        return 2 if self.is_int4 else 1

    def code_bytes(self, side: int) -> int:
        return self.dims[side] // 2 if self.is_int4 else self.dims[side]

    @property
    def page_bytes(self) -> int:
        row = self.code_bytes(0) + self.code_bytes(1) + 8 * self.numbers
        return self.size * self.heads * row

    def row_index(self, offset: int, head: int) -> int:
        return offset * self.heads + head if self.order == "NHD" else head * self.size + offset

    def code_place(self, side: int, offset: int, head: int) -> int:
        """First byte of a row's codes in its page."""
        rows, index = self.size * self.heads, self.row_index(offset, head)
        if self.placement == "page":
            return side * rows * self.code_bytes(0) + index * self.code_bytes(side)
        record = self.page_bytes // rows
        return index * record + side * (self.code_bytes(0) + 4 * self.numbers)

    def scale_places(self, side: int, offset: int, head: int) -> list[int]:
        """First bytes of a row's scale, and of its offset in int4."""
        if self.placement == "inline":
            start = self.code_place(side, offset, head) + self.code_bytes(side)
            return [start + 4 * i for i in range(self.numbers)]
        rows = self.size * self.heads
        start = rows * (self.code_bytes(0) + self.code_bytes(1) + side * 4 * self.numbers)
        run = start + head * self.numbers * self.size * 4
        return [run + 4 * (i * self.size + offset) for i in range(self.numbers)]

    def write(self, page: np.ndarray, side: int, offset: int, head: int, x: np.ndarray) -> None:
        """Code one row of float32 numbers into the bytes of its page."""
        codes, numbers = encode_row(x, self.name)
        start = self.code_place(side, offset, head)
        page[start : start + len(codes)] = codes
        for place, number in zip(self.scale_places(side, offset, head), numbers, strict=True):
            page[place : place + 4] = np.array([number], np.float32).view(np.uint8)

    def write_tokens(self, pages: np.ndarray, key, value, slots: list[int]) -> None:
        """Code the keys and values of some tokens into their slots; a negative slot is skipped."""
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            block, offset = divmod(slot, self.size)
            for side, new in enumerate((key, value)):
                for head in range(self.heads):
                    self.write(pages[block], side, offset, head, new[token, head].float().numpy())

    def read(self, page: np.ndarray, side: int, offset: int, head: int) -> np.ndarray:
        """What one row's bytes mean, float64, rotated back."""
        start = self.code_place(side, offset, head)
        codes = page[start : start + self.code_bytes(side)]
        numbers = [
            float(page[place : place + 4].copy().view(np.float32)[0])
            for place in self.scale_places(side, offset, head)
        ]
        return decode_row(codes, numbers, self.name)


def hadamard(length: int) -> np.ndarray:
    """Sylvester's matrix over sqrt(length), float64."""
    matrix = np.ones((1, 1))
    while len(matrix) < length:
        matrix = np.kron([[1.0, 1.0], [1.0, -1.0]], matrix)
    return matrix / np.sqrt(length)


def signs(width: int) -> np.ndarray:
    """The Rudin-Shapiro sequence, by its recursion: a(2n) = a(n), a(2n + 1) = (-1)^n a(n)."""
    found = [1.0]
    for i in range(1, width):
        found.append(found[i // 2] * (-1.0 if i % 4 == 3 else 1.0))
    return np.array(found)


def rotation(width: int) -> np.ndarray:
    """The matrix that a row is multiplied by, from the left: signs, then Hadamard runs; float64."""
    length = 1
    while width % (2 * length) == 0:
        length *= 2
    return signs(width)[:, None] * np.kron(np.eye(width // length), hadamard(length))


def rotate_row(x: np.ndarray) -> np.ndarray:
    """The rotation in float32, by recursion over halves."""

    def transform(run: np.ndarray) -> np.ndarray:
        if len(run) == 1:
            return run
        low, high = transform(run[: len(run) // 2]), transform(run[len(run) // 2 :])
        return np.concatenate([low + high, low - high])

    length = 1
    while len(x) % (2 * length) == 0:
        length *= 2
    signed = x.astype(np.float32) * signs(len(x)).astype(np.float32)
    runs = [transform(run) for run in signed.reshape(-1, length)]
    return np.concatenate(runs) * np.float32(1 / np.sqrt(length))


def encode_row(x: np.ndarray, name: str) -> tuple[np.ndarray, list[np.float32]]:
    """Codes and scale (and offset) of one finite row of float32 numbers."""
    x = x.astype(np.float32)
    if name == "int4_per_token_head":
        x = rotate_row(x)
        offset = x.min() + np.float32(0)
        scale = (x.max() - offset) / np.float32(15) if x.max() > offset else np.float32(1)
        codes = np.clip(
            np.rint(np.float64(x - offset) * np.float64(np.float32(1) / scale)), 0, 15
        ).astype(np.uint8)
        return codes[0::2] + 16 * codes[1::2], [scale, offset]
    amax = np.abs(x).max()
    most = np.float32(448 if name == "fp8_per_token_head" else 127)
    scale = amax / most if amax > 0 else np.float32(1)
    if name == "fp8_per_token_head":
        return fp8_oracle.encode((x / scale).astype(np.float64), torch.float8_e4m3fn), [scale]
    return np.clip(np.rint(x / scale), -127, 127).astype(np.int8).view(np.uint8), [scale]


def decode_row(codes: np.ndarray, numbers: list[float], name: str) -> np.ndarray:
    """What codes mean, float64; int4 is rotated back."""
    if name == "fp8_per_token_head":
        table = [fp8_oracle.code_value(int(code), torch.float8_e4m3fn) for code in codes]
        return np.array(table) * numbers[0]
    if name == "int8_per_token_head":
        return codes.view(np.int8).astype(np.float64) * numbers[0]
    nibbles = np.stack([codes % 16, codes // 16], 1).reshape(-1)
    return rotation(len(nibbles)) @ (nibbles * numbers[0] + numbers[1])


def drawn(kind: str, rows: int, width: int, seed: int = 3) -> torch.Tensor:
    """Rows `[rows, width]` of float32: normal, heavy-tailed, or with four loud channels."""
    generator = np.random.default_rng(seed)
    if kind == "heavy-tailed":
        return torch.from_numpy(generator.standard_t(3, (rows, width)).astype(np.float32))
    x = generator.standard_normal((rows, width))
    if kind == "outlier channels":
        x[:, generator.choice(width, 4, replace=False)] *= 30.0
    return torch.from_numpy(x.astype(np.float32))
