"""Which attention scale a checkpoint key names: one ordered table, matched on the original key.

A key is split at its attention module (`self_attn`, `attn`, `mixer`, ...); the rest is matched,
whole, against the rules in order and the first match wins. Matching happens once and before any
renaming of fused projections. What no rule names is left to the Linear loader, and so are the
scales of Linears.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["ScaleKind", "ScaleName", "Scope", "canonical_key", "parse_name"]


class Scope(Enum):
    """Which part of a model an attention module belongs to."""

    DECODER = "decoder"
    DRAFT = "draft"
    """A draft head: MTP, EAGLE, next-n prediction."""
    CROSS = "cross"
    """Cross-attention of a decoder layer."""
    VISION = "vision"
    """Vision, audio or any encoder: attention without a cache."""


class ScaleKind(Enum):
    """What the number under a key means."""

    MULTIPLIER = "multiplier"
    """The dequantizing multiplier itself."""
    RECIPROCAL = "reciprocal"
    AMAX = "amax"
    """The range that was observed; divided by the format's maximum it is the multiplier."""
    MLA_AMAX = "mla_amax"
    """Amax of one part of MLA's latent; the latent's amax is the maximum over its parts."""
    CACHE_SCALE = "cache_scale"
    """Multiplier or amax, by producer; only the caller can say which."""
    GLOBAL_SCALE = "global_scale"
    """NVFP4's outer scale, multiplier or reciprocal, by producer; only the caller can say which."""
    OUTPUT_SCALE = "output_scale"
    """A projection's output scale: the cache's multiplier only where the config declares one."""
    OUT_ALIAS = "out_alias"
    """o_proj's input scale: the Linear's, and at the same time the attention output's."""
    ZERO_POINT = "zero_point"
    AFFINE_BIAS = "affine_bias"
    """The offset of an affine cache."""
    RUNTIME_BUFFER = "runtime_buffer"
    """An engine's saved buffer; its platform's factor may already be inside."""
    ROLE_MISMATCH = "role_mismatch"
    """One role's scale under another role's projection."""
    RESIDUE = "residue"
    """A left-over of calibration."""
    UNKNOWN = "unknown"
    """Looks like a scale of the attention, and no rule knows it."""


@dataclass(frozen=True)
class ScaleName:
    """What a key says by its name alone.

    Attributes:
        key: The checkpoint key.
        rule: Id of the rule that matched (`A1`, `B3`, ...).
        attention: Path of the attention module in the checkpoint, `model.layers.0.self_attn`.
        layer: The last number in that path; None where there is none.
        scope: The part of the model that the module belongs to.
        roles: Roles that the value is for: `q`, `k`, `v`, `prob`, `out`; two for a shared K and V
            scale.
        kind: What the number means.
    """

    key: str
    rule: str
    attention: str
    layer: int | None
    scope: Scope
    roles: tuple[str, ...]
    kind: ScaleKind


@dataclass(frozen=True)
class _Rule:
    id: str
    pattern: re.Pattern[str]
    kind: ScaleKind
    roles: tuple[str, ...] | None
    """None: the pattern's first group says it."""


_KV = ("k", "v")
_ROLES = {
    **{token: (token,) for token in ("q", "k", "v", "prob")},
    **dict.fromkeys(("p", "s"), ("prob",)),
    "kv": _KV,
}

_CROSS_ATTENTION = frozenset(
    {"encoder_attn", "cross_attn", "cross_attention", "crossattention", "EncDecAttention"}
)
_ATTENTION = _CROSS_ATTENTION | {
    *("self_attn", "self_attention", "attention", "attn", "SelfAttention"),
    *("mixer", "temporal_block"),  # attention or a recurrence, layer by layer
}
# T5's, whose projections are called q, k and v: q.scale is a Linear's.
_LINEARS_CALLED_Q = frozenset({"SelfAttention", "EncDecAttention"})

_RUNTIME = r"(?:(?:attn|attn_mqa|core_attention|mla_attn(?:\.mla_attn)?)\.)?"
_FUSED = "(?:qkv_proj|qkqkv_proj|query_key_value|qkv|c_attn|Wqkv|W_pack|linear_qkv)"

# Names that end like a scale and are none of the attention's quantization: a learned factor of the
# logits, of a head or of a block, and the scales of weights that lie directly in the module.
_UNRELATED = (
    r"(?:scale|(?:per_dim|attention_value|logit|layer|attn|head)_scale"
    r"|(?:\w+_)?(?:weight|input)_(?:scale\w*|zero_point))"
)
_SCALE_WORD = "(?:scales?|scaling_factor|amax|zero_point)"
_UNKNOWN_NAME = (
    rf"{_RUNTIME}(?!{_UNRELATED}$)\w*{_SCALE_WORD}"
    rf"|(?:\w+\.)+_?(?:q|k|v|kv|p|prob)_(?:\w+_)?{_SCALE_WORD}"
    r"|(?:\w+\.)*\w*(?:bmm|softmax)\w*_quantizer\.\w*(?:amax|scale|bias)\w*"
)


