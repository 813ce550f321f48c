"""Every key-level vector of the matching rules, and its neighbours."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from quantattn.errors import ScaleError
from quantattn.loaders.declaration import DECLARATION_FILES, read_declaration
from quantattn.loaders.names import Scope, parse_name
from quantattn.loaders.resolution import Outcome, resolve
from quantattn.loaders.values import ReadContext

BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

DEFAULTS = {
    "kv": "fp8",
    "method": "compressed-tensors",
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
}


class Vector(NamedTuple):
    number: int
    key: str
    shape: list
    dtype: torch.dtype
    value: object
    context: dict
    expected: tuple


VECTORS = [
    Vector(
        1,
        "model.layers.0.self_attn.k_scale",
        [1],
        BF16,
        0.03125,
        {},
        ("values", {"layers.0.attn.k_scale": 0.03125}),
    ),
    Vector(
        2,
        "model.layers.0.self_attn.v_scale",
        [],
        F32,
        0.0078125,
        {},
        ("values", {"layers.0.attn.v_scale": 0.0078125}),
    ),
    Vector(
        3,
        "model.layers.0.self_attn.q_scale",
        [1, 1],
        F16,
        0.0625,
        {},
        ("values", {"layers.0.attn.q_scale": 0.0625}),
    ),
    Vector(
        4,
        "model.layers.0.self_attn.k_scale",
        [2, 1, 1],
        BF16,
        [0.5, 0.25],
        {},
        ("values", {"layers.0.attn.k_scale": [0.5, 0.25]}),
    ),
    Vector(
        5,
        "model.layers.0.self_attn.q_scale",
        [8, 1, 1],
        BF16,
        [1, 2, 3, 4, 5, 6, 7, 8],
        {},
        ("values", {"layers.0.attn.q_scale": [1, 2, 3, 4, 5, 6, 7, 8]}),
    ),
    Vector(
        6,
        "model.layers.0.self_attn.k_scale",
        [1, 2, 1, 1],
        F32,
        [0.5, 0.25],
        {},
        ("values", {"layers.0.attn.k_scale": [0.5, 0.25]}),
    ),
    Vector(
        7,
        "model.layers.0.self_attn.k_scale",
        [3, 1, 1],
        BF16,
        [1, 1, 1],
        {},
        ("problem", "granularity"),
    ),
    Vector(9, "model.layers.0.self_attn.k_scale", [1], F32, 0, {}, ("problem", "nonpositive")),
    Vector(10, "model.layers.0.self_attn.k_scale", [1], F32, -1, {}, ("problem", "nonpositive")),
    Vector(12, "model.layers.0.self_attn.k_scale", [1], F8, 1, {}, ("problem", "dtype")),
    Vector(
        13,
        "model.layers.0.self_attn.k_proj.k_scale",
        [],
        F32,
        0.02,
        {"method": "modelopt"},
        ("values", {"layers.0.attn.k_scale": 0.02}),
    ),
    Vector(
        14,
        "language_model.model.layers.3.self_attn.v_proj.v_scale",
        [],
        F32,
        0.5,
        {"method": "modelopt"},
        ("values", {"layers.3.attn.v_scale": 0.5}),
    ),
    Vector(
        15,
        "model.language_model.layers.3.self_attn.k_proj.k_scale",
        [1],
        F32,
        1,
        {"method": "modelopt"},
        ("values", {"layers.3.attn.k_scale": 1}),
    ),
    Vector(
        17,
        "model.layers.0.self_attn.k_proj.v_scale",
        [],
        F32,
        0.5,
        {"method": "modelopt"},
        ("problem", "role_mismatch"),
    ),
    Vector(
        18,
        "model.layers.0.self_attn.qkv_proj.k_scale",
        [],
        F32,
        0.5,
        {},
        ("values", {"layers.0.attn.k_scale": 0.5}),
    ),
    Vector(
        20,
        "model.layers.0.self_attn.kv_scale",
        [],
        F32,
        0.25,
        {"method": "fp8"},
        ("values", {"layers.0.attn.k_scale": 0.25, "layers.0.attn.v_scale": 0.25}),
    ),
    Vector(
        21,
        "model.layers.0.self_attn.k_proj.output_scale",
        [],
        F32,
        0.125,
        {"method": "quark"},
        ("values", {"layers.0.attn.k_scale": 0.125}),
    ),
    Vector(
        22,
        "model.layers.0.self_attn.k_proj.output_scale",
        [],
        F32,
        1,
        {"kv": None, "method": "quanto"},
        ("linear", None),
    ),
    Vector(
        24,
        "model.layers.0.self_attn.prob_output_scale",
        [],
        F32,
        0.00223,
        {"method": "quark"},
        ("values", {"layers.0.attn.p_scale": 0.00223}),
    ),
    Vector(25, "model.layers.0.self_attn.o_proj.input_scale", [], F32, 0.5, {}, ("linear", None)),
    Vector(
        26,
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        [4, 4],
        F32,
        [1] * 16,
        {"method": "fp8"},
        ("linear", None),
    ),
    Vector(
        27,
        "model.layers.0.self_attn.k_cache.scale",
        [1],
        F32,
        3.5,
        {},
        ("problem", "ambiguous_cache_scale"),
    ),
    Vector(
        28,
        "model.layers.0.self_attn.k_cache.scale",
        [1],
        F32,
        0.0078125,
        {"cache_scale_means": "scale"},
        ("values", {"layers.0.attn.k_scale": 0.0078125}),
    ),
    Vector(
        29,
        "model.layers.0.self_attn.k_cache.scale",
        [1],
        F32,
        448,
        {"cache_scale_means": "amax"},
        ("values", {"layers.0.attn.k_scale": 1}),
    ),
    Vector(
        31,
        "layers.1.attention.kv_fake_quantizer.qscale_act",
        [],
        BF16,
        0.5,
        {},
        ("values", {"layers.1.attn.k_scale": 0.5, "layers.1.attn.v_scale": 0.5}),
    ),
    Vector(32, "layers.1.attention.wq.qscale_act", [], BF16, 0.5, {}, ("linear", None)),
    Vector(
        33,
        "model.layers.0.self_attn.k_bmm_quantizer._amax",
        [],
        F32,
        224,
        {"method": "modelopt"},
        ("values", {"layers.0.attn.k_scale": 0.5}),
    ),
    Vector(
        35,
        "model.layers.0.self_attn.k_global_scale",
        [1],
        F32,
        2688,
        {"kv": "nvfp4"},
        ("problem", "ambiguous_global_scale"),
    ),
    Vector(
        36,
        "model.layers.0.self_attn.k_global_scale",
        [1],
        F32,
        256,
        {"kv": "nvfp4", "global_scale_means": "reciprocal"},
        ("values", {"layers.0.attn.k_scale": 0.00390625}),
    ),
    Vector(
        37,
        "model.layers.0.self_attn.k_global_scale",
        [1],
        F32,
        0.00390625,
        {"kv": "nvfp4", "global_scale_means": "multiplier"},
        ("values", {"layers.0.attn.k_scale": 0.00390625}),
    ),
    Vector(
        39,
        "model.layers.0.self_attn.v_zero_point",
        [2, 1, 1],
        BF16,
        [0, 3],
        {},
        ("problem", "asymmetric"),
    ),
    Vector(
        40,
        "model.layers.0.self_attn.k_proj.k_bias",
        [128],
        BF16,
        [0.1] * 128,
        {"kv": "nvfp4", "method": "modelopt"},
        ("problem", "affine_kv"),
    ),
    Vector(
        41,
        "transformer.layers.0.attention.kv_cache_scaling_factor",
        [1],
        F32,
        0.5,
        {"method": "trtllm"},
        ("values", {"layers.0.attn.k_scale": 0.5, "layers.0.attn.v_scale": 0.5}),
    ),
    Vector(
        42,
        "layers.0.attention.kv_orig_quant_scale",
        [1],
        F32,
        4,
        {"method": "trtllm", "kv": "int8"},
        ("values", {"layers.0.attn.k_scale": 0.25, "layers.0.attn.v_scale": 0.25}),
    ),
    Vector(
        44,
        "ernie.layers.0.self_attn.cachek_matmul.activation_scale",
        [2],
        F32,
        [127, 63.5],
        {"kv": "int8", "method": "paddle"},
        ("values", {"layers.0.attn.k_scale": [1, 0.5]}),
    ),
    Vector(
        47,
        "model.layers.0.self_attn.attn.k_scale",
        [],
        F32,
        0.5,
        {},
        ("values", {"layers.0.attn.k_scale": 0.5}),
    ),
    Vector(
        48,
        "model.layers.0.self_attn.attn._k_scale",
        [],
        F32,
        0.5,
        {},
        ("problem", "runtime_buffer"),
    ),
    Vector(
        50,
        "model.layers.0.self_attn.v_proj.v_scale",
        [],
        F32,
        0.5,
        {"is_mla": True, "method": "modelopt"},
        ("ignored", "mla_v_scale"),
    ),
    Vector(
        51,
        "model.layers.4.self_attn.k_proj.k_scale",
        [],
        F32,
        0.5,
        {"method": "modelopt"},
        ("values", {"draft.layers.4.attn.k_scale": 0.5}),
    ),
    Vector(
        53,
        "vision_tower.encoder.layers.0.self_attn.k_proj.k_scale",
        [],
        F32,
        0.5,
        {"method": "modelopt"},
        ("ignored", "vision_no_cache"),
    ),
    Vector(
        55,
        "model.layers.3.self_attn.k_proj.k_scale",
        [],
        F32,
        0.5,
        {"shared_layers": frozenset({3}), "method": "modelopt"},
        ("ignored", "shared_kv_layer"),
    ),
    Vector(
        56,
        "transformer.h.0.attn.k_scale",
        [1],
        BF16,
        0.5,
        {},
        ("values", {"layers.0.attn.k_scale": 0.5}),
    ),
    Vector(
        57,
        "model.layers.0.self_attn.k_scale",
        [1],
        BF16,
        0.5,
        {"kv": None},
        ("ignored", "kv_not_declared"),
    ),
    Vector(
        60,
        "model.layers.0.self_attn.kv_smoothing_scale",
        [1],
        F32,
        1,
        {},
        ("problem", "unknown_scale"),
    ),
]


def tensor_of(value, shape, dtype=F32):
    values = torch.tensor(value, dtype=torch.float32)
    return values.expand(shape).to(dtype) if values.dim() == 0 else values.reshape(shape).to(dtype)


def resolved(key, tensor, **changes):
    """(outcome, code or target -> value), with targets spelled as in the vectors' table."""
    name = parse_name(key)
    if name is None:
        return "linear", None
    result = resolve(name, tensor, ReadContext(**{**DEFAULTS, **changes}))
    if result.outcome is not Outcome.VALUES:
        return result.outcome.value, result.code
    draft = "draft." if result.name.scope is Scope.DRAFT else ""
    module = "cross_attn" if result.name.scope is Scope.CROSS else "attn"
    return "values", {
        f"{draft}layers.{result.name.layer}.{module}.{'p' if role == 'prob' else role}_scale": value
        for role, value in result.values.items()
    }


