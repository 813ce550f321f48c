"""Comparisons that say what is off, and how much difference a fusion may make."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.validation import FP8_DTYPES

__all__ = ["assert_fused_matches", "assert_matches"]


def assert_matches(
    actual: Tensor, expected: Tensor, *, rel_l2: float = 4e-3, max_abs: float | None = None
) -> None:
    """Compare with a float64 oracle and name the worst element where it fails.

    Args:
        actual: Result of any floating dtype.
        expected: The right result, same shape.
        rel_l2: Largest allowed |actual - expected| / |expected|, both as L2 norms.
        max_abs: Largest allowed difference of one element; None: not checked.

    Raises:
        AssertionError: Shapes differ, something is NaN on one side only, or a bound is exceeded.

    Example:
        >>> assert_matches(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]))
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.numel() == 0:
        return
    got, want = actual.double().cpu(), expected.double().cpu()
    difference = torch.where(got == want, 0.0, (got - want).abs()).nan_to_num(nan=torch.inf)
    worst = int(difference.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
    error = float(difference.norm() / want.norm().clamp(min=torch.finfo(torch.float64).tiny))
    largest = float(difference.max())
    if not error <= rel_l2 or (max_abs is not None and not largest <= max_abs):
        raise AssertionError(
            f"relative L2 error {error:.3g} (allowed {rel_l2:.3g}), largest difference"
            f" {largest:.3g} (allowed {max_abs}) at {place}: got"
            f" {float(got.flatten()[worst])}, expected {float(want.flatten()[worst])}"
        )


def assert_fused_matches(
    fused: Tensor, unfused: Tensor, *, model_dtype: torch.dtype, round_through: bool = True
) -> None:
    """Compare what a fused and an unfused run computed from the same numbers.

    With `round_through`, codes are the same bit by bit. Without it, the fused run skips the
    rounding to the model's dtype, which moves a quotient by at most u, half that dtype's epsilon.
    A quotient then falls on another e4m3 number only if a boundary between two lies that close:
    codes are at most neighbours, and, e4m3 having 16 numbers to a doubling with its sign, no more
    than 32 u of them differ but for chance. Neighbours are 1/8 apart, so that a relative L2
    difference is at most sqrt(32 u) / 8.

    Args:
        fused: Codes, e4m3, or what was computed from them, any other floating dtype.
        unfused: The same of the unfused run.
        model_dtype: The attention's output dtype before it is quantized.
        round_through: What `quantattn.fusion.enable` was given.

    Raises:
        AssertionError: Shapes or dtypes differ, or the difference is larger.

    Example:
        >>> codes = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
        >>> assert_fused_matches(codes, codes.clone(), model_dtype=torch.bfloat16)
    """
    if (fused.shape, fused.dtype) != (unfused.shape, unfused.dtype):
        raise AssertionError(
            f"got {fused.dtype} {list(fused.shape)}, unfused {unfused.dtype} {list(unfused.shape)}"
        )
    share = 0.0 if round_through else 16 * torch.finfo(model_dtype).eps
    if fused.dtype not in FP8_DTYPES:
        rounding = torch.finfo(fused.dtype).eps
        assert_matches(fused, unfused.double(), rel_l2=share**0.5 / 8 + rounding)
        return
    steps = (_ordinal(fused) - _ordinal(unfused)).abs()
    count, largest = int((steps > 0).sum()), int(steps.max()) if steps.numel() else 0
    expected = share * steps.numel()
    if largest > (0 if round_through else 1) or count > expected + 4 * expected**0.5:
        place = [int(i) for i in torch.unravel_index(steps.argmax().cpu(), steps.shape)]
        raise AssertionError(
            f"{count} of {steps.numel()} codes differ (allowed {expected:.0f} and chance), the"
            f" worst by {largest} steps at {place}: fused {float(fused[tuple(place)].float())},"
            f" unfused {float(unfused[tuple(place)].float())}"
        )


def _ordinal(codes: Tensor) -> Tensor:
    """Place of each FP8 number among all of them, zeros being one; NaN lies beyond."""
    bits = codes.contiguous().view(torch.uint8).short()
    magnitude = bits & 0x7F
    return torch.where(bits > 0x7F, -magnitude, magnitude)