def _rule(
    rule_id: str, pattern: str, kind: ScaleKind, roles: tuple[str, ...] | None = None
) -> _Rule:
    return _Rule(rule_id, re.compile(pattern), kind, roles)


_RULES = (
    _rule("L1", r"o_proj\.input_scale", ScaleKind.OUT_ALIAS, ("out",)),
    _rule("A1", rf"{_RUNTIME}([qkv])_scale", ScaleKind.MULTIPLIER),
    _rule("A2", rf"{_RUNTIME}_(q|k|v|prob)_scale", ScaleKind.RUNTIME_BUFFER),
    _rule("A3", r"([qkv])_proj\.\1_scale", ScaleKind.MULTIPLIER),
    _rule("A3", r"[qkv]_proj\.([qkv])_scale", ScaleKind.ROLE_MISMATCH),
    _rule("A4", rf"{_FUSED}\.([qkv])_scale", ScaleKind.MULTIPLIER),
    _rule("A5", rf"{_RUNTIME}(?:kv_scale|kv_cache_scale)", ScaleKind.MULTIPLIER, _KV),
    _rule("A6", r"([qkv])_proj\.output_scale", ScaleKind.OUTPUT_SCALE),
    # Quark, where one projection makes K and V.
    _rule("A6", rf"(?:{_FUSED}|kv_b_proj)\.output_scale", ScaleKind.OUTPUT_SCALE, _KV),
    _rule("A7", rf"{_RUNTIME}(?:prob_output_scale|prob_scale)", ScaleKind.MULTIPLIER, ("prob",)),
    _rule("A8", rf"{_RUNTIME}([qkv])_cache\.scale", ScaleKind.CACHE_SCALE),
    _rule("A9", rf"{_RUNTIME}q\.scale", ScaleKind.MULTIPLIER, ("q",)),
    _rule("A10", r"(q|k|v|kv)_fake_quantizer\.qscale_act", ScaleKind.MULTIPLIER),
    _rule("B1", rf"{_RUNTIME}([qkvp])_bmm_quantizer\._amax", ScaleKind.AMAX),
    _rule("B2", rf"{_RUNTIME}softmax_quantizer\._amax", ScaleKind.AMAX, ("prob",)),
    _rule("B3", rf"{_RUNTIME}(?:kv_c|kv|k_pe|pe)_bmm_quantizer\._amax", ScaleKind.MLA_AMAX, ("k",)),
    _rule("B4", r"cache([kv])_matmul\.activation_scale", ScaleKind.AMAX),
    _rule("B5", r"([qs])_matmul\.activation_scale", ScaleKind.AMAX),
    _rule("B6", rf"{_RUNTIME}q_max", ScaleKind.RESIDUE, ("q",)),
    # The range of the attention's output, which o_proj's own input quantizer states again.
    _rule("B6", rf"{_RUNTIME}bmm2_output_quantizer\._amax", ScaleKind.RESIDUE, ("out",)),
    _rule("C1", rf"{_RUNTIME}([qkv])_global_scale", ScaleKind.GLOBAL_SCALE),
    _rule("D1", rf"{_RUNTIME}([qkv])_zero_point", ScaleKind.ZERO_POINT),
    _rule("D1", r"[qkv]_proj\.([qkv])_zero_point", ScaleKind.ZERO_POINT),
    _rule("D2", r"cache([kv])_matmul\.activation_zero_point", ScaleKind.ZERO_POINT),
    _rule("D2", r"([qs])_matmul\.activation_zero_point", ScaleKind.ZERO_POINT),
    _rule("D3", r"[kv]_proj\.([kv])_bias", ScaleKind.AFFINE_BIAS),
    _rule("D3", rf"{_RUNTIME}([qkv])_bmm_quantizer\._bias_value", ScaleKind.AFFINE_BIAS),
    _rule("E1", "kv_cache_scaling_factor|kv_quant_orig_scale", ScaleKind.MULTIPLIER, _KV),
    _rule("E2", "([kv])_cache_scaling_factor", ScaleKind.MULTIPLIER),
    _rule("E3", "kv_cache_rcp_scaling_factor", ScaleKind.RECIPROCAL, _KV),
    _rule("E4", "kv_orig_quant_scale", ScaleKind.RECIPROCAL, _KV),
    _rule("F1", rf"(?:{_FUSED}\.)?([kv])_proj\.kv_cache_scale", ScaleKind.MULTIPLIER),
    _rule("F1", rf"{_RUNTIME}([kv])_cache_scale", ScaleKind.MULTIPLIER),
    _rule("F2", rf"(?:{_FUSED}\.)?([kv])_proj\.kv_cache_offset", ScaleKind.ZERO_POINT),
    _rule("F2", rf"{_RUNTIME}([kv])_cache_offset", ScaleKind.ZERO_POINT),
    _rule("F3", rf"{_RUNTIME}fa_([qkv])\.scale", ScaleKind.MULTIPLIER),
    _rule("F4", rf"{_RUNTIME}fa_([qkv])\.offset", ScaleKind.ZERO_POINT),
)
_UNKNOWN = _rule("Z", _UNKNOWN_NAME, ScaleKind.UNKNOWN, ())