def assert_expected(result, expected, dtype):
    assert result[0] == expected[0]
    if expected[0] != "values":
        assert result[1] == expected[1]
        return
    assert set(result[1]) == set(expected[1])
    for target, wanted in expected[1].items():
        rounded = torch.tensor(wanted, dtype=dtype).float().tolist()
        assert result[1][target] == rounded, target


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector.number))
def test_key_vector(vector):
    tensor = tensor_of(vector.value, vector.shape, vector.dtype)
    result = resolved(vector.key, tensor, **vector.context)
    assert_expected(result, vector.expected, vector.dtype)


def test_o_proj_input_scale_is_left_to_the_linear_and_aliased_to_the_output():
    name = parse_name("model.layers.0.self_attn.o_proj.input_scale")
    result = resolve(name, torch.tensor(0.5), ReadContext(**DEFAULTS))
    assert result.outcome is Outcome.LINEAR
    assert result.name.roles == ("out",)
    assert not result.values


ATTENTION = "model.layers.1.self_attn"
TARGET = "layers.1.attn"

VALUES = [
    ("backbone.layers.1.mixer.k_proj.k_scale", 0.02, {}, {"layers.1.attn.k_scale": 0.02}),
    ("layers.2.attn.v_scale", 0.03, {}, {"layers.2.attn.v_scale": 0.03}),
    (f"{ATTENTION}.qkqkv_proj.v_scale", 0.5, {}, {f"{TARGET}.v_scale": 0.5}),
    (f"{ATTENTION}.q_proj.q_scale", 0.5, {}, {f"{TARGET}.q_scale": 0.5}),
    (f"{ATTENTION}.q_proj.output_scale", 0.125, {"method": "quark"}, {f"{TARGET}.q_scale": 0.125}),
    (f"{ATTENTION}.prob_scale", 0.004, {}, {f"{TARGET}.p_scale": 0.004}),
    (f"{ATTENTION}.q.scale", 0.25, {}, {f"{TARGET}.q_scale": 0.25}),
    (f"{ATTENTION}.k_bmm_quantizer._amax", 63.5, {"kv": "int8"}, {f"{TARGET}.k_scale": 0.5}),
    (f"{ATTENTION}.q_bmm_quantizer._amax", 112.0, {}, {f"{TARGET}.q_scale": 0.25}),
    (f"{ATTENTION}.p_bmm_quantizer._amax", 1.0, {}, {f"{TARGET}.p_scale": 1 / 448}),
    (f"{ATTENTION}.softmax_quantizer._amax", 0.875, {}, {f"{TARGET}.p_scale": 0.001953125}),
    (f"{ATTENTION}.core_attention.v_bmm_quantizer._amax", 56.0, {}, {f"{TARGET}.v_scale": 0.125}),
    (
        "decoder.layers.1.self_attention.core_attention.k_bmm_quantizer._amax",
        56.0,
        {},
        {f"{TARGET}.k_scale": 0.125},
    ),
    (
        "transformer.layers.1.attention.kv_cache_rcp_scaling_factor",
        8.0,
        {"method": "trtllm"},
        {f"{TARGET}.k_scale": 0.125, f"{TARGET}.v_scale": 0.125},
    ),
    (
        "layers.1.attention.kv_quant_orig_scale",
        0.25,
        {"kv": "int8"},
        {f"{TARGET}.k_scale": 0.25, f"{TARGET}.v_scale": 0.25},
    ),
    (f"{ATTENTION}.k_cache_scaling_factor", 0.25, {}, {f"{TARGET}.k_scale": 0.25}),
    (
        "model.layers.1.kv_cache_scaling_factor",
        0.25,
        {},
        {f"{TARGET}.k_scale": 0.25, f"{TARGET}.v_scale": 0.25},
    ),
    (f"{ATTENTION}.q_matmul.activation_scale", 63.5, {"kv": "int8"}, {f"{TARGET}.q_scale": 0.5}),
    (f"{ATTENTION}.s_matmul.activation_scale", 63.5, {"kv": "int8"}, {f"{TARGET}.p_scale": 0.5}),
    ("layers.1.attention.q_fake_quantizer.qscale_act", 0.5, {}, {f"{TARGET}.q_scale": 0.5}),
    (
        f"{ATTENTION}.kv_c_bmm_quantizer._amax",
        224.0,
        {"is_mla": True},
        {f"{TARGET}.k_scale": 0.5},
    ),
    (f"{ATTENTION}.k_proj.k_scale", 0.5, {"is_mla": True}, {f"{TARGET}.k_scale": 0.5}),
    (f"{ATTENTION}.mla_attn.mla_attn.k_scale", 0.5, {"is_mla": True}, {f"{TARGET}.k_scale": 0.5}),
    (f"{ATTENTION}.attn_mqa.k_scale", 0.5, {"is_mla": True}, {f"{TARGET}.k_scale": 0.5}),
    (
        f"{ATTENTION}.kv_scale",
        0.5,
        {"is_mla": True},
        {f"{TARGET}.k_scale": 0.5, f"{TARGET}.v_scale": 0.5},
    ),
    ("mtp.layers.0.self_attn.k_proj.k_scale", 0.5, {}, {"draft.layers.0.attn.k_scale": 0.5}),
    ("model.decoder.self_attn.k_proj.k_scale", 0.5, {}, {"draft.layers.None.attn.k_scale": 0.5}),
    ("model.decoder.layers.1.encoder_attn.k_scale", 0.5, {}, {"layers.1.cross_attn.k_scale": 0.5}),
    ("transformer.encoder.layers.1.self_attention.k_scale", 0.5, {}, {f"{TARGET}.k_scale": 0.5}),
    (f"{ATTENTION}.q_scale", 0.5, {"shared_layers": frozenset({1})}, {f"{TARGET}.q_scale": 0.5}),
]


