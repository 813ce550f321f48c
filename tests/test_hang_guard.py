"""A test that hangs is reported, whatever it waits for, and ends its process alone."""

from __future__ import annotations

import os

import pytest
import torch

from tests.library import ROOT
from tests.ops.on_hopper import on_hopper

pytest_plugins = ["pytester"]

FOR_A_THREAD = """
import threading

def wait():
    threading.Event().wait()
"""
WITHOUT_OTHER_THREADS = """
import ctypes

def wait():
    ctypes.PyDLL(None).pause()
"""
FOR_A_KERNEL = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

@gluon.jit
def waiting_kernel(out):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.wait(barrier, 0)
    gl.store(out, 1)

def wait():
    waiting_kernel[(1,)](torch.zeros(1, device="cuda"), num_warps=4)
    torch.cuda.synchronize()
"""
WITHOUT = [
    f"-pno:{name}" for name in ("cacheprovider", "hypothesispytest", "quantattn.testing.plugin")
]
TESTS = """
import pytest
from waiting import wait

def test_before():
    pass

@pytest.mark.gpu(LIMIT)
def test_hangs(hung_teardown):
    wait()

def test_after():
    pass
"""
CONFTEST = """
import pytest
from tests.hang_guard import HangGuard
from waiting import wait

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: as here")
    config.pluginmanager.register(HangGuard(SECONDS))

@pytest.fixture
def hung_teardown():
    yield
    wait()
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a test that waits, between two others, by a guard that lets it wait some seconds."""

    def run(waiting: str, seconds: float, *options: str, limit: str = "") -> pytest.RunResult:
        monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        pytester.makepyfile(waiting=waiting, test_some=TESTS.replace("LIMIT", limit))
        pytester.makeconftest(CONFTEST.replace("SECONDS", str(seconds)))
        return pytester.runpytest_subprocess(*WITHOUT, *options, timeout=200)

    return run


@pytest.mark.parametrize(
    ("waiting", "seconds", "place"),
    [
        pytest.param(FOR_A_THREAD, 3, "Event().wait()", id="for a thread"),
        pytest.param(FOR_A_KERNEL, 30, "cuda.synchronize()", id="for a kernel", marks=on_hopper),
    ],
)
def test_a_hang_is_a_failure_and_ends_the_run(waiting, seconds, place, run) -> None:
    result = run(waiting, seconds)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [f"Hangs: no end after {seconds} s.*", f"*{place}", "FAILED test_some.py::test_hangs*"]
    )
    if waiting is FOR_A_KERNEL:
        assert torch.ones(42, device="cuda").sum().item() == 42


def test_under_xdist_the_other_tests_run(run) -> None:
    result = run(FOR_A_THREAD, 3, "-n1", "-p", "no:benchmark")
    assert result.parseoutcomes()["passed"] == 2
    result.stdout.fnmatch_lines(["Hangs: no end after 3 s.*", "FAILED test_some.py::test_hangs*"])


def test_a_hang_that_stops_other_threads_ends_the_run(run) -> None:
    result = run(WITHOUT_OTHER_THREADS, 1000, limit="seconds=2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stderr.fnmatch_lines(["Timeout (0:00:03)!", "*waiting.py*in wait"])


def test_the_guard_watches_where_a_gpu_is(request) -> None:
    plugins = request.config.pluginmanager
    assert plugins.has_plugin("hang_guard") == torch.cuda.is_available()
