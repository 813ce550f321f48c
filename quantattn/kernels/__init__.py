"""Triton kernels and their launchers, imported when an operation first runs on a GPU."""

from __future__ import annotations

__all__: list[str] = []
