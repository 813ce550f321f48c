"""The operations in plain vectorised torch: the CPU path, and what kernels are compared with."""

from __future__ import annotations

__all__: list[str] = []
