"""A GPU test whose kernel waits for ever is reported as failed, and its process ends.

A thread that waits for such a kernel is inside CUDA, where no signal and no exception reaches it,
and only the end of the process takes the kernel from the GPU. Under pytest-xdist another worker
runs the tests that are left; without it the run ends, with its summary.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback

import pytest

SECONDS = 300
GRACE = 60
"""Seconds that a report may take."""
FRAMES = 12


class HangGuard:
    """Pytest plugin: a test marked `gpu` that takes more than `seconds` ends the process.

    A test may say itself how many: `gpu(seconds=600)`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stderr = os.dup(2)  # what is behind 2 during a test is captured, and lost

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        mark = item.get_closest_marker("gpu")
        if mark is None:
            return (yield)
        seconds = mark.kwargs.get("seconds", self._seconds)
        timer = threading.Timer(seconds, self._give_up, [item, threading.get_ident(), seconds])
        timer.daemon = True
        timer.start()
        # Ends the process as well if the test's thread does not let another one run.
        self._exit_after(1.5 * seconds)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            timer.cancel()

    def _exit_after(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stderr)

    def _give_up(self, item: pytest.Item, thread: int, seconds: float) -> None:
        """Report the test as failed, finish the session without the test's teardown, and exit."""
        self._exit_after(GRACE)
        stack = traceback.format_stack(sys._current_frames()[thread])[-FRAMES:]
        text = f"Hangs: no end after {seconds} s. Its thread is here:\n{''.join(stack)}"
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", text, "call", duration=seconds
        )
        plugins = item.config.pluginmanager
        try:
            with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
                item.ihook.pytest_runtest_logreport(report=report)
                if not hasattr(item.config, "workerinput"):
                    teardown = plugins.get_plugin("runner")
                    finish = plugins.subset_hook_caller("pytest_sessionfinish", [teardown])
                    finish(session=item.session, exitstatus=pytest.ExitCode.TESTS_FAILED)
                sys.stdout.flush()
        finally:
            os._exit(pytest.ExitCode.TESTS_FAILED)
