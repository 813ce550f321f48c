"""Rotary embedding against complex numbers in float64, Llama 3.1's scaling by its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quantattn.models import Llama3Scaling, Rope, rotate, rotation

HEAD_DIM = 10
STRETCH = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)


def frequency(rope: Rope, pair: int) -> float:
    plain = rope.theta ** (-2 * pair / HEAD_DIM) / rope.linear_factor
    if rope.llama3 is None:
        return plain
    wave = 2 * math.pi / plain
    low, high = rope.llama3.low_freq_factor, rope.llama3.high_freq_factor
    if wave < rope.llama3.original_context / high:
        return plain
    if wave > rope.llama3.original_context / low:
        return plain / rope.llama3.factor
    smooth = (rope.llama3.original_context / wave - low) / (high - low)
    return (1 - smooth) * plain / rope.llama3.factor + smooth * plain


def turn(rope: Rope, x: Tensor, positions: list[int]) -> Tensor:
    angles = torch.tensor(
        [[p * frequency(rope, i) for i in range(HEAD_DIM // 2)] for p in positions]
    )
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    turned = pairs * torch.exp(1j * angles.double())[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize(
    "rope",
    [Rope(50.0), Rope(50.0, linear_factor=2.5), Rope(50.0, llama3=STRETCH)],
    ids=["default", "linear", "llama3"],
)
def test_heads_are_turned_by_their_positions(rope: Rope) -> None:
    positions = [0, 1, 7, 500]
    x = torch.randn(4, 3, HEAD_DIM)
    found = rotate(x, *rotation(rope, torch.tensor(positions), HEAD_DIM))
    torch.testing.assert_close(found.double(), turn(rope, x, positions), rtol=1e-4, atol=2e-4)


def test_the_three_regions_of_llama3_are_all_reached() -> None:
    plain = [frequency(Rope(50.0), pair) for pair in range(HEAD_DIM // 2)]
    stretched = [frequency(Rope(50.0, llama3=STRETCH), pair) for pair in range(HEAD_DIM // 2)]
    ratios = [p / s for p, s in zip(plain, stretched, strict=True)]
    assert ratios[0] == pytest.approx(1)
    assert ratios[-1] == pytest.approx(8)
    assert any(1.01 < ratio < 7.9 for ratio in ratios)


def test_the_dtype_stays_and_the_turn_is_in_float32() -> None:
    x = torch.randn(2, 1, HEAD_DIM, dtype=torch.bfloat16)
    cos, sin = rotation(Rope(), torch.tensor([3, 4]), HEAD_DIM)
    found = rotate(x, cos, sin)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, rotate(x.float(), cos, sin).bfloat16())
