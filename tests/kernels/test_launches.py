"""Launches by key: Triton is asked once a key, and a binary gets all arguments in order."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from quantattn.kernels._launches import Launches


class Kernel:
    """Stands for a kernel; calls of it give a binary of their own, or None."""

    def __init__(self, *, interpreted: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.interpreted = interpreted

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments, **options):
            self.calls.append(("compile", grid, arguments, options))
            return None if self.interpreted else Binary(len(self.calls), self.calls)

        return run


class Binary:
    def __init__(self, name: int, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments: self.calls.append((self.name, grid, arguments))


def test_each_key_is_compiled_once_and_launched_by_its_own_binary() -> None:
    kernel = Kernel()
    launches = Launches(kernel)
    for key, first in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
        launches.launch(key, (first, 1, 1), (first, None), ("constant",), num_warps=4)
    assert kernel.calls == [
        ("compile", (1, 1, 1), (1, None, "constant"), {"num_warps": 4}),
        ("compile", (2, 1, 1), (2, None, "constant"), {"num_warps": 4}),
        (1, (3, 1, 1), (3, None, "constant")),
        (2, (4, 1, 1), (4, None, "constant")),
    ]


def test_the_interpreter_is_called_anew_each_time() -> None:
    kernel = Kernel(interpreted=True)
    launches = Launches(kernel)
    for _ in range(2):
        launches.launch("a", (1, 1, 1), (7,), (), num_warps=1)
    assert [call[0] for call in kernel.calls] == ["compile", "compile"]
