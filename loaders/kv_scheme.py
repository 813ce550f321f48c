"""How each producer's config states the quantization of the KV cache: one reader a convention."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantattn.loaders.json_object import JsonObject

__all__ = ["KvScheme", "attention_group", "read_kv_scheme"]

_NAMES = {
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
_ARGUMENT_DTYPES = {
    ("float", 8): "fp8_e4m3",
    ("float", 4): "nvfp4",
    ("int", 8): "int8",
    ("int", 4): "int4",
}
_STRATEGIES = {
    "attn_head": "head",
    "per_head": "head",
    "per_tensor": "tensor",
    "per_channel": "channel",
    "per_group": "group",
}
_UNSPECIFIED = "unspecified"
_UNQUANTIZED = frozenset({"", "auto", "none", "float16", "bfloat16", "float32", "float"})
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class KvScheme:
    """How a checkpoint's KV cache was quantized.

    Attributes:
        dtype: `fp8_e4m3`, `int8`, `int4`, `nvfp4`, or the producer's own word.
        source: File and path that state it.
        strategy: `tensor`, `head`, or the producer's own word (`channel`, `group`, ...).
        dynamic: Whether scales are computed at run time, so that the checkpoint holds none.
        symmetric: Whether zero is stored as zero.
    """

    dtype: str
    source: str
    strategy: str = "tensor"
    dynamic: bool = False
    symmetric: bool = True

    @property
    def file(self) -> str:
        """The file that states the scheme."""
        return self.source.partition(":")[0]

    def faults(self) -> list[str]:
        """Each property that no layer of quantattn can serve, in words."""
        checks = {
            f"the KV format {self.dtype}": self.dtype != "fp8_e4m3",
            f"{self.strategy} scales": self.strategy not in ("tensor", "head"),
            "dynamic scales": self.dynamic,
            "asymmetric quantization": not self.symmetric,
        }
        return [fault for fault, is_present in checks.items() if is_present]


def read_kv_scheme(section: JsonObject) -> KvScheme | None:
    """Read the KV scheme of a quantization config, whoever wrote it.

    Args:
        section: `quantization_config` of `config.json`, or what stands in its place elsewhere.

    Returns:
        The scheme; None where the section declares no quantized KV cache.

    Raises:
        CheckpointError: A member has a wrong type.

    Example:
        >>> section = JsonObject({"kv_cache_quant_algo": "FP8"}, "hf_quant_config.json")
        >>> read_kv_scheme(section).dtype
        'fp8_e4m3'
    """
    for read in (
        _from_kv_cache_scheme,
        _from_kv_cache_quant_algo,
        _from_attention_group,
        _from_quark,
        _from_auto_round,
        _from_paddle,
        _from_ascend,
    ):
        scheme = read(section)
        if scheme is not None:
            return scheme
    return None


def attention_group(section: JsonObject) -> JsonObject | None:
    """Arguments by which compressed-tensors and auto-round quantize whole attention modules.

    Args:
        section: As for `read_kv_scheme`.

    Returns:
        The group's `input_activations`; None where no attention module is quantized.

    Raises:
        CheckpointError: A member has a wrong type.

    Example:
        >>> arguments = {"type": "float", "num_bits": 8}
        >>> group = {"targets": ["LlamaAttention"], "input_activations": arguments}
        >>> section = JsonObject({"config_groups": {"attention": group}}, "config.json")
        >>> attention_group(section).count("num_bits")
        8
    """
    groups = section.child("config_groups")
    members = [group for _, group in groups.children()] if groups is not None else []
    own = section.child("attention_input_activations")
    for group in [*members, *([own] if own is not None else [])]:
        arguments = group.child("input_activations")
        is_attention = any(_ATTENTION.search(target) for target in group.texts("targets"))
        if arguments is not None and is_attention and group.child("weights") is None:
            return arguments
    return None


def _source(section: JsonObject, key: str) -> str:
    return f"{section.file}: {section.place(key)}"


def _from_kv_cache_scheme(section: JsonObject) -> KvScheme | None:
    """compressed-tensors and flat ModelOpt give arguments, AutoFP8 and other ModelOpt a word."""
    key = "kv_cache_scheme"
    if not isinstance(section.data.get(key), str):
        arguments = section.child(key)
        return None if arguments is None else _from_arguments(arguments)
    word = section.text(key) or ""
    if word in ("static", "dynamic"):
        return KvScheme("fp8_e4m3", _source(section, key), dynamic=word == "dynamic")
    return _from_algorithm(word, _source(section, key))


def _from_kv_cache_quant_algo(section: JsonObject) -> KvScheme | None:
    key = "kv_cache_quant_algo"
    algorithm = section.text(key)
    return _from_algorithm(algorithm, _source(section, key)) if algorithm else None


def _from_algorithm(word: str, source: str) -> KvScheme | None:
    if word.lower() in _UNQUANTIZED:
        return None
    dtype = word.lower().removesuffix("_affine")
    is_symmetric = not word.lower().endswith("_affine")
    return KvScheme(_NAMES.get(dtype, dtype), source, symmetric=is_symmetric)


def _from_attention_group(section: JsonObject) -> KvScheme | None:
    arguments = attention_group(section)
    return None if arguments is None else _from_arguments(arguments)


def _from_arguments(arguments: JsonObject) -> KvScheme:
    """compressed-tensors' QuantizationArgs, with its defaults for what is omitted."""
    kind = arguments.text("type") or "int"
    num_bits = arguments.count("num_bits")
    bits = 8 if num_bits is None else num_bits
    strategy = arguments.text("strategy") or "tensor"
    is_dynamic = arguments.data.get("dynamic") == "local" or arguments.flag("dynamic")
    return KvScheme(
        dtype=_ARGUMENT_DTYPES.get((kind, bits), f"{kind}{bits}"),
        source=f"{arguments.file}: {arguments.path}",
        strategy=_STRATEGIES.get(strategy, strategy),
        dynamic=is_dynamic,
        symmetric=arguments.flag("symmetric", default=True),
    )


