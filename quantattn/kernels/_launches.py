"""Launches of a kernel without asking Triton again which of its binaries is meant."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

__all__ = ["Launches"]


class Launches:
    """Launches one kernel, and keeps its binaries by keys that callers make.

    Triton finds the binary from the type, value and alignment of every argument, which takes longer
    than the launch. A key must tell apart what Triton does: the device, all constants and options,
    and of each argument that is specialized its dtype, whether it is None, its alignment to 16
    bytes, and of an integer whether it is 1 or a multiple of 16. Alignments and integers in tuples
    are told apart here: Triton 3.6 specializes them whatever it is told.
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
        key = key, *_specialized(arguments)
        binary = self._binaries.get(key)
        if binary is not None:
            binary[grid](*arguments, *constants)
        else:
            # Triton's interpreter returns None.
            self._binaries[key] = self._kernel[grid](*arguments, *constants, **options)


def _specialized(arguments: tuple[Any, ...]) -> list[int]:
    """What Triton compiles for of the integers and tensors in tuples among some arguments."""
    kinds: list[int] = []
    for argument in arguments:
        if not isinstance(argument, tuple):
            continue
        kinds += _specialized(argument)
        for value in argument:
            if isinstance(value, int):
                kinds.append(2 if value == 1 else int(value % 16 == 0))
            elif isinstance(value, Tensor):
                kinds.append(int(value.data_ptr() % 16 == 0))
    return kinds
