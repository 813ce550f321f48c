"""What benchmarks of kernels share: timing, limits measured in the same run, a report of both.

A report is printed as it grows, saved as JSON, loaded again and drawn. Bytes are those that must
move: each input read once, each output written once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

Run = Callable[[], object]
ROUNDS = 3
REPLAYED = 10
"""Milliseconds that a graph takes, which is replayed ten times a round."""
COPY = "device copy"
GIGABYTES = "GB/s"
TERAFLOPS = "TFLOP/s"
TOKENS = "tokens/s"
FEWEST_POINTS = 3
"""Sizes of a case that make a curve; others are bars."""
UNITS = {GIGABYTES: 1e6, TERAFLOPS: 1e9, TOKENS: 1e-3}
"""Bytes, operations or tokens a millisecond."""


@dataclass(frozen=True)
class Limit:
    """What the device does at best, in a unit of `UNITS`."""

    name: str
    unit: str
    rate: float


@dataclass(frozen=True)
class Speed:
    """Milliseconds for `work`, bytes or operations, at one size of a case; peers by name."""

    case: str
    size: int
    unit: str
    work: int
    limit: str
    ours: float
    peers: dict[str, float]


@dataclass(frozen=True)
class Error:
    """Relative L2 errors of what is read back; peers by name."""

    case: str
    ours: float
    peers: dict[str, float]


@dataclass
class Report:
    """Figures of one run on one device, beside the limits that were measured in it."""

    device: str
    torch: str
    limits: list[Limit]
    speeds: list[Speed] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)

    def add(
        self,
        case: str,
        size: int,
        unit: str,
        work: int,
        ours: Run,
        peers: Mapping[str, Run | None],
        *,
        limit: str = COPY,
        repeats: int = 1,
    ) -> None:
        """Time ours and the peers that are there; each run does the work `repeats` times."""
        present = {name: run for name, run in peers.items() if run is not None}
        times = [time / repeats for time in milliseconds([ours, *present.values()])]
        beside = dict(zip(present, times[1:], strict=True))
        self.speeds.append(Speed(case, size, unit, work, limit, times[0], beside))
        print(self.line(self.speeds[-1]), flush=True)

    def add_error(self, case: str, ours: float, peers: Mapping[str, float | None]) -> None:
        present = {name: error for name, error in peers.items() if error is not None}
        self.errors.append(Error(case, ours, present))
        print(self.error_line(self.errors[-1]), flush=True)

    def limit(self, row: Speed) -> Limit:
        return next(limit for limit in self.limits if limit.name == row.limit)

    def rate(self, row: Speed, milliseconds: float) -> float:
        return row.work / milliseconds / UNITS[self.limit(row).unit]

    def head(self) -> str:
        limits = "".join(f", {x.name} {x.rate:.0f} {x.unit}" for x in self.limits)
        return (
            f"{self.device}, torch {self.torch}{limits}\n"
            f"{'':<58} {'ours':>11} {'':>15} {'of limit':>8}   peers' time over ours"
        )

    def line(self, row: Speed) -> str:
        limit, rate = self.limit(row), self.rate(row, row.ours)
        title = f"{row.case}, {row.size} {row.unit}"
        ours = f"{row.ours * 1e3:8.1f} us {rate:7.0f} {limit.unit:<7}"
        return f"{title:<58} {ours} {rate / limit.rate:8.2f}   {_ratios(row)}"

    def error_line(self, row: Error) -> str:
        return f"{row.case + ', relative error':<58} {row.ours:11.4f} {'':>24}   {_ratios(row)}"

    def text(self) -> str:
        lines = [self.line(row) for row in self.speeds]
        return "\n".join([self.head(), *lines, *map(self.error_line, self.errors)])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        facts = json.loads(path.read_text())
        lists = {"limits": Limit, "speeds": Speed, "errors": Error}
        rows = {name: [kind(**row) for row in facts.pop(name)] for name, kind in lists.items()}
        return cls(**facts, **rows)

    def draw(self, path: Path) -> None:
        """Rate over size for each case, bars for cases of few sizes and for errors, into a file.

        The file's name says whether it is an SVG, PNG or PDF file.
        """
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        curves: dict[str, list[Speed]] = {}
        for row in self.speeds:
            curves.setdefault(row.case, []).append(row)
        few = [row for rows in curves.values() if len(rows) < FEWEST_POINTS for row in rows]
        curves = {case: rows for case, rows in curves.items() if len(rows) >= FEWEST_POINTS}
        bars = [partial(self._draw_single, rows) for rows in _by_limit(few)]
        lengths = [len(rows) for rows in _by_limit(few)]
        if self.errors:
            bars.append(self._draw_errors)
            lengths.append(len(self.errors))
        lines = -(-len(curves) // 3)
        heights = [3.6] * lines + [1.0 + 0.3 * length for length in lengths]
        figure = Figure(figsize=(13.8, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
        for place, rows in enumerate(curves.values()):
            self._draw_curve(rows, figure.add_subplot(grid[place // 3, place % 3]))
        for line, draw in enumerate(bars, lines):
            draw(figure.add_subplot(grid[line, :]))
        figure.suptitle(f"{self.device}, torch {self.torch}")
        with rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(path)

    def _draw_curve(self, rows: list[Speed], axis) -> None:
        limit = self.limit(rows[0])
        axis.axhline(limit.rate, color="gray", linestyle=":", label=limit.name)
        ours = [self.rate(row, row.ours) for row in rows]
        axis.plot([row.size for row in rows], ours, marker="o", label="quantattn")
        for peer in _peers(rows):
            beside = [row for row in rows if peer in row.peers]
            theirs = [self.rate(row, row.peers[peer]) for row in beside]
            axis.plot([row.size for row in beside], theirs, marker="s", label=peer)
        axis.set(
            title=rows[0].case, xlabel=rows[0].unit, ylabel=limit.unit, xscale="log", ylim=(0, None)
        )
        axis.legend()

    def _draw_single(self, rows: list[Speed], axis) -> None:
        limit = self.limit(rows[0])
        axis.axvline(limit.rate, color="gray", linestyle=":", label=limit.name)
        values = {"quantattn": [self.rate(row, row.ours) for row in rows]}
        for peer in _peers(rows):
            times = [row.peers.get(peer) for row in rows]
            values[peer] = [
                self.rate(row, time) if time else 0.0 for row, time in zip(rows, times, strict=True)
            ]
        _draw_bars(axis, limit.unit, [f"{row.case}, {row.size} {row.unit}" for row in rows], values)

    def _draw_errors(self, axis) -> None:
        values = {"quantattn": [row.ours for row in self.errors]}
        for peer in _peers(self.errors):
            values[peer] = [row.peers.get(peer, 0.0) for row in self.errors]
        _draw_bars(axis, "relative error", [row.case for row in self.errors], values)


def _by_limit(rows: list[Speed]) -> list[list[Speed]]:
    limits = dict.fromkeys(row.limit for row in rows)
    return [[row for row in rows if row.limit == limit] for limit in limits]


def _ratios(row: Speed | Error) -> str:
    return ", ".join(f"{peer} {value / row.ours:.2f}x" for peer, value in row.peers.items()) or "-"


def _peers(rows: list[Speed] | list[Error]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in row.peers))


def _draw_bars(axis, title: str, names: list[str], values: dict[str, list[float]]) -> None:
    height = 0.8 / len(values)
    for number, (label, numbers) in enumerate(values.items()):
        shift = (number - (len(values) - 1) / 2) * height
        axis.barh([place + shift for place in range(len(names))], numbers, height, label=label)
    axis.set_yticks(range(len(names)), names)
    axis.set(title=title)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def milliseconds(runs: list[Run]) -> list[float]:
    """Medians over rounds in which the runs take turns, each timed as a replayed CUDA graph."""
    from triton.testing import do_bench_cudagraph

    for run in runs:
        run()
    torch.cuda.synchronize()
    rounds = [
        [do_bench_cudagraph(run, rep=REPLAYED, return_mode="median") for run in runs]
        for _ in range(ROUNDS)
    ]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def device_copy() -> Limit:
    """A copy of 4 GiB, bytes read and written."""
    from triton.testing import do_bench

    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    time = do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return Limit(COPY, GIGABYTES, 2 * source.numel() / time / UNITS[GIGABYTES])


def product(name: str, dtype: torch.dtype) -> Limit:
    """A product of matrices of 8192 columns and rows, of FP8 or of a model's dtype."""
    from triton.testing import do_bench

    size = 8192
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16).to(dtype)
    if dtype.itemsize == 1:
        one = torch.ones((), device="cuda")
        run = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    else:
        run = partial(torch.mm, a, b.t())
    time = do_bench(run, warmup=20, rep=100, return_mode="median")
    return Limit(name, TERAFLOPS, 2 * size**3 / time / UNITS[TERAFLOPS])


def run_benchmark(
    description: str,
    measure: Callable[[Report], None],
    limits: Callable[[], list[Limit]] = lambda: [device_copy()],
) -> None:
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
        report = Report(torch.cuda.get_device_name(), torch.__version__, limits())
        print(report.head(), flush=True)
        measure(report)
    if chosen.json:
        report.save(chosen.json)
    if chosen.plot:
        report.draw(chosen.plot)
