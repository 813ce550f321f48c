"""LlamaConfig: what a Llama, Mistral, Qwen2 or Qwen3 config.json says about the model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quantattn.errors import FormatError
from quantattn.loaders.json_object import JsonObject
from quantattn.models.rope import Llama3Scaling, Rope

__all__ = ["LlamaConfig"]

MAX_LAYERS = 1024
"""A config cannot make the reader build more modules than this."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama-family decoder.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Width of a head.
        norm_eps: Added to the mean square in every RMSNorm.
        rope: Rotary embedding.
        sliding_windows: For every layer its window in tokens; None: it sees all earlier tokens.
        qkv_bias: Whether q, k and v projections have a bias.
        out_bias: Whether the output projection has one.
        mlp_bias: Whether the MLP's projections have one.
        qk_norm: Whether every q and k head is normalised before rotation.
        tied_head: Whether the output head is the embedding.
        dtype: The model's dtype as the config names it.
        stop_ids: Tokens that end a text.

    Example:
        >>> config = LlamaConfig.from_dict(
        ...     {
        ...         "model_type": "llama",
        ...         "vocab_size": 256,
        ...         "hidden_size": 64,
        ...         "intermediate_size": 128,
        ...         "num_hidden_layers": 2,
        ...         "num_attention_heads": 4,
        ...     }
        ... )
        >>> config.head_dim, config.num_kv_heads, config.rope.theta
        (16, 4, 10000.0)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    dtype: torch.dtype
    stop_ids: frozenset[int]

    @classmethod
    def from_dict(cls, config: Mapping[str, object]) -> LlamaConfig:
        """Read a parsed config.json.

        Raises:
            FormatError: The family, activation, rotary scaling or head sizes are not served.
            CheckpointError: A field is missing or of the wrong kind; `place` names it.
        """
        return _read_config(JsonObject(config, "config.json"))


def _read_config(config: JsonObject) -> LlamaConfig:
    family = config.text("model_type")
    if family not in FAMILIES:
        raise FormatError(f"model_type: got {family!r}, expected one of {', '.join(FAMILIES)}")
    activation = config.text("hidden_act") or "silu"
    if activation != "silu":
        raise FormatError(f"hidden_act: got {activation!r}, expected 'silu'")
    layers = config.count("num_hidden_layers", most=MAX_LAYERS)
    if not layers:
        raise config.error("num_hidden_layers", f"a whole number from 1 to {MAX_LAYERS}")
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    head_dim = _count(config, "head_dim", 128 if family == "qwen3" else hidden // heads)
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise FormatError(
            f"config.json: {heads} query heads over {kv_heads} KV heads of width {head_dim};"
            " expected a whole number of query heads a KV head and an even width"
        )
    bias = config.flag("attention_bias")
    return LlamaConfig(
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_read_rope(config),
        sliding_windows=_sliding_windows(config, family, layers),
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        out_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=family == "llama" and config.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        tied_head=config.flag("tie_word_embeddings"),
        dtype=_read_dtype(config),
        stop_ids=_read_stop_ids(config),
    )


def _read_rope(config: JsonObject) -> Rope:
    """Newer configs keep all of it in `rope_parameters`; older ones in two fields."""
    key = "rope_parameters" if config.data.get("rope_parameters") is not None else "rope_scaling"
    inner = config.child(key)
    outer = {name: config.data[name] for name in _ROPE_OUTER if name in config.data}
    fields = JsonObject({**outer, **(inner.data if inner else {})}, config.file, config.place(key))
    kind = fields.text("rope_type") or fields.text("type") or "default"
    if kind not in _ROPE_TYPES:
        raise FormatError(f"{key}: got type {kind!r}, expected one of {', '.join(_ROPE_TYPES)}")
    if _number(fields, "partial_rotary_factor", 1.0) != 1.0:
        raise FormatError("partial_rotary_factor: only whole heads are rotated here; expected 1.0")
    theta = _number(fields, "rope_theta", 10000.0)
    if kind == "linear":
        return Rope(theta, linear_factor=_number(fields, "factor"))
    if kind == "llama3":
        context = _count(fields, "original_max_position_embeddings", fields.count(_CONTEXT))
        low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
        if low >= high:
            raise FormatError(f"{key}: low_freq_factor {low} must be below high_freq_factor {high}")
        return Rope(theta, llama3=Llama3Scaling(_number(fields, "factor"), low, high, context))
    return Rope(theta)


_CONTEXT = "max_position_embeddings"
_ROPE_OUTER = ("rope_theta", "partial_rotary_factor", _CONTEXT)


def _sliding_windows(config: JsonObject, family: str, layers: int) -> tuple[int | None, ...]:
    uses_window = family == "mistral" or (
        family in ("qwen2", "qwen3") and config.flag("use_sliding_window")
    )
    # A config without the field means transformers' default, 4096; null means no window.
    if not uses_window or config.data.get("sliding_window", 4096) is None:
        return (None,) * layers
    window = _count(config, "sliding_window", 4096)
    kinds = config.texts("layer_types") if family != "mistral" else ()
    if not kinds:
        first = 0 if family == "mistral" else _count(config, "max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if len(kinds) != layers or not known.keys() >= set(kinds):
        raise config.error("layer_types", f"{layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def _read_dtype(config: JsonObject) -> torch.dtype:
    name = config.text("dtype") or config.text("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise FormatError(f"dtype: got {name!r}, expected one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _read_stop_ids(config: JsonObject) -> frozenset[int]:
    stated = config.data.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise config.error("eos_token_id", "a token or a list of tokens")
    return frozenset(ids)


def _count(config: JsonObject, key: str, default: int | None = None, least: int = 1) -> int:
    value = config.count(key)
    value = default if value is None else value
    if value is None or value < least:
        raise config.error(key, f"a whole number of at least {least}")
    return value


def _number(config: JsonObject, key: str, default: float | None = None) -> float:
    value = config.data.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise config.error(key, "a number above zero")
    return float(value)
