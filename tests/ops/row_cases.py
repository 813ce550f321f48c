"""Rows that are hard to code: special numbers, extreme magnitudes, numbers where codes begin."""

from __future__ import annotations

import numpy as np
import torch

from tests.ops import page_oracle


def hard_rows(width: int) -> torch.Tensor:
    """Rows `[n, width]` of float32 with infinities, NaN, zeros of both signs and subnormals."""
    generator = np.random.default_rng(5)
    inf, nan = np.inf, np.nan
    specials = ([inf], [-inf, nan], [nan], [inf, -inf, 0.0, -0.0], [-0.0], [1e-45, -0.0])
    magnitudes = (0.0, 1e-45, 3e-44, 2.0**-126, 1.4e-36, 2.0**-119, 5e-36, 1e-30, 2.0**-60, 1.0)
    rows = []
    for magnitude in (*magnitudes, 3e5, 2.0**110, 3e38):
        row = (generator.standard_normal(width).clip(-1, 1) * magnitude).astype(np.float32)
        rows += [row, np.full(width, magnitude, np.float32), np.full(width, -magnitude, np.float32)]
        for special in specials:
            places = generator.permutation(width)[: 3 * len(special)]
            mixed, alone = row.copy(), np.zeros(width, np.float32)
            mixed[places] = alone[places] = np.tile(special, 3)
            rows += [mixed, alone]
    rows.append(np.full(width, nan, np.float32))
    rows.append(np.full(width, -0.0, np.float32))
    return torch.from_numpy(np.stack(rows))


def boundary_rows(width: int, count: int) -> torch.Tensor:
    """Rows `[2 * count, width]` of float32, their numbers within two ulps of where a code begins.

    One half of the rows for steps of 1 / 127 of the largest number, one for those of 1 / 448.
    """
    generator = np.random.default_rng(7)
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    rows = []
    for steps, starts in ((127, np.arange(255) / 2), (448, (codes[1:] + codes[:-1]) / 2)):
        exponents = generator.integers(-125, 118, (count, 1))
        amax = np.ldexp(1 + generator.random((count, 1)), exponents).astype(np.float32)
        scale = amax / np.float32(steps)
        beginnings = (generator.choice(starts, (count, width)) * scale).astype(np.float32)
        ulps = generator.integers(-2, 3, (count, width)).astype(np.int32)
        near = (beginnings.view(np.int32) + ulps).clip(0).view(np.float32).clip(0, amax)
        near[:, generator.integers(width)] = amax[:, 0]
        rows.append(near * generator.choice([-1, 1], near.shape).astype(np.float32))
    return torch.from_numpy(np.concatenate(rows))


def tie_rows(width: int, count: int) -> torch.Tensor:
    """Rows `[count, width]` of float32 whose rotated numbers lie in the middle of int4's codes.

    Scales are odd numbers, so that products with their reciprocals lie beside the middle. Width is
    a power of 4: numbers of few bits rotate exactly.
    """
    generator = np.random.default_rng(9)
    scale = generator.integers(1, 120, (count, 1)) * 2 + 1
    steps = generator.integers(0, 15, (count, width)) + 0.5
    steps[:, :2] = (0, 15)
    rotated = generator.permuted(steps, axis=1) * scale + generator.integers(-99, 99, (count, 1))
    return torch.from_numpy(rotated @ page_oracle.rotation(width).T).float()
