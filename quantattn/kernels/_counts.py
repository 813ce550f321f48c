"""Counts on the host: Triton's functions of these names are for kernels, and slow outside them."""

from __future__ import annotations

__all__ = ["cdiv", "next_power_of_2"]


def cdiv(count: int, size: int) -> int:
    """Parts of `size` that hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Smallest power of two that is not below `count`, and not below 1."""
    return 1 << max(count - 1, 0).bit_length()
