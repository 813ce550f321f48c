"""Launches of a kernel without asking Triton again which of its binaries is meant."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

__all__ = ["Launches"]

INT32_MAX = 2**31 - 1


class Launches:
    """Launches one kernel, and keeps its binaries by keys that callers make.

    Triton finds the binary from the type, value and alignment of every argument, which takes longer
    than the launch. A key must tell apart the device, all constants and options, and what
    descriptors are made of. What integers, tensors and absent ones are compiled for is told apart
    here, in tuples too, where Triton 3.6 specializes them whatever it is told.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._binaries: dict[Hashable, Any] = {}

    def launch(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        **options: Any,
    ) -> None:
        """Launch on the current device; constants come behind the other arguments."""
        key = key, _specialized(arguments)
        binary = self._binaries.get(key)
        if binary is not None:
            binary[grid](*arguments, *constants)
        else:
            # Triton's interpreter returns None.
            self._binaries[key] = self._kernel[grid](*arguments, *constants, **options)


def _specialized(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles for of some arguments: dtypes, alignments, kinds of integers.

    What is in tuples comes behind the rest; of one kernel it is always the same tuples.
    """
    kinds: list[Any] = []
    values = list(arguments)
    for value in values:
        if value is None:
            kinds.append(None)
        elif isinstance(value, int):
            kinds.append((value % 16 == 0) - (value == 1) + 2 * (value > INT32_MAX))
        elif isinstance(value, tuple):
            values += value
        elif isinstance(value, Tensor):
            kinds.append(value.dtype)
            kinds.append(value.data_ptr() % 16 == 0)
    return tuple(kinds)
