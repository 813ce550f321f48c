"""All fusions of one graph: what a pass with given options does to it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.fx import Graph, Node

from quantattn.errors import FormatError
from quantattn.fusion.attention_quant import attention_nodes, fuse_attention_quant
from quantattn.fusion.patterns import ATTENTION_QUANT, PATTERNS, ROPE_WRITE
from quantattn.fusion.report import FusionRecord
from quantattn.fusion.rope_write import fuse_rope_write, write_nodes
from quantattn.fusion.static_quant import NotFusedError

__all__ = ["FusionOptions", "fuse"]


@dataclass(frozen=True)
class FusionOptions:
    """How a pass fuses.

    Attributes:
        round_through: Round the attention's output to the model's dtype before quantizing it, as
            the graph did; else it is quantized from float32.
        patterns: Which fusions are tried: any of `quantattn.fusion.patterns.PATTERNS`.
        require: Raise where a graph has something to fuse and nothing is.
    """

    round_through: bool = True
    patterns: tuple[str, ...] = PATTERNS
    require: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.patterns if name not in PATTERNS]
        if unknown or not self.patterns:
            raise FormatError(f"patterns: got {self.patterns}, expected some of {PATTERNS}")

    @property
    def uuid(self) -> str:
        """A name for what a pass with these options does: it changes with them and the source."""
        return hashlib.sha256(f"{_source_digest()} {asdict(self)}".encode()).hexdigest()


def fuse(graph: Graph, options: FusionOptions) -> list[FusionRecord]:
    """Fuse what the options name, in place, and say what became of each candidate.

    Args:
        graph: A functional graph of ATen operators, as Inductor's post-grad passes see it.
        options: How.

    Raises:
        FormatError: `options.require`, and there were candidates of which none was fused.

    Example:
        >>> fuse(torch.fx.Graph(), FusionOptions())
        []
    """
    records = list(_fused(graph, options))
    if options.require and records and all(entry.reason for entry in records):
        reasons = "; ".join(map(str, records))
        raise FormatError(
            f"require: nothing was fused in a graph that has operations to fuse: {reasons}. Change"
            " the model so that they can be, or compile it without require"
        )
    return records


def _fused(graph: Graph, options: FusionOptions) -> Iterator[FusionRecord]:
    attend = functools.partial(fuse_attention_quant, round_through=options.round_through)
    steps: dict[str, tuple[Callable[[Graph], list[Node]], Callable[[Node], None]]] = {
        ROPE_WRITE: (write_nodes, functools.partial(fuse_rope_write, tables={})),
        ATTENTION_QUANT: (attention_nodes, attend),
    }
    for pattern in options.patterns:
        candidates, rewrite = steps[pattern]
        for node in candidates(graph):
            name = node.name
            try:
                rewrite(node)
            except NotFusedError as error:
                yield FusionRecord(pattern, name, str(error))
            else:
                yield FusionRecord(pattern, name)


@functools.cache
def _source_digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
