"""The shape of a model's attention as its config states it: layers, heads, shared caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantattn.loaders.json_object import JsonObject

__all__ = ["Geometry", "decoder_config", "read_geometry"]

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_DEEPEST = 4

# Names of a decoder beside an encoder come first.
_NUM_LAYERS = (
    "decoder_layers",
    "num_decoder_layers",
    "decoder_num_hidden_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
)
_NUM_HEADS = (
    "decoder_attention_heads",
    "decoder_num_attention_heads",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
)
_NUM_KV_HEADS = (
    "decoder_num_key_value_heads",
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)
# Any of these says that KV heads differ from layer to layer.
_KV_HEADS_BY_LAYER = (
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
    "num_key_value_heads_per_layer",
    "block_configs",
)
_HEAD_DIM = ("head_dim", "head_size", "kv_channels", "d_kv")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "dim", "d_model")
_LAYER_KINDS = ("layers_block_type", "layer_types")
_WITHOUT_ATTENTION = frozenset(
    {"mamba", "mamba2", "mlp", "moe", "conv", "recurrent", "linear_attention"}
)
_PATTERN = "hybrid_override_pattern"
_PATTERN_KINDS = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}

_MOST_LAYERS = 100_000
"""More than any model has; bounds what a hostile config makes its reader allocate."""


@dataclass(frozen=True)
class Geometry:
    """What a config says about a decoder's attention; None: not said, or different by layer.

    Attributes:
        model_type: The config's `model_type`.
        num_layers: Decoder layers, attention or not, without draft layers.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Elements a head.
        is_mla: Whether K and V are cached as one latent.
        attention_layers: Layers with attention, in order; None where the layer count is unknown.
        kv_shared: Layer to the layer whose cache it reads.
    """

    model_type: str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_mla: bool = False
    attention_layers: tuple[int, ...] | None = None
    kv_shared: Mapping[int, int] = field(default_factory=dict)


def decoder_config(config: JsonObject) -> JsonObject:
    """The part of a `config.json` that describes the language decoder.

    Args:
        config: The whole config; a multimodal one nests the decoder's.

    Raises:
        CheckpointError: A nested config is no object.

    Example:
        >>> config = JsonObject({"text_config": {"num_hidden_layers": 2}}, "config.json")
        >>> decoder_config(config).path
        'text_config'
    """
    found = config
    for _ in range(_DEEPEST):
        nested = [child for key in _NESTED if (child := config.child(key)) is not None]
        if not nested:
            break
        config = nested[0]
        if any(key in config.data for key in (*_NUM_LAYERS, *_LAYER_KINDS)):
            found = config
    return found


def read_geometry(config: JsonObject) -> Geometry:
    """Read layers, heads and KV sharing of a config.

    Args:
        config: `config.json`, `params.json` or what has their members.

    Raises:
        CheckpointError: A member has a wrong type, or the members contradict each other.

    Example:
        >>> config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
        >>> geometry = read_geometry(JsonObject(config, "config.json"))
        >>> geometry.num_kv_heads, geometry.head_dim, geometry.attention_layers
        (4, 16, (0, 1))
    """
    decoder = decoder_config(config)
    kinds = _layer_kinds(decoder)
    num_layers = _count(decoder, _NUM_LAYERS, most=_MOST_LAYERS)
    if num_layers is None and kinds is not None:
        num_layers = len(kinds)
    if kinds is not None and num_layers is not None and len(kinds) < num_layers:
        keys = (*_LAYER_KINDS, _PATTERN)
        key = next(key for key in keys if decoder.data.get(key) is not None)
        raise decoder.error(key, f"one entry for each of {num_layers} layers")
    num_heads = _count(decoder, _NUM_HEADS)
    return Geometry(
        model_type=config.text("model_type") or decoder.text("model_type"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(decoder, num_heads),
        head_dim=_head_dim(decoder, num_heads),
        is_mla=bool(decoder.count("kv_lora_rank")),
        attention_layers=_attention_layers(decoder, kinds, num_layers),
        kv_shared=_kv_shared(decoder, kinds, num_layers),
    )


def _count(config: JsonObject, keys: tuple[str, ...], *, most: int = 2**31 - 1) -> int | None:
    """First of the members that is there; a list, one number a layer, reads as None."""
    for key in keys:
        if isinstance(config.data.get(key), list):
            return None
        count = config.count(key, most=most)
        if count == 0:
            raise config.error(key, "a number above 0")
        if count is not None:
            return count
    return None


def _num_kv_heads(config: JsonObject, num_heads: int | None) -> int | None:
    is_by_layer = any(isinstance(config.data.get(key), list) for key in _NUM_KV_HEADS)
    if is_by_layer or any(config.data.get(key) is not None for key in _KV_HEADS_BY_LAYER):
        return None
    if config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        return 1
    count = _count(config, _NUM_KV_HEADS)
    return num_heads if count is None else count


def _head_dim(config: JsonObject, num_heads: int | None) -> int | None:
    head_dim = _count(config, _HEAD_DIM)
    hidden_size = _count(config, _HIDDEN_SIZE)
    if head_dim is not None or hidden_size is None or num_heads is None:
        return head_dim
    return hidden_size // num_heads


def _layer_kinds(config: JsonObject) -> tuple[str, ...] | None:
    for key in _LAYER_KINDS:
        if config.data.get(key) is not None:
            return config.texts(key)
    pattern = config.text(_PATTERN)
    if pattern is None:
        return None
    return tuple(_PATTERN_KINDS.get(mark, mark) for mark in pattern.replace("|", ""))


def _attention_layers(
    config: JsonObject, kinds: tuple[str, ...] | None, num_layers: int | None
) -> tuple[int, ...] | None:
    if num_layers is None:
        return None
    layers = range(num_layers)
    if kinds is not None:
        return tuple(layer for layer in layers if kinds[layer] not in _WITHOUT_ATTENTION)
    linear = config.child("linear_attn_config")  # Kimi's, which counts layers from 1
    recurrent = linear.data.get("kda_layers") if linear is not None else None
    without = {it for it in recurrent if type(it) is int} if isinstance(recurrent, list) else ()
    return tuple(layer for layer in layers if layer + 1 not in without)


def _kv_shared(
    config: JsonObject, kinds: tuple[str, ...] | None, num_layers: int | None
) -> dict[int, int]:
    """The last `num_kv_shared_layers` read the last earlier layer of their own kind."""
    key = "num_kv_shared_layers"
    shared = config.count(key)
    if not shared:
        return {}
    if num_layers is None or shared >= num_layers:
        raise config.error(key, f"fewer than the model's layers ({num_layers})")
    first = num_layers - shared
    kinds = kinds if kinds is not None else ("attention",) * num_layers
    last_of_kind = {kinds[layer]: layer for layer in range(first)}
    for layer in range(first, num_layers):
        if kinds[layer] not in last_of_kind:
            raise config.error(key, f"an earlier {kinds[layer]} layer for layer {layer} to share")
    return {layer: last_of_kind[kinds[layer]] for layer in range(first, num_layers)}
