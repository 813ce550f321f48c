"""What a scale is: its roles, its valid values, its shape, and where a value came from.

A scale is the float32 multiplier that dequantizes, `x ~ q * scale`; quantizing divides by it. A
range is the constant that turns an observed amax into a scale, `scale = amax / range`. Everything
here is host arithmetic on plain numbers; `scale_buffers.py` keeps the buffers.
"""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from quantattn.errors import ScaleError
from quantattn.formats import FP8_E4M3_MAX

__all__ = [
    "DEFAULT_RANGES",
    "DEFAULT_SCALE",
    "ROLES",
    "RecordedScale",
    "ScaleGranularity",
    "ScaleShape",
    "ScaleSource",
    "as_float32",
    "buffer_name",
    "checked_range",
    "fit_scale",
    "invalid_reason",
    "raw_values",
]

ROLES = ("q", "k", "v", "prob")
DEFAULT_SCALE = 1.0
DEFAULT_RANGES = {"q": 200.0, "k": 200.0, "v": 100.0}

SMALLEST = 2.0**-126
"""Smallest normal float32."""
LARGEST = 3.4028234663852886e38 / FP8_E4M3_MAX
"""Largest scale whose product with e4m3's maximum is still a finite float32."""

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class ScaleGranularity(Enum):
    """How many numbers a scale has: one a layer, or one a KV head."""

    TENSOR = "tensor"
    HEAD = "head"


class ScaleSource(str, Enum):
    """Where a layer's scale came from."""

    DEFAULT = "default"
    CHECKPOINT = "checkpoint"
    CALIBRATED = "calibrated"
    CALLER = "caller"
    BUFFER = "buffer"
    """Taken over from a buffer that someone else wrote, by `accept_buffers()`."""


@dataclass(frozen=True)
class RecordedScale:
    """What was last loaded or set for one role of one layer.

    Attributes:
        values: One float32 value, or one for each KV head.
        source: Where they came from.
        key: The checkpoint's key, where there is one.
        file: The file that the key is in, relative to the checkpoint.
        note: What was done to the values on the way (a reduction, a maximum), if anything.
    """

    values: tuple[float, ...] = (DEFAULT_SCALE,)
    source: ScaleSource = ScaleSource.DEFAULT
    key: str | None = None
    file: str | None = None
    note: str | None = None

    @property
    def value(self) -> float | list[float]:
        """The single value, or the list of values by KV head."""
        return self.values[0] if len(self.values) == 1 else list(self.values)


@dataclass(frozen=True)
class ScaleShape:
    """The head counts and the granularity that decide the shape of a layer's scales."""

    num_heads: int
    num_kv_heads: int
    granularity: ScaleGranularity = ScaleGranularity.TENSOR

    def of(self, role: str) -> tuple[int, ...]:
        """Shape of a role's buffer: `[]`, or `[num_kv_heads]`; prob is always `[]`."""
        if self.granularity is ScaleGranularity.TENSOR or role == "prob":
            return ()
        return (self.num_kv_heads,)


def buffer_name(role: str) -> str:
    """Name of the buffer that holds a role's scale: `k` -> `k_scale`."""
    return f"{role}_scale"


