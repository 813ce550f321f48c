"""Rotary position embedding: angles from the config, computed when needed and kept nowhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Llama3Scaling", "Rope", "rotate", "rotation"]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the slow frequencies.

    Attributes:
        factor: Divisor of the frequencies whose wave is longer than the old context.
        low_freq_factor: Waves longer than `original_context / low_freq_factor` are divided in full.
        high_freq_factor: Waves shorter than `original_context / high_freq_factor` are left alone.
        original_context: Context of the model before stretching, tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Rope:
    """What a config says about rotary embedding.

    Attributes:
        theta: Base of the frequencies.
        linear_factor: Positions are divided by it; 1.0 leaves them.
        llama3: Llama 3.1's scaling, if the config has it.
    """

    theta: float = 10000.0
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


def rotation(rope: Rope, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of every position's angles.

    Args:
        rope: What the config says.
        positions: Positions in their sequences, `[num_tokens]`, int64.
        head_dim: Width of a head, even.

    Returns:
        Cosines and sines, each `[num_tokens, 1, head_dim / 2]`, float32.

    Example:
        >>> cos, sin = rotation(Rope(), torch.tensor([0, 3]), 8)
        >>> cos.shape, cos[0, 0].tolist()
        (torch.Size([2, 1, 4]), [1.0, 1.0, 1.0, 1.0])
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / (rope.theta ** (steps / head_dim)) / rope.linear_factor
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of every head, in float32.

    Args:
        x: Queries or keys, `[num_tokens, heads, head_dim]`.
        cos: From `rotation`.
        sin: From `rotation`.

    Returns:
        Shape and dtype of `x`.

    Example:
        >>> cos, sin = rotation(Rope(), torch.tensor([0]), 4)
        >>> rotate(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), cos, sin).tolist()
        [[[1.0, 2.0, 3.0, 4.0]]]
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def _stretch(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    waves = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)