@pytest.mark.parametrize(("key", "stored", "context", "expected"), VALUES, ids=lambda v: str(v))
def test_value_reaches_its_role(key, stored, context, expected):
    result = resolved(key, torch.tensor(stored), **context)
    assert_expected(result, ("values", expected), F32)


REFUSED = [
    ("k_scale", torch.tensor([float("nan")]), {}, "nonfinite"),
    ("k_scale", torch.tensor([float("inf")]), {}, "nonfinite"),
    ("k_scale", torch.tensor([-float("inf")]), {}, "nonfinite"),
    ("k_scale", torch.tensor([[0.5], [0.0]]), {}, "nonpositive"),
    ("k_scale", torch.tensor(1e-45), {}, "nonfinite"),
    ("k_scale", torch.tensor(3.4e38), {}, "nonfinite"),
    ("k_scale", torch.tensor(1e-320, dtype=torch.float64), {}, "nonfinite"),
    ("k_bmm_quantizer._amax", torch.tensor(0.0), {}, "nonpositive"),
    ("k_bmm_quantizer._amax", torch.tensor(0.5), {"kv": "mxfp4"}, "unsupported_scheme"),
    ("kv_orig_quant_scale", torch.tensor(0.0), {}, "nonpositive"),
    ("kv_orig_quant_scale", torch.tensor(3e38), {}, "nonfinite"),
    ("kv_orig_quant_scale", torch.tensor(1e-320, dtype=torch.float64), {}, "nonfinite"),
    ("k_scale", torch.full((2, 64), 0.5), {}, "per_channel"),
    ("k_scale", torch.full((1, 2, 1, 64), 0.5), {}, "per_channel"),
    ("k_proj.kv_cache_scale", torch.full((128,), 0.5), {"kv": "int8"}, "per_channel"),
    ("q_scale", torch.full((512,), 0.5), {}, "per_channel"),
    ("k_scale", torch.full((8,), 0.5), {}, "granularity"),
    ("q_scale", torch.full((4, 1, 1), 0.5), {}, "granularity"),
    ("prob_scale", torch.full((8,), 0.5), {}, "granularity"),
    ("k_scale", torch.full((4, 4), 0.5), {}, "shape"),
    ("k_scale", torch.empty(0), {}, "shape"),
    ("k_scale", torch.tensor(1), {}, "dtype"),
    ("k_scale", torch.tensor(True), {}, "dtype"),
    ("k_scale", torch.empty(1, device="meta"), {}, "dtype"),
    ("k_scale", torch.empty(2000, 2000, device="meta"), {}, "shape"),
    ("k_zero_point", torch.empty(10**7, dtype=torch.int8, device="meta"), {}, "shape"),
    ("k_zero_point", torch.tensor([0, 3]).to(torch.uint16), {}, "asymmetric"),
    ("k_zero_point", torch.tensor([1e-300], dtype=torch.float64), {}, "asymmetric"),
    ("k_zero_point", torch.tensor([1j], dtype=torch.complex64), {}, "asymmetric"),
    ("k_scale", torch.tensor(0.5), {"attention_layers": frozenset({0, 2})}, "no_layer"),
    ("v_proj.k_scale", torch.tensor(0.5), {}, "role_mismatch"),
    ("q_proj.v_scale", torch.tensor(0.5), {}, "role_mismatch"),
    ("_prob_scale", torch.tensor(0.5), {}, "runtime_buffer"),
    ("v_cache.scale", torch.tensor(0.5), {}, "ambiguous_cache_scale"),
    ("v_global_scale", torch.tensor(0.5), {}, "global_scale_without_nvfp4"),
    ("kv_c_bmm_quantizer._amax", torch.tensor(0.5), {}, "mla_name_on_mha"),
    ("pe_bmm_quantizer._amax", torch.tensor(0.5), {}, "mla_name_on_mha"),
    ("k_proj.kv_cache_offset", torch.tensor([0, 7], dtype=torch.int8), {}, "asymmetric"),
    ("fa_k.offset", torch.tensor([[0], [-1]], dtype=torch.int8), {}, "asymmetric"),
    ("k_zero_point", torch.tensor([18.0]).to(F8), {}, "asymmetric"),
    ("k_zero_point", torch.tensor([float("nan")]), {}, "asymmetric"),
    ("v_proj.v_bias", torch.full((1, 2, 1, 64), 0.1), {}, "affine_kv"),
    ("o_proj.k_scale", torch.tensor(0.5), {}, "unknown_scale"),
    ("k_bmm_quantizer._pre_quant_scale", torch.tensor(0.5), {}, "unknown_scale"),
    ("k_scale", torch.tensor([[0.5], [0.25]]), {"is_mla": True}, "granularity"),
    ("v_scale", torch.tensor(float("nan")), {"is_mla": True}, "nonfinite"),
]


