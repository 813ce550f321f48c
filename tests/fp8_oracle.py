"""FP8 from its bit definition, in float64 and numpy, sharing nothing with the library."""

from __future__ import annotations

import numpy as np
import torch

# dtype -> mantissa bits, exponent bias, largest finite code
FORMATS = {
    torch.float8_e4m3fn: (3, 7, 0x7E),
    torch.float8_e5m2: (2, 15, 0x7B),
}
NAN_CODE = 0x7F


def code_value(code: int, dtype: torch.dtype) -> float:
    """Value of one code; e4m3fn has no infinity, e5m2 has IEEE's."""
    mantissa_bits, bias, largest = FORMATS[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    magnitude = code & 0x7F
    if magnitude > largest:
        is_infinity = dtype == torch.float8_e5m2 and magnitude == 0x7C
        return sign * np.inf if is_infinity else np.nan
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def values(dtype: torch.dtype) -> np.ndarray:
    """Values of the finite codes from 0 up, in order."""
    return np.array([code_value(code, dtype) for code in range(FORMATS[dtype][2] + 1)])


def midpoints(dtype: torch.dtype) -> np.ndarray:
    """The ties: halfway between neighbours, exact in float64."""
    grid = values(dtype)
    return (grid[1:] + grid[:-1]) / 2


def encode(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Nearest code, ties to the even one, saturating; every NaN is 0x7F."""
    x = np.asarray(x, dtype=np.float64)
    ties = midpoints(dtype)
    magnitude = np.abs(x)
    below = np.searchsorted(ties, magnitude, side="left")
    above = np.searchsorted(ties, magnitude, side="right")
    code = np.where(below % 2 == 0, below, above) + np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), NAN_CODE, code).astype(np.uint8)


def decode(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of codes (`dtype` or uint8) as float64."""
    table = torch.tensor([code_value(code, dtype) for code in range(256)], dtype=torch.float64)
    return table[codes.view(torch.uint8).long()]


def quotient(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """x / scale rounded once to float32, as IEEE division does."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (x.astype(np.float32) / np.float32(scale)).astype(np.float64)


def every_bf16() -> torch.Tensor:
    """All 65,536 bf16 numbers, NaNs and infinities included."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def hard_float32(dtype: torch.dtype) -> torch.Tensor:
    """Ties and values of the format with their float32 neighbours, extremes and random bits."""
    points = np.concatenate([midpoints(dtype), values(dtype)]).astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])
    tiny = np.float32(1e-45)
    extremes = np.array([np.nan, np.inf, 3.4e38, 464, 465, 61440, 65536, tiny, 0.0], np.float32)
    random = np.random.default_rng(7).integers(0, 2**32, 100_000, dtype=np.uint32)
    both = np.concatenate([near, extremes])
    return torch.from_numpy(np.concatenate([both, -both, random.view(np.float32)]))