# Tested on "parent.part" of every part of a path; the last part that matches any decides. ChatGLM's
# and NeMo's decoders are called `encoder`.
_SCOPES = (
    (Scope.DECODER, re.compile(r"(?:transformer|language_model)\.encoder")),
    (Scope.DRAFT, re.compile(r".*\.(?:\w+_)?(?:mtp|eagle\d?|draft|nextn|midlayer)(?:_\w+)?")),
    (Scope.DECODER, re.compile(r".*\.\w*(?:language|llm|text_model|decoder)\w*")),
    (
        Scope.VISION,
        re.compile(
            r".*\.(?:\w+_)?(?:encoder|vision|visual|image|video|audio|speech|vit|siglip|clip"
            r"|conformer|sam|vpm|apm|resampler|perceiver|connector)(?:_\w+)?"
        ),
    ),
)
# ModelOpt's export of DeepSeek's draft layer, which has no index.
_LONE_DRAFT = ["model", "decoder"]

_LAYER_LEVEL = re.compile(r"(.+\.\d{1,9})\.(kv_cache_scaling_factor)")
_SCALE_LIKE = re.compile(r"scal|amax|zero_point|offset|q_max|[kv]_bias$|_bias_value$")
_INDEX = re.compile(r"[0-9]{1,9}")
_LONGEST_KEY = 512
"""Far more than any model's; a longer key is nobody's scale, and would take long to match."""
# T5 numbers the attention and the MLP inside a block as well.
_SUBLAYER = re.compile(r"(?<=\.)(block\.[0-9]+)\.layer\.[0-9]+$")


def parse_name(key: str) -> ScaleName | None:
    """Read a checkpoint key as the name of an attention scale.

    Args:
        key: The key exactly as the checkpoint has it, with any prefix.

    Returns:
        What the name says; None for a weight and for a scale of a Linear.

    Example:
        >>> name = parse_name("model.layers.3.self_attn.k_proj.k_scale")
        >>> name.attention, name.layer, name.roles, name.rule
        ('model.layers.3.self_attn', 3, ('k',), 'A3')
        >>> parse_name("model.layers.3.self_attn.k_proj.weight_scale") is None
        True
    """
    parts = key.split(".")
    if len(key) > _LONGEST_KEY or not _SCALE_LIKE.search(parts[-1]):
        return None
    places = [place for place, part in enumerate(parts[:-1]) if part in _ATTENTION]
    if not places:
        return _parse_layer_level(key)
    for place in places:
        end = place + 1 + bool(_INDEX.fullmatch(parts[place + 1]))  # LongCat: self_attn.0
        rest = ".".join(parts[end:])
        if rest == "q.scale" and parts[place] in _LINEARS_CALLED_Q:
            return None
        for rule in _RULES:
            if (match := rule.pattern.fullmatch(rest)) is not None:
                return _named(key, parts[:end], rule, match)
    match = _UNKNOWN.pattern.fullmatch(".".join(parts[places[0] + 1 :]))
    return None if match is None else _named(key, parts[: places[0] + 1], _UNKNOWN, match)


def canonical_key(name: ScaleName, role: str) -> str:
    """Key under which a role's multiplier of the same attention module is written.

    Parsing the canonical key gives that same key again.

    Args:
        name: A parsed name.
        role: `q`, `k`, `v` or `prob`.

    Example:
        >>> name = parse_name("transformer.h.0.attn.kv_scale")
        >>> canonical_key(name, "v")
        'transformer.h.0.attn.v_scale'
    """
    return f"{name.attention}.{role}_scale"


def _parse_layer_level(key: str) -> ScaleName | None:
    """Old Quark hangs the one K and V scale on the decoder layer."""
    match = _LAYER_LEVEL.fullmatch(key)
    if match is None:
        return None
    rule = next(rule for rule in _RULES if rule.pattern.fullmatch(match[2]))
    return _named(key, [*match[1].split("."), "self_attn"], rule, match)


def _named(key: str, attention: Sequence[str], rule: _Rule, match: re.Match[str]) -> ScaleName:
    path = list(attention[:-1])
    blocks = _SUBLAYER.sub(r"\1", ".".join(path)).split(".")
    indices = [int(part) for part in blocks if _INDEX.fullmatch(part)]
    return ScaleName(
        key=key,
        rule=rule.id,
        attention=".".join(attention),
        layer=indices[-1] if indices else None,
        scope=_scope(path, attention[-1]),
        roles=_ROLES[match[1]] if rule.roles is None else rule.roles,
        kind=rule.kind,
    )


def _scope(path: list[str], attention: str) -> Scope:
    found = [Scope.DECODER]
    for parent, part in zip(["", *path], path, strict=False):
        pair = f"{parent}.{part}"
        found.extend([scope for scope, pattern in _SCOPES if pattern.fullmatch(pair)][:1])
    if found[-1] is Scope.VISION:
        return Scope.VISION
    if Scope.DRAFT in found or path == _LONE_DRAFT:
        return Scope.DRAFT
    return Scope.CROSS if attention in _CROSS_ATTENTION else Scope.DECODER