@pytest.mark.parametrize(
    ("name", "tensor", "context", "code"), REFUSED, ids=lambda v: str(v)[:40].replace("\n", "")
)
def test_refused_with_its_code_and_key(name, tensor, context, code):
    key = f"{ATTENTION}.{name}"
    assert resolved(key, tensor, **context) == ("problem", code)
    problem = resolve(parse_name(key), tensor, ReadContext(**{**DEFAULTS, **context})).problem("f")
    assert (problem.key, problem.file) == (key, "f")
    assert key in problem.message


def test_runtime_buffer_is_a_multiplier_once_accepted():
    result = resolved(f"{ATTENTION}.attn._v_scale", torch.tensor(0.5), accept_runtime_buffers=True)
    assert result == ("values", {f"{TARGET}.v_scale": 0.5})


@pytest.mark.parametrize("argument", ["cache_scale_means", "global_scale_means"])
def test_meaning_must_be_one_of_the_words(argument):
    with pytest.raises(ScaleError, match=f"{argument}: got 'Amax'"):
        ReadContext(**{argument: "Amax"})


def test_scale_without_a_layer_number_is_refused():
    assert resolved("self_attn.k_scale", torch.tensor(0.5)) == ("problem", "no_layer")


IGNORED = [
    (f"{ATTENTION}.q_max", torch.tensor(3.5), {}, "calibration_residue"),
    (f"{ATTENTION}.k_zero_point", torch.zeros(2, 1, 1).to(F8), {}, "zero_point"),
    (f"{ATTENTION}.k_zero_point", torch.zeros(2).to(torch.uint64), {}, "zero_point"),
    (f"{ATTENTION}.fa_q.offset", torch.zeros(8, 1, dtype=torch.int8), {}, "zero_point"),
    (f"{ATTENTION}.cachek_matmul.activation_zero_point", torch.zeros(2), {}, "zero_point"),
    (f"{ATTENTION}.k_scale", torch.tensor(float("nan")), {"kv": None}, "kv_not_declared"),
    (f"{ATTENTION}.k_proj.k_bias", torch.ones(128), {"kv": None}, "kv_not_declared"),
    (
        f"{ATTENTION}.k_scale",
        torch.tensor(0.0),
        {"shared_layers": frozenset({1})},
        "shared_kv_layer",
    ),
    (
        f"{ATTENTION}.kv_scale",
        torch.tensor(0.5),
        {"shared_layers": frozenset({1})},
        "shared_kv_layer",
    ),
    ("audio_tower.conformer.0.attention.attn.q_scale", torch.ones(64), {}, "vision_no_cache"),
    ("model.visual.blocks.0.attn.k_bmm_quantizer._amax", torch.tensor(0.5), {}, "vision_no_cache"),
    ("model.encoder.layers.0.self_attn.v_proj.v_scale", torch.tensor(0.5), {}, "vision_no_cache"),
]