def _from_quark(section: JsonObject) -> KvScheme | None:
    """Quark lists the projections whose outputs are cached; their specs stand elsewhere."""
    export = section.child("export")
    patterns = export.texts("kv_cache_group") if export is not None else ()
    if export is None or not patterns:
        return None
    source = _source(export, "kv_cache_group")
    schemes = [_quark_output(section, pattern, source) for pattern in patterns]
    dtypes = dict.fromkeys(scheme.dtype for scheme in schemes)
    strategies = dict.fromkeys(scheme.strategy for scheme in schemes)
    return KvScheme(
        dtype="+".join(dtypes),
        source=source,
        strategy="+".join(strategies),
        dynamic=any(scheme.dynamic for scheme in schemes),
        symmetric=all(scheme.symmetric for scheme in schemes),
    )


def _quark_output(section: JsonObject, pattern: str, source: str) -> KvScheme:
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        layers = section.child(key)
        for name, layer in layers.children() if layers is not None else ():
            spec = layer.child("output_tensors")
            is_meant = fnmatchcase(name, pattern) or fnmatchcase(pattern, name)
            if spec is not None and is_meant:
                return _from_quark_spec(spec, source)
    return KvScheme(_UNSPECIFIED, source)


def _from_quark_spec(spec: JsonObject, source: str) -> KvScheme:
    dtype = spec.text("dtype") or _UNSPECIFIED
    strategy = spec.text("qscheme") or "per_tensor"
    return KvScheme(
        dtype=_NAMES.get(dtype, dtype),
        source=source,
        strategy=_STRATEGIES.get(strategy, strategy),
        dynamic=spec.flag("is_dynamic"),
        symmetric=spec.flag("symmetric", default=True),
    )


def _from_auto_round(section: JsonObject) -> KvScheme | None:
    for prefix in ("static_kv", "static_attention"):
        dtype = section.text(f"{prefix}_dtype")
        if dtype is not None:
            word = dtype.lower().removeprefix("torch.")
            if word in _UNQUANTIZED:
                continue
            strategy = section.text(f"{prefix}_granularity") or "tensor"
            return KvScheme(
                dtype=_NAMES.get(word, word),
                source=_source(section, f"{prefix}_dtype"),
                strategy=_STRATEGIES.get(strategy, strategy),
            )
    return None


def _from_paddle(section: JsonObject) -> KvScheme | None:
    key = "kv_cache_quant_type"
    word = (section.text(key) or "").lower()
    if word in _UNQUANTIZED:
        return None
    dtype = word.removeprefix("block_wise_").removesuffix("_zp")
    return KvScheme(
        dtype=_NAMES.get(dtype, dtype),
        source=_source(section, key),
        dynamic=word.startswith("block_wise_"),
        symmetric=not word.endswith("_zp"),
    )


def _from_ascend(section: JsonObject) -> KvScheme | None:
    """Both caches are INT8; C8 has one scale a channel, FA quantization one a head."""
    strategies = {"fa_quant_type": "head", "kv_cache_type": "channel", "kv_quant_type": "channel"}
    for key, strategy in strategies.items():
        if section.text(key):
            return KvScheme("int8", _source(section, key), strategy)
    return None
