"""What tests of kernels that wait for each other's warps can ask for."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

SECONDS = 150


@pytest.fixture
def no_kernel_hangs() -> Iterator[None]:
    """End the process if the test takes more than SECONDS: its kernel waits for ever."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
