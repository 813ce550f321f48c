"""Runs kernels in Triton's interpreter.

Triton decides at its import whether it interprets, for the whole process, so each file of such
tests runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("interpreted_*.py"))
Done = subprocess.CompletedProcess


def run(file: Path) -> Done[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(
        command, cwd=file.parents[2], env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def runs(request) -> Iterator[dict[Path, Future[Done[str]]]]:
    """A process for each file that is asked for, as many at once as there are cores."""
    tests = [item for item in request.session.items if item.path == Path(__file__)]
    files = [item.callspec.params["file"] for item in tests]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {file: pool.submit(run, file) for file in files}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_are_bit_equal_in_the_interpreter(file, runs) -> None:
    pytest.importorskip("triton")
    done = runs[file].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