@pytest.mark.parametrize(("key", "tensor", "context", "code"), IGNORED, ids=lambda v: str(v)[:40])
def test_left_aside_with_its_code(key, tensor, context, code):
    assert resolved(key, tensor, **context) == ("ignored", code)


LINEAR = [
    (f"{ATTENTION}.k_proj.output_scale", {"linear_outputs_quantized": True}),
    (f"{ATTENTION}.k_proj.output_scale", {"method": "quanto"}),
    (f"{ATTENTION}.v_proj.output_scale", {"kv": None}),
    (f"{ATTENTION}.o_proj.output_scale", {}),
    (f"{ATTENTION}.kv_smoothing_scale", {"kv": None}),
    ("model.layers.0.altup.correct_output_scale", {}),
    ("model.layers.0.mlp.gate_proj.k_scale", {}),
]


@pytest.mark.parametrize(("key", "context"), LINEAR)
def test_left_to_the_linear_loader(key, context):
    assert resolved(key, torch.tensor(0.5), **context) == ("linear", None)


def test_mla_v_scale_is_set_aside_with_its_value():
    name = parse_name(f"{ATTENTION}.v_proj.v_scale")
    result = resolve(name, torch.tensor(0.375), ReadContext(**{**DEFAULTS, "is_mla": True}))
    assert (result.outcome, result.code) == (Outcome.IGNORED, "mla_v_scale")
    assert dict(result.values) == {"v": 0.375}


