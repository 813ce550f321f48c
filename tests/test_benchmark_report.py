"""The report of the kernels' benchmarks: the figures that it prints, saves and draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Error, Report, Speed

FIGURES = Report(
    "a GPU",
    "2.11",
    "vLLM",
    copy=4000.0,
    speeds=[
        Speed("write", 64, "tokens", moved=6_000_000, ours=0.002, peer=0.005),
        Speed("write", 1, "tokens", moved=6_000, ours=0.0015, peer=None),
    ],
    errors=[Error("int4 K", 0.08, 0.1)],
)


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    report.run_benchmark("What is measured.", "vLLM", lambda _: pytest.fail("measured"))


def test_speeds_stand_beside_the_copy_and_the_peer() -> None:
    _, _, first, second, error = FIGURES.text().splitlines()
    assert first.split() == [
        "write,",
        "64",
        "tokens",
        "2.0",
        "us",
        "3000",
        "GB/s",
        "0.75",
        "5.0",
        "us",
        "2.50x",
    ]
    assert second.split() == ["write,", "1", "tokens", "1.5", "us", "4", "GB/s", "0.00", "-"]
    assert error.split() == ["int4", "K,", "relative", "error", "0.0800", "0.1000", "1.25x"]


def test_saved_figures_are_printed_as_they_were(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "figures.json"
    FIGURES.save(file)
    assert Report.load(file) == FIGURES
    run(monkeypatch, "--from-json", str(file))
    assert capsys.readouterr().out == FIGURES.text() + "\n"


def test_a_drawing_without_matplotlib_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--plot", "figures.svg")
    assert "install quantattn[benchmark], or use --json" in capsys.readouterr().err


def test_figures_are_drawn(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    FIGURES.save(tmp_path / "figures.json")
    file = tmp_path / "figures.svg"
    run(monkeypatch, "--from-json", str(tmp_path / "figures.json"), "--plot", str(file))
    assert "<svg" in file.read_text()
