"""Names: every producer's spelling, everything that only looks alike, and stable canonical keys."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantattn.loaders import names
from quantattn.loaders.names import ScaleKind, Scope, canonical_key, parse_name

A = "model.layers.3.self_attn"

# name after the attention module -> (rule, roles, kind)
SPELLINGS = {
    "o_proj.input_scale": ("L1", ("out",), ScaleKind.OUT_ALIAS),
    "k_scale": ("A1", ("k",), ScaleKind.MULTIPLIER),
    "attn.v_scale": ("A1", ("v",), ScaleKind.MULTIPLIER),
    "mla_attn.mla_attn.q_scale": ("A1", ("q",), ScaleKind.MULTIPLIER),
    "attn_mqa.k_scale": ("A1", ("k",), ScaleKind.MULTIPLIER),
    "core_attention.k_scale": ("A1", ("k",), ScaleKind.MULTIPLIER),
    "_k_scale": ("A2", ("k",), ScaleKind.RUNTIME_BUFFER),
    "attn._prob_scale": ("A2", ("prob",), ScaleKind.RUNTIME_BUFFER),
    "k_proj.k_scale": ("A3", ("k",), ScaleKind.MULTIPLIER),
    "k_proj.v_scale": ("A3", ("v",), ScaleKind.ROLE_MISMATCH),
    "qkv_proj.k_scale": ("A4", ("k",), ScaleKind.MULTIPLIER),
    "qkqkv_proj.v_scale": ("A4", ("v",), ScaleKind.MULTIPLIER),
    "query_key_value.v_scale": ("A4", ("v",), ScaleKind.MULTIPLIER),
    "kv_scale": ("A5", ("k", "v"), ScaleKind.MULTIPLIER),
    "kv_cache_scale": ("A5", ("k", "v"), ScaleKind.MULTIPLIER),
    "v_proj.output_scale": ("A6", ("v",), ScaleKind.OUTPUT_SCALE),
    "qkv_proj.output_scale": ("A6", ("k", "v"), ScaleKind.OUTPUT_SCALE),
    "kv_b_proj.output_scale": ("A6", ("k", "v"), ScaleKind.OUTPUT_SCALE),
    "prob_output_scale": ("A7", ("prob",), ScaleKind.MULTIPLIER),
    "attn.prob_scale": ("A7", ("prob",), ScaleKind.MULTIPLIER),
    "k_cache.scale": ("A8", ("k",), ScaleKind.CACHE_SCALE),
    "q_cache.scale": ("A8", ("q",), ScaleKind.CACHE_SCALE),
    "q.scale": ("A9", ("q",), ScaleKind.MULTIPLIER),
    "kv_fake_quantizer.qscale_act": ("A10", ("k", "v"), ScaleKind.MULTIPLIER),
    "p_bmm_quantizer._amax": ("B1", ("prob",), ScaleKind.AMAX),
    "core_attention.k_bmm_quantizer._amax": ("B1", ("k",), ScaleKind.AMAX),
    "softmax_quantizer._amax": ("B2", ("prob",), ScaleKind.AMAX),
    "kv_c_bmm_quantizer._amax": ("B3", ("k",), ScaleKind.MLA_AMAX),
    "mla_attn.k_pe_bmm_quantizer._amax": ("B3", ("k",), ScaleKind.MLA_AMAX),
    "kv_bmm_quantizer._amax": ("B3", ("k",), ScaleKind.MLA_AMAX),
    "pe_bmm_quantizer._amax": ("B3", ("k",), ScaleKind.MLA_AMAX),
    "cachev_matmul.activation_scale": ("B4", ("v",), ScaleKind.AMAX),
    "q_matmul.activation_scale": ("B5", ("q",), ScaleKind.AMAX),
    "s_matmul.activation_scale": ("B5", ("prob",), ScaleKind.AMAX),
    "q_max": ("B6", ("q",), ScaleKind.RESIDUE),
    "bmm2_output_quantizer._amax": ("B6", ("out",), ScaleKind.RESIDUE),
    "k_global_scale": ("C1", ("k",), ScaleKind.GLOBAL_SCALE),
    "q_zero_point": ("D1", ("q",), ScaleKind.ZERO_POINT),
    "k_proj.k_zero_point": ("D1", ("k",), ScaleKind.ZERO_POINT),
    "cachek_matmul.activation_zero_point": ("D2", ("k",), ScaleKind.ZERO_POINT),
    "s_matmul.activation_zero_point": ("D2", ("prob",), ScaleKind.ZERO_POINT),
    "k_proj.k_bias": ("D3", ("k",), ScaleKind.AFFINE_BIAS),
    "v_bmm_quantizer._bias_value": ("D3", ("v",), ScaleKind.AFFINE_BIAS),
    "kv_cache_scaling_factor": ("E1", ("k", "v"), ScaleKind.MULTIPLIER),
    "kv_quant_orig_scale": ("E1", ("k", "v"), ScaleKind.MULTIPLIER),
    "v_cache_scaling_factor": ("E2", ("v",), ScaleKind.MULTIPLIER),
    "kv_cache_rcp_scaling_factor": ("E3", ("k", "v"), ScaleKind.RECIPROCAL),
    "kv_orig_quant_scale": ("E4", ("k", "v"), ScaleKind.RECIPROCAL),
    "k_proj.kv_cache_scale": ("F1", ("k",), ScaleKind.MULTIPLIER),
    "query_key_value.v_proj.kv_cache_scale": ("F1", ("v",), ScaleKind.MULTIPLIER),
    "attn.k_cache_scale": ("F1", ("k",), ScaleKind.MULTIPLIER),
    "v_proj.kv_cache_offset": ("F2", ("v",), ScaleKind.ZERO_POINT),
    "attn.v_cache_offset": ("F2", ("v",), ScaleKind.ZERO_POINT),
    "fa_q.scale": ("F3", ("q",), ScaleKind.MULTIPLIER),
    "mla_attn.mla_attn.fa_k.scale": ("F3", ("k",), ScaleKind.MULTIPLIER),
    "fa_v.offset": ("F4", ("v",), ScaleKind.ZERO_POINT),
    "kv_smoothing_scale": ("Z", (), ScaleKind.UNKNOWN),
    "attn_mha.k_scale": ("Z", (), ScaleKind.UNKNOWN),
    "kv_b_proj.k_scale": ("Z", (), ScaleKind.UNKNOWN),
    "o_proj.v_scale": ("Z", (), ScaleKind.UNKNOWN),
    "k_bmm_quantizer._pre_quant_scale": ("Z", (), ScaleKind.UNKNOWN),
    "k_amax": ("Z", (), ScaleKind.UNKNOWN),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_is_read_by_its_rule(spelling):
    name = parse_name(f"{A}.{spelling}")
    assert name is not None
    assert (name.rule, name.roles, name.kind) == SPELLINGS[spelling]
    assert (name.attention, name.layer, name.scope) == (A, 3, Scope.DECODER)


def test_every_rule_has_a_spelling_here():
    rules = {rule.id for rule in names._RULES} | {"Z"}
    assert rules == {rule for rule, _, _ in SPELLINGS.values()}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_canonical_key_parses_to_itself(spelling):
    name = parse_name(f"{A}.{spelling}")
    for role in set(name.roles) - {"out"}:
        canonical = canonical_key(name, role)
        again = parse_name(canonical)
        assert canonical == f"{A}.{role}_scale"
        assert canonical_key(again, role) == canonical
        assert (again.roles, again.kind) == ((role,), ScaleKind.MULTIPLIER)
        assert (again.attention, again.layer, again.scope) == (A, 3, name.scope)


# key prefix up to the attention module -> (layer, scope)
PLACES = {
    "model.layers.12.self_attn": (12, Scope.DECODER),
    "language_model.model.layers.0.self_attn": (0, Scope.DECODER),
    "model.language_model.layers.7.self_attn": (7, Scope.DECODER),
    "vision_language_model.model.layers.7.self_attn": (7, Scope.DECODER),
    "thinker.model.layers.2.self_attn": (2, Scope.DECODER),
    "backbone.layers.4.mixer": (4, Scope.DECODER),
    "transformer.h.5.attn": (5, Scope.DECODER),
    "transformer.h.5.attn.attention": (5, Scope.DECODER),
    "layers.6.attn": (6, Scope.DECODER),
    "model.layers.2.temporal_block": (2, Scope.DECODER),
    "model.layers.2.self_attn.1": (2, Scope.DECODER),
    "decoder.block.7.layer.0.SelfAttention": (7, Scope.DECODER),
    "layers.6.attention": (6, Scope.DECODER),
    "decoder.layers.1.self_attention": (1, Scope.DECODER),
    "model.decoder.layers.1.self_attn": (1, Scope.DECODER),
    "ernie.layers.1.self_attn": (1, Scope.DECODER),
    "transformer.encoder.layers.1.self_attention": (1, Scope.DECODER),
    "model.language_model.encoder.layers.1.self_attention": (1, Scope.DECODER),
    "self_attn": (None, Scope.DECODER),
    "mtp.layers.0.self_attn": (0, Scope.DRAFT),
    "model.mtp_layers.1.self_attn": (1, Scope.DRAFT),
    "model.layers.61.mtp_block.self_attn": (61, Scope.DRAFT),
    "eagle_module.layers.0.self_attn": (0, Scope.DRAFT),
    "draft_model.model.layers.0.self_attn": (0, Scope.DRAFT),
    "midlayer.self_attn": (None, Scope.DRAFT),
    "model.decoder.self_attn": (None, Scope.DRAFT),
    "model.decoder.layers.2.encoder_attn": (2, Scope.CROSS),
    "language_model.model.layers.3.cross_attn": (3, Scope.CROSS),
    "decoder.block.7.layer.1.EncDecAttention": (7, Scope.CROSS),
    "encoder.block.7.layer.0.SelfAttention": (7, Scope.VISION),
    "vision_tower.encoder.layers.0.self_attn": (0, Scope.VISION),
    "vision_tower.vision_model.encoder.layers.9.self_attn": (9, Scope.VISION),
    "visual.blocks.0.attn": (0, Scope.VISION),
    "thinker.audio_tower.layers.0.self_attn": (0, Scope.VISION),
    "model.audio_tower.conformer.2.attention.attn": (2, Scope.VISION),
    "model.encoder.layers.0.self_attn": (0, Scope.VISION),
    "vpm.encoder.layers.0.self_attn": (0, Scope.VISION),
    "model.connector.perceiver_resampler.layers.0.self_attn": (0, Scope.VISION),
}


@pytest.mark.parametrize("attention", PLACES)
def test_attention_path_layer_and_scope(attention):
    name = parse_name(f"{attention}.k_proj.k_scale")
    assert (name.attention, name.layer, name.scope) == (attention, *PLACES[attention])


def test_one_scale_on_the_layer_itself_belongs_to_its_attention():
    name = parse_name("model.layers.2.kv_cache_scaling_factor")
    assert (name.attention, name.layer, name.roles) == ("model.layers.2.self_attn", 2, ("k", "v"))


@pytest.mark.parametrize(
    "key",
    [
        f"{A}.{rest}"
        for rest in (
            "q_proj.weight",
            "k_proj.bias",
            "k_proj.weight_scale",
            "k_proj.weight_scale_inv",
            "k_proj.weight_scale_2",
            "k_proj.weight_zero_point",
            "k_proj.weight_global_scale",
            "k_proj.input_scale",
            "k_proj.input_global_scale",
            "k_proj.weight_shape",
            "k_proj.g_idx",
            "k_proj.input_quantizer._amax",
            "k_proj.weight_quantizer._amax",
            "kv_a_proj_with_mqa.output_scale",
            "kv_b_proj.weight_scale",
            "o_proj.output_scale",
            "o_proj.weight_scale",
            "qkv.output_quant_scale",
            "wq.qscale_act",
            "wq_a.scale",
            "in_proj_weight_scale",
            "q_norm.weight",
            "k_norm.scale",
            "per_dim_scale",
            "attn.per_dim_scale",
            "attention_value_scale",
            "logit_scale",
            "scale",
            "sinks",
            "rotary_emb.inv_freq",
            "core_attention._extra_state",
        )
    ]
    + [
        "model.layers.0.altup.correct_output_scale",
        "model.layers.0.mlp.down_proj.input_scale",
        "model.layers.0.mlp.k_scale",
        "encoder.block.0.layer.0.SelfAttention.q.scale",
        "model.layers.0.k_scale",
        "k_scale",
        "",
        ".",
        "self_attn",
    ],
)
def test_look_alike_is_left_to_others(key):
    assert parse_name(key) is None


@pytest.mark.parametrize("part", ["self_attn.", "weight_scale_", "bmm", "k_", "a."])
def test_endless_key_is_read_in_no_time(part):
    start = time.perf_counter()
    assert parse_name(f"self_attn.{part * 200_000}-scale") is None
    assert time.perf_counter() - start < 1.0


def test_number_too_long_for_a_layer_is_no_layer():
    assert parse_name(f"model.layers.{'9' * 400}.self_attn.k_scale").layer is None
    assert parse_name("model.layers.²0.self_attn.k_scale").layer is None


PARTS = st.sampled_from([*SPELLINGS, *PLACES, "layers", "0", "weight", "", "model", "k_scale"])


@given(st.lists(PARTS | st.text(max_size=8), max_size=8).map(".".join))
def test_any_key_parses_or_is_none_and_keeps_its_prefix(key):
    name = parse_name(key)
    if name is not None and name.rule != "E1":
        assert key.startswith(f"{name.attention}.")


@given(st.sampled_from(sorted(SPELLINGS)), st.sampled_from(sorted(PLACES)))
def test_outer_prefix_changes_no_reading(spelling, place):
    name = parse_name(f"{place}.{spelling}")
    prefixed = parse_name(f"wrapper.{place}.{spelling}")
    assert (prefixed.rule, prefixed.roles, prefixed.layer) == (name.rule, name.roles, name.layer)
