"""What runs each operation on each device: the table that `quantattn doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass

from quantattn.formats import CacheFormat, parse_kv_cache_dtype
from quantattn.ops._library import MULTIPLYING

__all__ = ["DEVICES", "Support", "device_row", "support_table"]

DEVICES = ("cpu", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

REFERENCE = "reference (plain torch)"

# Triton multiplies no tiles there.
_WITHOUT_PRODUCTS = frozenset({"sm_75"})

# Native means that the device itself rounds float32 to FP8.
_ENCODERS = {
    "sm_75": "software fp8",
    "sm_80": "software fp8",
    "sm_86": "software fp8",
    "sm_89": "native",
    "sm_90": "native",
    "sm_100": "native",
    "sm_120": "native",
}
# Kernels for Hopper alone, which serve most calls there; a call that none serves gets Triton's.
_HOPPER_KERNELS = {
    "mla_attention": "gluon decode, ",
    "paged_attention": "gluon decode and prefill, ",
    "varlen_attention": "gluon prefill, ",
}
_CACHE_OPERATIONS = (
    "mla_attention",
    "paged_attention",
    "rope_write_kv",
    "write_kv",
    "write_latent",
)
_PLAIN_OPERATIONS = (
    "dynamic_quant_fp8",
    "merge_attention_states",
    "static_quant_fp8",
    "varlen_attention",
)
_FORMATS = (
    "auto",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int4_per_token_head",
    "int8_per_token_head",
)
_FP8_FORMATS = frozenset({"fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"})
_LATENT_OPERATIONS = frozenset({"mla_attention", "write_latent"})


@dataclass(frozen=True)
class Support:
    """What runs one operation on one device.

    Attributes:
        operation: Name in `quantattn.ops`.
        kv_cache_dtype: Format of the cache; None for an operation without a cache.
        device: `cpu`, or a CUDA device's architecture.
        runs: Which implementation runs; None: none does.
        reason: Why none does; None where one does.
    """

    operation: str
    kv_cache_dtype: str | None
    device: str
    runs: str | None
    reason: str | None = None


def device_row(major: int, minor: int) -> str | None:
    """The row of `DEVICES` that a CUDA device of this compute capability runs; None: none does.

    Args:
        major: Major compute capability.
        minor: Minor compute capability; later minors run the kernels of earlier ones.

    Example:
        >>> device_row(8, 7), device_row(7, 0)
        ('sm_86', None)
    """
    known = (tuple(map(int, (name[3:-1], name[-1]))) for name in DEVICES if name != "cpu")
    fitting = [minor_ for major_, minor_ in known if major_ == major and minor_ <= minor]
    return f"sm_{major}{max(fitting)}" if fitting else None


def support_table() -> tuple[Support, ...]:
    """List what runs every operation, by operation, format and device.

    Example:
        >>> [row.runs for row in support_table() if row.operation == "static_quant_fp8"][-1]
        'triton static_quant_fp8 (native)'
    """
    rows = []
    for operation in _CACHE_OPERATIONS:
        for name in _FORMATS:
            rows += [_row(operation, parse_kv_cache_dtype(name), device) for device in DEVICES]
    rows += [_row(operation, None, device) for operation in _PLAIN_OPERATIONS for device in DEVICES]
    return tuple(rows)


def _row(operation: str, fmt: CacheFormat | None, device: str) -> Support:
    name = None if fmt is None else fmt.name
    if fmt is not None and fmt.has_page_scales and operation in _LATENT_OPERATIONS:
        reason = "a latent cache keeps no scales in its pages"
        return Support(operation, name, device, None, reason)
    if device == "cpu" or (device in _WITHOUT_PRODUCTS and operation in MULTIPLYING):
        return Support(operation, name, device, REFERENCE)
    encoder = f" ({_ENCODERS[device]})" if name is None or name in _FP8_FORMATS else ""
    kernel = _HOPPER_KERNELS.get(operation, "") if device == "sm_90" else ""
    return Support(operation, name, device, f"{kernel}triton {operation}{encoder}")
