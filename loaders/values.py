"""From a stored tensor to float32 dequantizing multipliers, or to the reason why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantattn.errors import Problem, ScaleError
from quantattn.formats import FP8_E4M3_MAX, FP8_E5M2_MAX
from quantattn.loaders.names import ScaleKind, ScaleName
from quantattn.scales import as_float32, invalid_reason

__all__ = ["ReadContext", "ScaleValue", "read_values"]

ScaleValue = float | list[float]

# Largest number of each format; an amax divided by it is the multiplier. NVFP4's outer scale spans
# e4m3 block scales times e2m1 codes, 448 * 6.
_QMAX = {
    "fp8": FP8_E4M3_MAX,
    "fp8_e4m3": FP8_E4M3_MAX,
    "fp8_e5m2": FP8_E5M2_MAX,
    "int8": 127.0,
    "int4": 7.0,
    "nvfp4": 2688.0,
}
_MOST_HEADS = 4096
"""Longest vector that is read where the model's head count is unknown."""
_MEANINGS = {
    "cache_scale_means": ("scale", "amax"),
    "global_scale_means": ("multiplier", "reciprocal"),
}
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Code and message of a fault, before the key's name is put in front.
_Fault = tuple[str, str]


@dataclass(frozen=True)
class ReadContext:
    """What the reading of a key depends on beside its name.

    Attributes:
        kv: Declared format of the KV cache (`fp8_e4m3` or `fp8`, `int8`, `nvfp4`, ...); None: the
            checkpoint declares none.
        method: The config's quantization method; None: none.
        num_layers: Decoder layers; an index from here on is a draft layer's. None: unknown.
        num_heads: Query heads; None: unknown, so that no head count is refused.
        num_kv_heads: KV heads; None: unknown.
        head_dim: Elements a head; None: unknown.
        is_mla: Whether the model caches one latent for K and V.
        shared_layers: Decoder layers that read another layer's cache.
        attention_layers: Decoder layers with attention, where a hybrid model's config says which;
            None: all may have it.
        cache_scale_means: `scale` or `amax` for names like `k_cache.scale`; None: refused.
        global_scale_means: `multiplier` or `reciprocal` (448 * 6 / amax) for NVFP4's outer scale;
            None: refused.
        linear_outputs_quantized: Whether the config says that outputs of Linears are quantized.
        accept_runtime_buffers: Read an engine's saved buffers (`_k_scale`) as multipliers, on the
            caller's word that no platform's factor is inside; otherwise they are refused.

    Raises:
        ScaleError: `cache_scale_means` or `global_scale_means` is another word.
    """

    kv: str | None = None
    method: str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_mla: bool = False
    shared_layers: frozenset[int] = frozenset()
    attention_layers: frozenset[int] | None = None
    cache_scale_means: str | None = None
    global_scale_means: str | None = None
    linear_outputs_quantized: bool = False
    accept_runtime_buffers: bool = False

    def __post_init__(self) -> None:
        for argument, words in _MEANINGS.items():
            word = getattr(self, argument)
            if word is not None and word not in words:
                raise ScaleError(f"{argument}: got {word!r}, expected {' or '.join(words)}")

    def head_counts(self, role: str) -> tuple[int, ...] | None:
        """Lengths that a vector of a role's scales may have; None where the model is unknown.

        A query's scales come for each query head, or reduced to KV heads as quantattn saves them.
        """
        if role == "prob":
            return ()
        counts = (self.num_heads, self.num_kv_heads) if role == "q" else (self.num_kv_heads,)
        known = tuple(count for count in counts if count is not None)
        return known or None


def read_values(
    name: ScaleName, tensor: Tensor, context: ReadContext
) -> dict[str, ScaleValue] | Problem:
    """Read a tensor as multipliers of the name's roles.

    The arithmetic is float64, rounded once to float32; bfloat16 and float16 are widened exactly.

    Args:
        name: A name whose kind is a number: a multiplier, reciprocal, amax, cache or global scale.
        tensor: float32, bfloat16, float16 or float64; one number, or one for each head along the
            only dimension longer than one.
        context: Supplies head counts, the format's maximum and what ambiguous names mean.

    Returns:
        Role to value, or the first problem found.

    Example:
        >>> from quantattn.loaders.names import parse_name
        >>> name = parse_name("model.layers.0.self_attn.k_bmm_quantizer._amax")
        >>> read_values(name, torch.tensor(224.0), ReadContext(kv="fp8_e4m3"))
        {'k': 0.5}
    """
    fault = _reading_fault(name.kind, context) or _tensor_fault(name, tensor, context)
    if fault is not None:
        return _problem(name, fault)
    stored = tensor.detach().to(device="cpu", dtype=torch.float64).flatten().tolist()
    fault = _sign_fault(stored)
    if fault is not None:
        return _problem(name, fault)
    numbers = [_multiplier(number, name.kind, context) for number in stored]
    if context.is_mla and "q" not in name.roles and len(set(numbers)) == 1:
        numbers = numbers[:1]
    fault = _sign_fault(numbers) or _range_fault(numbers) or _latent_fault(name, numbers, context)
    if fault is not None:
        return _problem(name, fault)
    multipliers = [as_float32(number) for number in numbers]
    value: ScaleValue = multipliers[0] if len(multipliers) == 1 else multipliers
    return dict.fromkeys(name.roles, value)