def test_draft_layer_is_not_taken_for_a_shared_decoder_layer():
    key = "mtp.layers.1.self_attn.k_scale"
    outcome, _ = resolved(key, torch.tensor(0.5), shared_layers=frozenset({1}))
    assert outcome == "values"


def test_every_layer_is_a_decoder_layer_where_the_model_is_unknown():
    name = parse_name("model.layers.4.self_attn.k_scale")
    assert resolve(name, torch.tensor(0.5), ReadContext(kv="fp8")).name.scope is Scope.DECODER


CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
FAULTS = {
    "llmcompressor-llama-attn-head": {"nonpositive"},
    "llmcompressor-llama-kvfp8asym": {"asymmetric"},
    "modelopt-llama-fp8-kvaffine": {"affine_kv"},
}


def resolutions_of(folder):
    """(resolution, tensor) of every attention scale of a real checkpoint."""
    files = {
        name: json.loads((folder / name).read_text())
        for name in DECLARATION_FILES
        if (folder / name).exists()
    }
    context = read_declaration(files).read_context()
    for shard in folder.glob("*.safetensors"):
        for key, tensor in load_file(shard).items():
            if (name := parse_name(key)) is not None:
                yield resolve(name, tensor, context), tensor


@pytest.mark.parametrize(
    "folder", sorted(it for it in CHECKPOINTS.iterdir() if it.is_dir()), ids=lambda it: it.name
)
def test_real_checkpoint_is_read_exactly_or_refused_by_key(folder):
    codes = set()
    for found, tensor in resolutions_of(folder):
        codes |= {found.code} if found.outcome is Outcome.PROBLEM else set()
        for value in found.values.values():
            stored = tensor.float().flatten().tolist()
            assert value == (stored if len(stored) > 1 else stored[0])
    assert codes == FAULTS.get(folder.name, set())
