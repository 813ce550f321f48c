"""What is fused, as data: which operators attend, which quantize, how arguments are named."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QuantOp"]

ATTENTION_QUANT = "attention_quant"
"""Attention, then the static e4m3 quantization of its output: the attention quantizes."""
ROPE_WRITE = "rope_write"
"""Rotation of queries and keys, then their write (and the queries' quantization): one operation."""
PATTERNS = (ATTENTION_QUANT, ROPE_WRITE)

ATTENTION_OPS = (
    "quantattn::mla_attention",
    "quantattn::paged_attention",
    "quantattn::varlen_attention",
)
"""Operators that give (output, LSE) and take `out_scale` and `round_through`."""


@dataclass(frozen=True)
class QuantOp:
    """Names of the arguments of an operator that quantizes with a given scale.

    Attributes:
        input: What is quantized.
        scale: Its dequantizing multiplier: of one number, of one a group of columns (`[groups]` or
            `[1, groups]`).
        cuts_last_axis: Whether groups are those of the last axis, and not of all but the first.
    """

    input: str
    scale: str
    cuts_last_axis: bool


QUANT_OPS = {
    "quantattn::static_quant_fp8": QuantOp("input", "scale", cuts_last_axis=False),
    "torchao::quantize_affine_float8_non_decomposed": QuantOp(
        "tensor", "scale", cuts_last_axis=True
    ),
}