def _reading_fault(kind: ScaleKind, context: ReadContext) -> _Fault | None:
    if kind is ScaleKind.CACHE_SCALE and context.cache_scale_means is None:
        reason = (
            "a multiplier in some files and an amax in others;"
            ' say cache_scale_means="scale" or "amax"'
        )
        return "ambiguous_cache_scale", reason
    if kind is ScaleKind.GLOBAL_SCALE and context.kv != "nvfp4":
        reason = f"NVFP4's outer scale, but the declared KV format is {context.kv}"
        return "global_scale_without_nvfp4", reason
    if kind is ScaleKind.GLOBAL_SCALE and context.global_scale_means is None:
        reason = (
            "a multiplier from some producers, its reciprocal from others;"
            ' say global_scale_means="multiplier" or "reciprocal"'
        )
        return "ambiguous_global_scale", reason
    if _is_amax(kind, context) and context.kv not in _QMAX:
        reason = f"an amax, but the maximum of KV format {context.kv!r} is not known"
        return "unsupported_scheme", reason
    return None


def _is_amax(kind: ScaleKind, context: ReadContext) -> bool:
    if kind is ScaleKind.CACHE_SCALE:
        return context.cache_scale_means == "amax"
    return kind in (ScaleKind.AMAX, ScaleKind.MLA_AMAX)


def _multiplier(number: float, kind: ScaleKind, context: ReadContext) -> float:
    if _is_amax(kind, context):
        return number / _QMAX[context.kv or ""]
    is_inverse = kind is ScaleKind.GLOBAL_SCALE and context.global_scale_means == "reciprocal"
    return 1.0 / number if is_inverse or kind is ScaleKind.RECIPROCAL else number


def _tensor_fault(name: ScaleName, tensor: Tensor, context: ReadContext) -> _Fault | None:
    if tensor.dtype not in _SCALE_DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return "dtype", f"got {dtype}, expected float32, bfloat16, float16 or float64"
    faults = (_shape_fault(tuple(tensor.shape), role, context) for role in name.roles)
    fault = next((fault for fault in faults if fault is not None), None)
    if fault is None and tensor.device.type == "meta":
        return "dtype", "got a tensor on the meta device, which has no value"
    return fault


def _shape_fault(shape: tuple[int, ...], role: str, context: ReadContext) -> _Fault | None:
    size = math.prod(shape)
    lengths = [length for length in shape if length != 1]
    counts = context.head_counts(role)
    fits = size in counts if counts is not None else 0 < size <= _MOST_HEADS
    if size == 1 or (len(lengths) == 1 and fits):
        return None
    got = f"got shape {list(shape)}"
    if context.head_dim is not None and size in [n * context.head_dim for n in counts or ()]:
        return "per_channel", f"{got}, one scale a channel; expected one a tensor or a head"
    heads = "heads" if counts is None else " or ".join(str(count) for count in counts)
    wanted = f"expected one number or a vector of {heads}" if heads else "expected one number"
    return "granularity" if len(lengths) == 1 and size else "shape", f"{got}, {wanted}"


def _sign_fault(numbers: Sequence[float]) -> _Fault | None:
    for code, is_bad in (
        ("nonfinite", lambda number: not math.isfinite(number)),
        ("nonpositive", lambda number: number <= 0.0),
    ):
        bad = next((number for number in numbers if is_bad(number)), None)
        if bad is not None:
            return code, f"got {bad!r}, expected a finite number above zero; calibrate again"
    return None


def _range_fault(numbers: Sequence[float]) -> _Fault | None:
    for number in numbers:
        reason = invalid_reason(number)
        if reason is not None:
            return "nonfinite", f"the multiplier is {number!r}, but {reason}; calibrate again"
    return None


def _latent_fault(name: ScaleName, numbers: Sequence[float], context: ReadContext) -> _Fault | None:
    if not context.is_mla or "q" in name.roles or len(numbers) == 1:
        return None
    return "granularity", f"got {len(numbers)} different scales, but an MLA latent has only one"


def _problem(name: ScaleName, fault: _Fault) -> Problem:
    code, reason = fault
    return Problem(code, name.key, None, f"{name.key}: {reason}")
