"""Binaries of a kernel are kept by what Triton compiles for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quantattn.kernels._launches import Launches


class Batch(NamedTuple):
    ends: Any
    count: Any
    inner: Any = None


class Kernel:
    """Counts how often it is compiled."""

    def __init__(self) -> None:
        self.compiled: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Kernel:
        return self

    def __call__(self, *arguments, **options) -> dict:
        self.compiled.append(arguments)
        return {(1, 1, 1): lambda *arguments: None}


def test_what_triton_compiles_for_needs_binaries_of_their_own() -> None:
    kernel = Kernel()
    launches = Launches(kernel)
    numbers = torch.zeros(8)
    apart = [
        Batch(numbers, 1),
        Batch(numbers, 4),
        Batch(numbers, 32),
        Batch(numbers, 2**31),
        Batch(numbers, 2**31 + 1),
        Batch(None, 4),
        Batch(numbers.half(), 4),
        Batch(numbers[1:], 4),
        Batch(numbers, 4, Batch(numbers, 1)),
        Batch(numbers, 4, Batch(numbers[1:], 5)),
    ]
    first = apart[0]
    for _ in range(2):
        for batch in apart:
            launches.launch("key", (1, 1, 1), (batch, 7), (3,))
        for same in (Batch(numbers[4:], 5), Batch(numbers, 7)):
            launches.launch("key", (1, 1, 1), (same, 3), (3,))
        for count in (1, 16, None, numbers, numbers[1:]):
            launches.launch("key", (1, 1, 1), (first, count), (3,))
        launches.launch("another key", (1, 1, 1), (first, 7), (3,))
    assert len(kernel.compiled) == len(apart) + 5 + 1


def test_a_binary_gets_all_arguments_in_order() -> None:
    launched = []

    class Recording(Kernel):
        def __call__(self, *arguments, **options) -> dict:
            super().__call__(*arguments, **options)
            return {(2, 1, 1): lambda *given: launched.append(given)}

    kernel, arguments = Recording(), (Batch(None, 4), 7)
    launches = Launches(kernel)
    for _ in range(2):
        launches.launch("key", (2, 1, 1), arguments, (3, "constant"), num_warps=4)
    assert kernel.compiled == launched == [(*arguments, 3, "constant")]


def test_the_interpreter_is_called_anew_each_time() -> None:
    calls = []
    kernel = {(1, 1, 1): lambda *given, **options: calls.append(given)}
    launches = Launches(kernel)
    for _ in range(2):
        launches.launch("key", (1, 1, 1), (7,), ())
    assert calls == [(7,), (7,)]
