"""Rotary embedding in numpy: one pair after another, every product and sum rounded to float32."""

from __future__ import annotations

import torch


def pair(i: int, rotary_dim: int, interleaved: bool) -> tuple[int, int]:
    """Columns of pair i."""
    return (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)


def turn(
    x: torch.Tensor, positions: list[int], table: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotate `[num_tokens, heads, head_dim]` by known positions; dtype of x."""
    rows, angles = x.float().numpy(), table.float().numpy()[positions]
    pairs = table.shape[1] // 2
    turned = rows.copy()
    for i in range(pairs):
        a, b = pair(i, 2 * pairs, interleaved)
        cos, sin = angles[:, None, i], angles[:, None, pairs + i]
        turned[..., a] = rows[..., a] * cos - rows[..., b] * sin
        turned[..., b] = rows[..., b] * cos + rows[..., a] * sin
    return torch.from_numpy(turned).to(x.dtype)


def make_table(max_positions: int, rotary_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of a small base, so that every pair turns far."""
    steps = 50.0 ** -(torch.arange(rotary_dim // 2) * 2 / rotary_dim)
    angles = torch.arange(max_positions)[:, None] * steps
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