def as_float32(value: float) -> float:
    """Round to float32; infinite where the value is beyond it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def invalid_reason(value: float) -> str | None:
    """Say why a number cannot be a scale; None when it can.

    Valid is a normal float32 above zero, small enough that 448 times it is finite.

    Example:
        >>> invalid_reason(0.0)
        'it is not above zero'
        >>> invalid_reason(0.0123) is None
        True
    """
    if not math.isfinite(value):
        return "it is not finite"
    if value <= 0.0:
        return "it is not above zero"
    if as_float32(value) < SMALLEST:
        return "it is below the smallest normal float32"
    if value > LARGEST:
        return "448 times it is beyond float32"
    return None


def raw_values(value: object, *, what: str = "value") -> tuple[list[float], tuple[int, ...]]:
    """Read a number, a sequence of numbers or a floating tensor as host numbers and a shape.

    Args:
        value: float or int (not bool), a flat sequence of them, or a float32, float64, float16 or
            bfloat16 tensor; a tensor on a device is read with one synchronisation.
        what: How messages call the value.

    Raises:
        ScaleError: It is none of these (a bool, a string, an FP8 or integer tensor, no number).

    Example:
        >>> raw_values([0.5, 0.25])
        ([0.5, 0.25], (2,))
    """
    if isinstance(value, Tensor):
        if value.dtype not in _SCALE_DTYPES:
            raise ScaleError(
                f"{what}: got a {value.dtype} tensor, expected float32, float64, float16 or"
                " bfloat16",
                value=value,
            )
        if value.device.type == "meta":
            raise ScaleError(f"{what}: got a tensor on the meta device, which has no value")
        if value.numel() == 0:
            raise ScaleError(f"{what}: got an empty tensor, expected a number", value=value)
        flat = value.detach().to(device="cpu", dtype=torch.float64).flatten().tolist()
        return flat, tuple(value.shape)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return [_as_float(value)], ()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and value:
        parts = [raw_values(item, what=what) for item in value]
        if all(len(part) == 1 for part, _ in parts):
            return [part[0] for part, _ in parts], (len(parts),)
    raise ScaleError(
        f"{what}: got {value!r}, expected a positive number, a list of them or a floating tensor",
        value=value,
    )


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def fit_scale(
    role: str,
    value: object,
    shape: ScaleShape,
    *,
    layer: str = "",
    source: ScaleSource = ScaleSource.CALLER,
    key: str | None = None,
    file: str | None = None,
    note: str | None = None,
) -> RecordedScale:
    """Check a value for one role of a layer and bring it into the layer's shape; writes nothing.

    A scalar serves every KV head. A q scale with one number for each query head is reduced to KV
    heads by the maximum of each group, and the record's note says so.

    Args:
        role: `q`, `k`, `v` or `prob`.
        value: As for `raw_values`; one number, or one for each head in any shape with a single
            dimension longer than one.
        shape: The layer's head counts and granularity.
        layer: The layer's name, for messages.
        source: Where the value comes from.
        key: The checkpoint's key, for messages and the record.
        file: The checkpoint's file, for messages and the record.
        note: Kept in the record.

    Raises:
        ScaleError: The value is invalid or does not fit; it names layer, role, value, key and file.

    Example:
        >>> fit_scale("k", 0.5, ScaleShape(4, 2, ScaleGranularity.HEAD)).values
        (0.5, 0.5)
    """
    where = _place(role, layer, key, file)

    def refuse(reason: str) -> ScaleError:
        return ScaleError(
            f"{where}: {reason}", layer=layer, role=role, value=value, key=key, file=file
        )

    if role not in ROLES:
        raise refuse(f"got role {role!r}, expected one of {', '.join(ROLES)}")
    try:
        values, given = raw_values(value)
    except ScaleError as error:
        raise refuse(str(error)) from None
    for number in values:
        if (reason := invalid_reason(number)) is not None:
            raise refuse(
                f"got {number!r}, but {reason}; expected a finite float32 multiplier above zero"
                ' (load with on_invalid="default" to put 1.0 in its place)'
            )
    record = RecordedScale(tuple(as_float32(number) for number in values), source, key, file, note)
    wanted = shape.of(role)
    if len(values) == 1:
        return replace(record, values=record.values * math.prod(wanted))
    if sum(size > 1 for size in given) != 1:
        raise refuse(f"got shape {list(given)}, expected one number or one for each head")
    if not wanted:
        raise refuse(
            f"got shape {list(given)}, but the layer's scale is per tensor, shape []; build the"
            ' layer with scale_granularity="head"'
        )
    if len(values) == shape.num_kv_heads:
        return record
    if role == "q" and len(values) == shape.num_heads:
        return _reduce_to_kv_heads(record, shape)
    raise refuse(
        f"got shape {list(given)}, expected [] or [{shape.num_kv_heads}]"
        + (f" or [{shape.num_heads}]" if role == "q" else "")
    )


def checked_range(role: str, value: object) -> float:
    """Check the constant that turns an observed amax of a role into a scale.

    Raises:
        ScaleError: It is not one finite float32 above zero.
    """
    values, _ = raw_values(value, what=f"{role}_range")
    reason = invalid_reason(values[0])
    if len(values) != 1 or reason is not None:
        why = f"but {reason}" if len(values) == 1 else "which is not one number"
        raise ScaleError(f"{role}_range: got {value!r}, {why}; expected one number above zero")
    return as_float32(values[0])


def _reduce_to_kv_heads(record: RecordedScale, shape: ScaleShape) -> RecordedScale:
    group = shape.num_heads // shape.num_kv_heads
    values = tuple(
        max(record.values[head * group : (head + 1) * group]) for head in range(shape.num_kv_heads)
    )
    done = f"maximum of each group of {group} query heads"
    return replace(record, values=values, note=f"{record.note}; {done}" if record.note else done)


def _place(role: str, layer: str, key: str | None, file: str | None) -> str:
    place = f"{buffer_name(role)} of layer {layer!r}" if layer else buffer_name(role)
    if key is not None:
        place += f" (key {key!r}" + (f" in {file})" if file is not None else ")")
    return place
