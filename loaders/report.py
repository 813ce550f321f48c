"""LoadReport: for every layer and role, which value a load gave, and where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from quantattn.errors import Problem
from quantattn.quant_scales import guarded_layers
from quantattn.scales import ROLES, buffer_name

__all__ = [
    "LoadReport",
    "ScaleRow",
    "default_warning",
    "format_value",
    "one_sided_layers",
    "report_scales",
]


@dataclass(frozen=True)
class ScaleRow:
    """One scale of one layer.

    Attributes:
        layer: Path of the attention module.
        role: `q`, `k`, `v` or `prob`.
        value: The number, or one for each KV head.
        source: `checkpoint`, `default`, `calibrated`, `caller` or `buffer`.
        key: The checkpoint's key, where there is one.
        file: The file that the key is in.
        note: What was done to the value on the way, if anything.
    """

    layer: str
    role: str
    value: float | list[float]
    source: str
    key: str | None = None
    file: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """What a load did; `print` it as a table, or take `to_json()`.

    Attributes:
        rows: For every layer and role its value, source, key and file.
        problems: What was wrong and is now at its default, because the caller asked for that.
        ignored: Scale keys that were left aside, and why: no such layer, another's cache, a cache
            of another format than the scales are declared for.
        missing: Parameters and buffers of the model that the checkpoint does not hold.
        unexpected: Keys of the checkpoint that the model has no place for.
        warnings: What a user should know: layers that run an FP8 cache at the default 1.0, layers
            with only one of k and v, files that the index does not list.
    """

    rows: tuple[ScaleRow, ...]
    problems: tuple[Problem, ...] = ()
    ignored: tuple[Problem, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def loaded(self) -> tuple[ScaleRow, ...]:
        """The rows that came from a checkpoint."""
        return tuple(row for row in self.rows if row.source == "checkpoint")

    @property
    def defaulted(self) -> tuple[ScaleRow, ...]:
        """The rows at the default 1.0."""
        return tuple(row for row in self.rows if row.source == "default")

    @property
    def one_sided(self) -> tuple[str, ...]:
        """Layers with a k scale and no v scale, or the reverse."""
        return one_sided_layers(self.rows)

    def to_json(self) -> str:
        """The whole report as a JSON object.

        Example:
            >>> import json
            >>> list(json.loads(LoadReport(rows=()).to_json()))
            ['rows', 'problems', 'ignored', 'missing', 'unexpected', 'warnings']
        """
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = [_format_rows(self.rows)]
        for title, problems in (("problem", self.problems), ("ignored", self.ignored)):
            lines += [f"{title}: {problem}" for problem in problems]
        lines += [f"warning: {warning}" for warning in self.warnings]
        for title, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                lines.append(f"{title}: {len(names)} ({shown})")
        return "\n".join(lines)


def report_scales(model: nn.Module) -> tuple[ScaleRow, ...]:
    """The rows of a model as it stands: every guarded layer, every role.

    Example:
        >>> layer = QuantAttention(4, 32)
        >>> layer.set_scale("k", 0.5)
        >>> [(row.role, row.value, row.source) for row in report_scales(layer)][:2]
        [('q', 1.0, 'default'), ('k', 0.5, 'caller')]
    """
    rows = []
    for path, layer in guarded_layers(model).items():
        sources = layer.scale_sources
        for role in ROLES:
            record = sources[role]
            note = record.note
            if role in ("k", "v") and layer.kv_sharing_target is not None:
                note = f"of {layer.kv_sharing_target.layer_name!r}, whose cache it shares"
            rows.append(
                ScaleRow(
                    path, role, record.value, record.source.value, record.key, record.file, note
                )
            )
    return tuple(rows)


def one_sided_layers(rows: Iterable[ScaleRow]) -> tuple[str, ...]:
    """Layers of which exactly one of k and v came from somewhere."""
    given: dict[str, set[str]] = {}
    for row in rows:
        if row.role in ("k", "v"):
            given.setdefault(row.layer, set())
            if row.source != "default":
                given[row.layer].add(row.role)
    return tuple(layer for layer, roles in given.items() if len(roles) == 1)


def default_warning(model: nn.Module) -> str | None:
    """One sentence that names the layers which run an e4m3 cache at the default 1.0."""
    layers = guarded_layers(model)
    at_default: dict[str, list[str]] = {}
    for path, layer in layers.items():
        if layer.cache_format.expects_scales:
            for role in ("k", "v"):
                if role in layer.scale_roles and layer.scale_sources[role].source == "default":
                    at_default.setdefault(path or layer.layer_name, []).append(buffer_name(role))
    if not at_default:
        return None
    if len(at_default) == len(layers) and all(len(names) == 2 for names in at_default.values()):
        return "no k_scale or v_scale was given: every layer's FP8 cache uses 1.0"
    named = "; ".join(f"{path} ({', '.join(names)})" for path, names in at_default.items())
    return f"no scale was given for some layers, whose FP8 cache uses 1.0: {named}"


def _format_rows(rows: Sequence[ScaleRow]) -> str:
    """Rows as a plain text table."""
    cells = [("layer", "role", "value", "source", "key", "file", "note")]
    cells += [
        (r.layer, r.role, format_value(r.value), r.source, r.key or "", r.file or "", r.note or "")
        for r in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def format_value(value: Any) -> str:
    """A scale for people: six significant digits, a list in brackets."""
    if isinstance(value, list):
        return "[" + ", ".join(f"{number:.6g}" for number in value) + "]"
    return f"{value:.6g}"
