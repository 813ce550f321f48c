"""What runs each operation on each device: the table that `quantattn doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEVICES", "Support", "device_row", "support_table"]

DEVICES = ("cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

REFERENCE = "reference (plain torch)"

# Native means that the device rounds float32 to FP8 once; sm_89 goes through fp16 and rounds twice.
_ENCODERS = {
    "sm_80": "software fp8",
    "sm_86": "software fp8",
    "sm_89": "software fp8",
    "sm_90": "native",
    "sm_100": "native",
    "sm_120": "native",
}
_CACHE_OPERATIONS = ("mla_attention", "paged_attention", "write_kv", "write_latent")
_KERNELS = frozenset({"static_quant_fp8", "write_kv", "write_latent"})
_SERVED_FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2")
_OTHER_FORMATS = ("fp8_per_token_head", "int4_per_token_head", "int8_per_token_head")


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
        >>> device_row(8, 7), device_row(7, 5)
        ('sm_86', None)
    """
    known = (tuple(map(int, (name[3:-1], name[-1]))) for name in DEVICES if name != "cpu")
    fitting = [minor_ for major_, minor_ in known if major_ == major and minor_ <= minor]
    return f"sm_{major}{max(fitting)}" if fitting else None


def support_table() -> tuple[Support, ...]:
    """List what runs every operation, by operation, format and device.

    Example:
        >>> [row.runs for row in support_table() if row.device == "sm_90"][-1]
        'triton static_quant_fp8 (native)'
    """
    rows = []
    for operation in _CACHE_OPERATIONS:
        for name in _SERVED_FORMATS:
            rows += [Support(operation, name, d, _runs(operation, name, d)) for d in DEVICES]
        for name in _OTHER_FORMATS:
            reason = "not served yet: its scales lie in the pages"
            rows += [Support(operation, name, d, None, reason) for d in DEVICES]
    quantizer = "static_quant_fp8"
    rows += [Support(quantizer, None, d, _runs(quantizer, None, d)) for d in DEVICES]
    return tuple(rows)


def _runs(operation: str, kv_cache_dtype: str | None, device: str) -> str:
    if device == "cpu" or operation not in _KERNELS:
        return REFERENCE
    encoder = "" if kv_cache_dtype == "auto" else f" ({_ENCODERS[device]})"
    return f"triton {operation}{encoder}"
