"""What was fused and what was not, and where that is kept: beside the compiled graph.

torch keeps with each graph in its caches by how much compiling it raised the counters of Inductor,
and raises them again when the graph is loaded. Records that are counted there are therefore the
same whether a graph was compiled or came from a cache, where no pass runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FusionRecord", "FusionReport", "counted_records", "record"]


@dataclass(frozen=True)
class FusionRecord:
    """What became of one operation of a compiled graph.

    Attributes:
        pattern: Which fusion: one of `quantattn.fusion.patterns.PATTERNS`.
        node: The operation's name in its graph.
        reason: Why it is not fused; None: it is.
    """

    pattern: str
    node: str
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is None:
            return f"{self.pattern}: {self.node} fused"
        return f"{self.pattern}: {self.node} not fused, {self.reason}"


@dataclass(frozen=True)
class FusionReport:
    """What the graphs that were compiled, or loaded from a cache, have fused.

    Attributes:
        fused: A record for each operation that was fused.
        missed: A record for each that was not, with the reason.
    """

    fused: tuple[FusionRecord, ...] = ()
    missed: tuple[FusionRecord, ...] = ()

    @classmethod
    def of(cls, records: Iterable[FusionRecord]) -> FusionReport:
        """Sort records into a report."""
        entries = sorted(records, key=str)
        return cls(
            fused=tuple(entry for entry in entries if entry.reason is None),
            missed=tuple(entry for entry in entries if entry.reason is not None),
        )

    def __str__(self) -> str:
        lines = [f"fused {len(self.fused)}, missed {len(self.missed)}"]
        return "\n  ".join([*lines, *map(str, self.fused + self.missed)])


def record(uuid: str, entry: FusionRecord) -> None:
    """Count a record of the pass `uuid`, so that caches keep it with the graph."""
    from torch._dynamo.utils import counters

    fields = [entry.pattern, entry.node, entry.reason]
    counters["inductor"][_prefix(uuid) + json.dumps(fields)] += 1


def counted_records(uuid: str) -> Counter[FusionRecord]:
    """Records of the pass `uuid` that this process has counted until now."""
    from torch._dynamo.utils import counters

    prefix = _prefix(uuid)
    return Counter(
        {
            FusionRecord(*json.loads(key[len(prefix) :])): count
            for key, count in counters["inductor"].items()
            if isinstance(key, str) and key.startswith(prefix)
        }
    )


def _prefix(uuid: str) -> str:
    return f"quantattn.fusion {uuid[:16]} "
