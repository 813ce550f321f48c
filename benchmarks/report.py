"""What benchmarks of kernels share: timing, the device's copy as the limit, and a report of both.

A report is printed as it grows, saved as JSON, loaded again and drawn. Bytes are those that must
move: each input read once, each output written once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

Run = Callable[[], object]
ROUNDS = 3


@dataclass(frozen=True)
class Speed:
    """Milliseconds for `moved` bytes at one size of a case; None where the peer is absent."""

    case: str
    size: int
    unit: str
    moved: int
    ours: float
    peer: float | None

    def gigabytes(self, milliseconds: float) -> float:
        return self.moved / milliseconds / 1e6


@dataclass(frozen=True)
class Error:
    """Relative L2 errors of what is read back; None where the peer is absent."""

    case: str
    ours: float
    peer: float | None


@dataclass
class Report:
    """Figures of one run on one device; `copy` is that of a large device copy, GB/s."""

    device: str
    torch: str
    peer: str
    copy: float
    speeds: list[Speed] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)

    def add(self, case: str, size: int, unit: str, moved: int, ours: Run, peer: Run | None) -> None:
        times = milliseconds([ours] if peer is None else [ours, peer])
        self.speeds.append(Speed(case, size, unit, moved, times[0], *times[1:] or [None]))
        print(self.line(self.speeds[-1]), flush=True)

    def add_error(self, case: str, ours: float, peer: float | None) -> None:
        self.errors.append(Error(case, ours, peer))
        print(self.error_line(self.errors[-1]), flush=True)

    def head(self) -> str:
        return (
            f"{self.device}, torch {self.torch}, device copy {self.copy:.0f} GB/s\n"
            f"{'':<46} {'ours':>11} {'':>14} {'of copy':>7}   {self.peer}, and its time over ours"
        )

    def line(self, row: Speed) -> str:
        speed = row.gigabytes(row.ours)
        peer = "-" if row.peer is None else f"{row.peer * 1e3:9.1f} us {row.peer / row.ours:6.2f}x"
        title = f"{row.case}, {row.size} {row.unit}"
        ours = f"{row.ours * 1e3:8.1f} us {speed:9.0f} GB/s"
        return f"{title:<46} {ours} {speed / self.copy:8.2f}   {peer}"

    def error_line(self, row: Error) -> str:
        peer = "-" if row.peer is None else f"{row.peer:.4f} {row.peer / row.ours:6.2f}x"
        return f"{row.case + ', relative error':<46} {row.ours:11.4f} {'':>23}   {peer}"

    def text(self) -> str:
        lines = [self.line(row) for row in self.speeds]
        return "\n".join([self.head(), *lines, *map(self.error_line, self.errors)])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        facts = json.loads(path.read_text())
        speeds = [Speed(**row) for row in facts.pop("speeds")]
        errors = [Error(**row) for row in facts.pop("errors")]
        return cls(**facts, speeds=speeds, errors=errors)

    def draw(self, path: Path) -> None:
        """Speed over size for each case, bars for cases of one size and for errors, into a file.

        The file's name says whether it is an SVG, PNG or PDF file.
        """
        from matplotlib.figure import Figure

        cases: dict[str, list[Speed]] = {}
        for row in self.speeds:
            cases.setdefault(row.case, []).append(row)
        single = [rows[0] for rows in cases.values() if len(rows) == 1]
        panels = [partial(self._draw_curve, rows) for rows in cases.values() if len(rows) > 1]
        if single:
            panels.append(partial(self._draw_single, single))
        if self.errors:
            panels.append(self._draw_errors)
        columns, lines = min(len(panels), 3), -(-len(panels) // 3)
        figure = Figure(figsize=(4.6 * columns, 3.6 * lines), layout="constrained")
        for place, draw in enumerate(panels):
            draw(figure.add_subplot(lines, columns, place + 1))
        figure.suptitle(f"{self.device}, torch {self.torch}")
        figure.savefig(path)

    def _draw_curve(self, rows: list[Speed], axis) -> None:
        axis.axhline(self.copy, color="gray", linestyle=":", label="device copy")
        ours = [row.gigabytes(row.ours) for row in rows]
        axis.plot([row.size for row in rows], ours, marker="o", label="quantattn")
        beside = [row for row in rows if row.peer is not None]
        if beside:
            theirs = [row.gigabytes(row.peer) for row in beside]
            axis.plot([row.size for row in beside], theirs, marker="s", label=self.peer)
        axis.set(
            title=rows[0].case, xlabel=rows[0].unit, ylabel="GB/s", xscale="log", ylim=(0, None)
        )
        axis.legend()

    def _draw_single(self, rows: list[Speed], axis) -> None:
        axis.axvline(self.copy, color="gray", linestyle=":", label="device copy")
        ours = [row.gigabytes(row.ours) for row in rows]
        theirs = [row.gigabytes(row.peer) if row.peer else 0.0 for row in rows]
        names = [f"{row.case}, {row.size} {row.unit}" for row in rows]
        self._draw_bars(axis, "GB/s", names, ours, theirs)

    def _draw_errors(self, axis) -> None:
        ours, theirs = [row.ours for row in self.errors], [row.peer or 0.0 for row in self.errors]
        self._draw_bars(axis, "relative error", [row.case for row in self.errors], ours, theirs)

    def _draw_bars(
        self, axis, title: str, names: list[str], ours: list[float], theirs: list[float]
    ) -> None:
        for shift, label, values in ((-0.2, "quantattn", ours), (0.2, self.peer, theirs)):
            places = [place + shift for place in range(len(names))]
            axis.barh(places, values, 0.4, label=label)
        axis.set_yticks(range(len(names)), names)
        axis.set(title=title)
        axis.invert_yaxis()
        axis.legend(loc="lower left")


def milliseconds(runs: list[Run]) -> list[float]:
    """Medians over rounds in which the runs take turns, each timed as a replayed CUDA graph."""
    from triton.testing import do_bench_cudagraph

    for run in runs:
        run()
    torch.cuda.synchronize()
    rounds = [
        [do_bench_cudagraph(run, rep=20, return_mode="median") for run in runs]
        for _ in range(ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def device_copy() -> float:
    """GB/s of a 4 GiB copy, bytes read and written."""
    from triton.testing import do_bench

    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time = do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return 2 * source.numel() / time / 1e6


def run_benchmark(description: str, peer: str, measure: Callable[[Report], None]) -> None:
    """Measure on this machine's GPU, or take up a saved report; then save and draw it as asked."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to save the figures in")
    parser.add_argument("--plot", type=Path, help="SVG, PNG or PDF file to draw them in")
    parser.add_argument("--from-json", type=Path, help="saved figures to print and draw instead")
    chosen = parser.parse_args()
    if chosen.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "--plot needs matplotlib: install quantattn[benchmark], or use --json here and"
            " --from-json with --plot on a machine that has it"
        )
    if chosen.from_json:
        report = Report.load(chosen.from_json)
        print(report.text())
    else:
        if not torch.cuda.is_available():
            parser.error("torch finds no CUDA device to measure; --from-json prints saved figures")
        report = Report(torch.cuda.get_device_name(), torch.__version__, peer, device_copy())
        print(report.head(), flush=True)
        measure(report)
    if chosen.json:
        report.save(chosen.json)
    if chosen.plot:
        report.draw(chosen.plot)
