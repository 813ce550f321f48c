"""What a `kv_cache_dtype` means; the only parser of such strings.

The strings are vLLM's: `auto`, `fp8` (= `fp8_e4m3`), `fp8_e5m2`, `fp8_per_token_head`,
`int8_per_token_head`, `int4_per_token_head`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from quantattn.errors import FormatError

__all__ = [
    "CacheFormat",
    "ScalePlacement",
    "fnuz_factor",
    "format_of_numbers",
    "parse_kv_cache_dtype",
]

FP8_E4M3_MAX = 448.0
FP8_E5M2_MAX = 57344.0


class ScalePlacement(Enum):
    """Where the scales of a cache's entries come from."""

    NONE = "none"
    """Entries are stored as they are; scales are ignored at write and at read."""
    LAYER = "layer"
    """The layer's `k_scale` and `v_scale` buffers, per tensor or per KV head."""
    PAGE = "page"
    """A scale per token and KV head, computed at the write and kept in the page."""


@dataclass(frozen=True)
class CacheFormat:
    """One meaning of a `kv_cache_dtype` string.

    Attributes:
        name: The canonical string.
        storage_dtype: Element type of a page; None: the model's own dtype.
        max_value: Largest finite stored number; None where nothing is quantized.
        bits: Bits of one stored number; None: those of the model's dtype.
        scale_placement: Where the scales come from.
        row_scales: float32 numbers that a page keeps for one row: its scale, and for int4 its
            offset.
    """

    name: str
    storage_dtype: torch.dtype | None
    max_value: float | None
    bits: int | None
    scale_placement: ScalePlacement
    row_scales: int = 0

    @property
    def uses_layer_scales(self) -> bool:
        """Whether entries are written and read with the layer's `k_scale` and `v_scale`."""
        return self.scale_placement is ScalePlacement.LAYER

    @property
    def has_fnuz_form(self) -> bool:
        """Whether some hardware reads the same bytes as half their value (see `fnuz_factor`)."""
        return self.storage_dtype is torch.float8_e4m3fn

    @property
    def expects_scales(self) -> bool:
        """Whether running at the default scale 1.0 deserves a word.

        e4m3 holds up to 448, which keys exceed. e5m2 is often chosen to run without scales: its
        range is nearly that of float16.
        """
        return self.storage_dtype is torch.float8_e4m3fn

    @property
    def is_quantized(self) -> bool:
        """Whether entries are stored in fewer bits than the model computes in."""
        return self.scale_placement is not ScalePlacement.NONE

    @property
    def has_page_scales(self) -> bool:
        """Whether pages are bytes that hold the scale of each row beside its codes."""
        return self.scale_placement is ScalePlacement.PAGE

    @property
    def is_rotated(self) -> bool:
        """Whether rows are stored rotated, see `quantattn.rotation`."""
        return self.bits == 4

    def code_width(self, width: int) -> int:
        """Elements that a page keeps for the codes of a row of `width` numbers."""
        return width * self.bits // 8 if self.bits is not None else width


_FORMATS = {
    f.name: f
    for f in (
        CacheFormat("auto", None, None, None, ScalePlacement.NONE),
        CacheFormat("fp8_e4m3", torch.float8_e4m3fn, FP8_E4M3_MAX, 8, ScalePlacement.LAYER),
        CacheFormat("fp8_e5m2", torch.float8_e5m2, FP8_E5M2_MAX, 8, ScalePlacement.LAYER),
        CacheFormat("fp8_per_token_head", torch.uint8, FP8_E4M3_MAX, 8, ScalePlacement.PAGE, 1),
        CacheFormat("int8_per_token_head", torch.uint8, 127.0, 8, ScalePlacement.PAGE, 1),
        CacheFormat("int4_per_token_head", torch.uint8, 15.0, 4, ScalePlacement.PAGE, 2),
    )
}
_ALIASES = {"fp8": "fp8_e4m3"}


def parse_kv_cache_dtype(name: str) -> CacheFormat:
    """Resolve a `kv_cache_dtype` string.

    Args:
        name: One of `auto`, `fp8`, `fp8_e4m3`, `fp8_e5m2`, `fp8_per_token_head`,
            `int8_per_token_head`, `int4_per_token_head`.

    Raises:
        FormatError: The string is none of these.

    Example:
        >>> parse_kv_cache_dtype("fp8").name
        'fp8_e4m3'
    """
    found = _FORMATS.get(_ALIASES.get(name, name)) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(sorted([*_FORMATS, *_ALIASES]))
        raise FormatError(f"kv_cache_dtype: got {name!r}, expected one of {known}")
    return found


def format_of_numbers(dtype: torch.dtype) -> CacheFormat:
    """The format of numbers that are stored as `dtype`, with no scales of their own.

    Example:
        >>> format_of_numbers(torch.float8_e5m2).name, format_of_numbers(torch.bfloat16).name
        ('fp8_e5m2', 'auto')
    """
    fp8 = (f for f in _FORMATS.values() if f.uses_layer_scales and f.storage_dtype == dtype)
    return next(fp8, _FORMATS["auto"])


def fnuz_factor() -> float:
    """The number by which a stored e4m3 scale is multiplied before this platform's kernels use it.

    2.0 where the hardware's e4m3 is FNUZ (gfx94x): the same byte means half the value there.
    1.0 everywhere else. The factor is applied where a scale is used, never to the stored value.
    """
    if torch.version.hip is None or not torch.cuda.is_available():
        return 1.0
    arch = str(getattr(torch.cuda.get_device_properties(0), "gcnArchName", ""))
    return 2.0 if arch.startswith("gfx94") else 1.0
