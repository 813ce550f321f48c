"""The rotation that int4 pages store rows in: it spreads outliers over a row before they are coded.

First, number i of a row changes its sign where i has an odd count of neighbouring pairs of ones in
binary: the Rudin-Shapiro sequence. Then a row of width 2^a * m (m odd) is cut into m runs of
n = 2^a numbers, and each run is multiplied by the Hadamard matrix of order n in Sylvester's order,
over sqrt(n). Both steps are orthonormal, so dot products of rotated rows are those of the rows.
Without the signs, what the numbers of a row have in common (a mean, an alternation) would end in
one number of the rotated row; with them it is spread evenly, like an outlier.

Kernels reproduce it bit by bit, so the order of its additions is part of the format: all in
float32, stages with stride 1, 2, 4, ... n / 2. In each stage, numbers i and i + stride of a run
(where i has no bit `stride`) become their sum and the first minus the second. Last, each number is
multiplied once by the float32 nearest to 1 / sqrt(n).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["rotate", "rotate_back", "run_length"]


def run_length(width: int) -> int:
    """Numbers that are rotated together: the largest power of two that divides the width.

    Example:
        >>> run_length(128), run_length(96)
        (128, 32)
    """
    return width & -width


def rotate(x: Tensor) -> Tensor:
    """Rotate rows, as they are stored.

    Args:
        x: Rows `[..., width]`, fp32, fp16 or bf16.

    Returns:
        Rotated rows, float32, shape of `x`.

    Example:
        >>> rotate(torch.tensor([8.0, 0.0, 0.0, 0.0]))
        tensor([4., 4., 4., 4.])
    """
    return _hadamard(x.float() * _signs(x))


def rotate_back(x: Tensor) -> Tensor:
    """Undo `rotate`.

    Args:
        x: Rotated rows `[..., width]`, fp32, fp16 or bf16.

    Returns:
        Rows, float32, shape of `x`.

    Example:
        >>> rotate_back(rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])))
        tensor([1., 2., 3., 4.])
    """
    return _hadamard(x.float()) * _signs(x)


def _signs(x: Tensor) -> Tensor:
    """The Rudin-Shapiro sequence, 1 and -1, float32 `[width]`."""
    index = torch.arange(x.shape[-1], device=x.device)
    parity = index & (index >> 1)
    for shift in (8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return 1.0 - 2.0 * (parity & 1)


def _hadamard(x: Tensor) -> Tensor:
    width = x.shape[-1]
    length = run_length(width)
    stride = 1
    while stride < length:
        pairs = x.unflatten(-1, (width // (2 * stride), 2, stride))
        first, second = pairs.unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        stride *= 2
    return x * (1 / math.sqrt(length))
