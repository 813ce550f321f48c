"""The report of the kernels' benchmarks: the figures that it prints, saves and draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Error, Limit, Report, Speed

FIGURES = Report(
    "a GPU",
    "2.11",
    [Limit("device copy", "GB/s", 4000.0), Limit("FP8 product", "TFLOP/s", 1500.0)],
    speeds=[
        Speed("write", 64, "tokens", 6_000_000, "device copy", 0.002, {"vLLM": 0.005, "A": 0.001}),
        Speed("write", 1, "tokens", 6_000, "device copy", 0.0015, {}),
        Speed("prefill", 512, "keys", 9_000_000_000, "FP8 product", 0.012, {"vLLM": 0.018}),
    ],
    errors=[Error("int4 K", 0.08, {"vLLM": 0.1})],
)


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    report.run_benchmark("What is measured.", lambda _: pytest.fail("measured"))


def test_speeds_stand_beside_their_limits_and_the_peers() -> None:
    head, _, *lines = FIGURES.text().splitlines()
    assert head.endswith("device copy 4000 GB/s, FP8 product 1500 TFLOP/s")
    assert [" ".join(line.split()) for line in lines] == [
        "write, 64 tokens 2.0 us 3000 GB/s 0.75 vLLM 2.50x, A 0.50x",
        "write, 1 tokens 1.5 us 4 GB/s 0.00 -",
        "prefill, 512 keys 12.0 us 750 TFLOP/s 0.50 vLLM 1.50x",
        "int4 K, relative error 0.0800 vLLM 1.25x",
    ]


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
