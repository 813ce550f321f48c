"""Turning the fusions on and off, and asking what they did."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from quantattn.errors import FormatError
from quantattn.fusion.patterns import PATTERNS
from quantattn.fusion.report import FusionReport, counted_records
from quantattn.fusion.rewriting import FusionOptions

if TYPE_CHECKING:
    from quantattn.fusion.graph_pass import FusionPass

__all__ = ["Fusion", "enable"]


class Fusion:
    """Fusions that are on, from `enable` until `disable` or the end of a `with` block.

    Attributes:
        options: How they fuse.
        graph_pass: The pass among Inductor's `post_grad_custom_post_pass`; name it beside your own
            where you give that option to `torch.compile(options=...)`.
    """

    def __init__(self, options: FusionOptions, graph_pass: FusionPass) -> None:
        self.options = options
        self.graph_pass = graph_pass
        self._before = counted_records(options.uuid)

    def report(self) -> FusionReport:
        """Say what the graphs compiled since `enable` have fused, and what not and why.

        A graph that torch loads from a cache counts like one that it compiles.

        Example:
            >>> with enable() as fusion:
            ...     print(fusion.report())
            fused 0, missed 0
        """
        now = counted_records(self.options.uuid)
        # Whoever clears torch's counters starts the report anew.
        new = now - self._before if now >= self._before else now
        return FusionReport.of(new.elements())

    def disable(self) -> None:
        """Take the pass out again; graphs that are compiled already stay as they are.

        Example:
            >>> enable().disable()
        """
        from quantattn.fusion.graph_pass import remove_pass

        remove_pass(self.graph_pass)

    def __enter__(self) -> Fusion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disable()
        if self.options.require and error is None and not self.report().fused:
            raise FormatError(
                f"require: nothing was fused until the end of the block; {self.report()}. Compile"
                " the model inside the block, with Inductor; what was compiled before stays as it"
                " is until torch.compiler.reset()"
            )


def enable(
    *, round_through: bool = True, patterns: Sequence[str] = PATTERNS, require: bool = False
) -> Fusion:
    """Add the fusions to torch.compile's own passes, behind those of the user.

    Fused are `attention_quant`: an attention of `quantattn.ops` with the static e4m3 quantization
    of its output, spelled as `static_quant_fp8`, as torchao's operator, or in plain torch: x / s or
    x * s.reciprocal(), clamped to +-448 and converted; for one scale or one a group of columns; and
    `rope_write`: the rotation of queries and keys with `write_kv`, and the quantization of the
    queries, as `rope_write_kv`. Left alone is what is used besides, or is not the same computation.

    Args:
        round_through: Round an attention's output to the model's dtype before quantizing it, for
            the codes of `static_quant_fp8` bit by bit; else quantize it from float32.
        patterns: Which of `patterns.PATTERNS` are tried.
        require: Make it an error if a graph has something to fuse and nothing is, or, at the end of
            a `with` block, if nothing was fused in it.

    Returns:
        The handle that reports and turns off; as a context manager it turns off at the end.

    Raises:
        FormatError: A pattern is unknown. From the compiler: `require`, and nothing was fused.

    Example:
        >>> with enable(round_through=False) as fusion:
        ...     compiled = torch.compile(lambda x: x + 1)
        >>> fusion.report().fused
        ()
    """
    options = FusionOptions(round_through, tuple(patterns), require)
    from quantattn.fusion.graph_pass import FusionPass, add_pass

    fusion = Fusion(options, FusionPass(options))
    add_pass(fusion.graph_pass)
    return fusion
