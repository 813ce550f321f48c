"""The command as a process of its own: pipes, status, and what start-up imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantattn", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_json_in_a_pipe_is_json_and_nothing_else() -> None:
    path = CHECKPOINTS / "llmcompressor-llama-kvhead-sharded22"
    done = run("inspect", str(path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    files = {
        row["file"] for row in json.loads(done.stdout)["layers"] if row["source"] == "checkpoint"
    }
    assert files
    assert all((path / file).is_file() for file in files)


def test_a_table_in_a_pipe_has_no_colour_and_cuts_nothing_off() -> None:
    path = CHECKPOINTS / "llmcompressor-llama-kvhead-sharded22"
    done = run("inspect", str(path))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    line = next(line for line in done.stdout.splitlines() if "layers.3.self_attn.v_scale" in line)
    assert line.startswith("model.layers.3.self_attn")
    assert "-of-00022.safetensors" in line
    assert "[" in line


def test_a_table_on_a_narrow_terminal_cuts_nothing_off() -> None:
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    path = CHECKPOINTS / "ct-fp8-kv-tensor"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "72", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "quantattn", "inspect", str(path)],
        cwd=ROOT,
        env=environment,
        stdout=theirs,
    ) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert process.returncode == 0
    assert "model.layers.1.self_attn.v_scale" in shown.decode()
    assert "…" not in shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux says so that the other end is closed
        return b""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("inspect", str(CHECKPOINTS / "llmcompressor-llama-kvfp8asym")), 1),
        (("inspect", str(CHECKPOINTS / "nowhere")), 2),
        (("inspect",), 2),
    ],
)
def test_status(arguments: tuple[str, ...], status: int) -> None:
    done = run(*arguments)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_status_2_and_one_line() -> None:
    command = [sys.executable, "-m", "quantattn", "inspect", str(CHECKPOINTS / "base"), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("quantattn: ")
    assert done.stderr.count("\n") == 1


def test_start_up_imports_neither_triton_nor_models() -> None:
    code = (
        "import sys, quantattn.cli;"
        "heavy = ('triton', 'torch._inductor', 'quantattn.models', 'tokenizers', 'transformers');"
        "sys.exit([name for name in heavy if name in sys.modules] or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
