"""compute-sanitizer finds nothing in any kernel at odd shapes, and finds what is planted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.sanitized import SECONDS
from tests.kernels.sources import is_for_hopper, kernels
from tests.library import ROOT

pytestmark = pytest.mark.gpu(seconds=SECONDS + 60)

WITH_ROLES = {
    "hopper_decode_kernel",
    "hopper_mla_kernel",
    "hopper_mla_narrow_kernel",
    "hopper_prefill_kernel",
}
"""Kernels whose warps have several roles."""


def sanitize(tool: str, *cases: str) -> subprocess.CompletedProcess:
    """Run some cases of sanitized.py, all of them if none is named, under one of the tools."""
    search = os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=search)
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not here")
    command = [sanitizer, "--tool", tool, "--print-limit", "100", sys.executable]
    # A tensor in a block of torch's own pool could be overrun into its neighbour unseen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        [*command, "-m", "tests.kernels.sanitized", *cases],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    refusal = re.search(r".*(Device not supported|Failed to initialize).*", done.stdout)
    if refusal:
        pytest.skip(f"compute-sanitizer cannot work here: {refusal[0]}")
    return done


@pytest.mark.parametrize(
    ("tool", "summary"),
    [
        ("memcheck", "ERROR SUMMARY: 0 errors"),
        ("initcheck", "ERROR SUMMARY: 0 errors"),
        ("synccheck", "ERROR SUMMARY: 0 errors"),
        ("racecheck", "RACECHECK SUMMARY:"),
    ],
)
def test_every_kernel_is_clean_at_odd_shapes(tool, summary) -> None:
    """Races in kernels whose warps have several roles do not count.

    Their loading and computing warps meet at one barrier of the CTA from different instructions
    (Triton's warp specialization), which racecheck does not take for an order of their accesses.
    """
    done = sanitize(tool)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary in done.stdout, done.stdout
    races = re.findall(r".*Race reported .*(?:\n=+     and .*)*", done.stdout)
    races = [race for race in races if not set(re.findall(r"(\w+)\+0x", race)) <= WITH_ROLES]
    assert not races, "\n".join(races)
    ran = re.search("^ran: (.*)", done.stdout, re.MULTILINE)[1].split()
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    fitting = {kernel for kernel in kernels() if on_hopper or not is_for_hopper(kernel)}
    assert fitting <= set(ran), "give each kernel a call in sanitized.py"


@pytest.mark.parametrize(
    ("tool", "fault", "report"),
    [
        ("memcheck", "writes_out_of_bounds", "Invalid __global__ write"),
        ("initcheck", "reads_uninitialised", "Uninitialized __global__ memory read"),
        ("racecheck", "races_in_shared_memory", "Race reported between Write access"),
    ],
)
def test_a_planted_fault_is_found(tool, fault, report) -> None:
    assert report in sanitize(tool, fault).stdout
