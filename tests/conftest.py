"""What holds for every test: fixed seeds, poisoned memory, no GPU tests without a GPU, no hang."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.hang_guard import SECONDS, HangGuard

# The tests' tensors are small: more threads than this only wait for each other.
torch.set_num_threads(min(4, os.cpu_count() or 1))

# Deterministic mode fills what torch.empty returns with NaN, so that a forgotten row is seen. On a
# GPU it refuses cuBLAS as well, so there only the tests' own poison is left.
torch.use_deterministic_algorithms(not torch.cuda.is_available())

settings.register_profile("quantattn", deadline=None, derandomize=True)
settings.load_profile("quantattn")


def pytest_configure(config: pytest.Config) -> None:
    """Let no kernel wait for ever, except in a debugger."""
    if torch.cuda.is_available() and not config.getoption("usepdb"):
        config.pluginmanager.register(HangGuard(SECONDS), "hang_guard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where no CUDA device is found."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start each test from the same random state, so that one run tells about the next."""
    torch.manual_seed(20_251)


@pytest.fixture(autouse=True)
def returned_memory() -> Iterator[None]:
    """Give the GPU's memory back after each test, to those that other processes run."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
