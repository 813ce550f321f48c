"""Progress is shown on a terminal and nowhere else."""

from __future__ import annotations

import io

import pytest

from quantattn.loaders.progress import with_progress


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_every_key_passes_and_only_a_terminal_sees_a_bar(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = stream()
    monkeypatch.setattr("sys.stderr", error)
    monkeypatch.setenv("TERM", "xterm")
    keys = ["a", "b", "c"]
    assert list(with_progress(keys, [1, 2_000_000, 3], "loading demo")) == keys
    assert ("loading demo" in error.getvalue()) is (stream is Terminal)
