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


def test_integers_and_alignments_in_tuples_need_binaries_of_their_own() -> None:
    kernel = Kernel()
    launches = Launches(kernel)
    numbers = torch.zeros(8)
    apart = [
        Batch(numbers, 1),
        Batch(numbers, 4),
        Batch(numbers, 32),
        Batch(numbers[1:], 4),
        Batch(numbers, 4, Batch(numbers, 1)),
        Batch(numbers, 4, Batch(numbers[1:], 5)),
    ]
    for _ in range(2):
        for batch in apart:
            launches.launch("key", (1, 1, 1), (batch, 7), (3,))
        launches.launch("key", (1, 1, 1), (Batch(numbers[4:], 5), 7), (3,))
    assert len(kernel.compiled) == len(apart)
