"""What a device is, asked of the driver once: each question costs microseconds of every launch."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["capability", "is_hopper", "multiprocessors"]


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) for every other device.

    Triton's interpreter takes tensors of the CPU, so these are among the others.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a Hopper GPU."""
    return capability(device)[0] == 9
