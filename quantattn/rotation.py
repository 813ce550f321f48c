"""The rotation that int4 pages store rows in: it spreads outliers over a row before they are coded.

A row of width 2^a * m (m odd) is cut into m runs of n = 2^a numbers, and each run is multiplied by
the Hadamard matrix of order n in Sylvester's order, over sqrt(n). The matrix is orthonormal and
symmetric: the rotation is its own inverse, and dot products of rotated rows are those of the rows.

Kernels reproduce it bit by bit, so the order of its additions is part of the format: all in
float32, stages with stride 1, 2, 4, ... n / 2. In each stage, numbers i and i + stride of a run
(where i has no bit `stride`) become their sum and the first minus the second. Last, each number is
multiplied once by the float32 nearest to 1 / sqrt(n).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["rotate", "run_length"]


def run_length(width: int) -> int:
    """Numbers that are rotated together: the largest power of two that divides the width.

    Example:
        >>> run_length(128), run_length(96)
        (128, 32)
    """
    return width & -width


def rotate(x: Tensor) -> Tensor:
    """Rotate rows; a second time gives them back.

    Args:
        x: Rows `[..., width]`, fp32, fp16 or bf16.

    Returns:
        Rotated rows, float32, shape of `x`.

    Example:
        >>> rotate(torch.tensor([8.0, 0.0, 0.0, 0.0]))
        tensor([4., 4., 4., 4.])
    """
    width = x.shape[-1]
    length = run_length(width)
    rotated = x.float()
    stride = 1
    while stride < length:
        pairs = rotated.unflatten(-1, (width // (2 * stride), 2, stride))
        first, second = pairs.unbind(-2)
        rotated = torch.stack((first + second, first - second), -2).flatten(-3)
        stride *= 2
    return rotated * (1 / math.sqrt(length))
