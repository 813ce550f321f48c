"""Which Linears are FP8, as the configs of every producer declare it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantattn.errors import CheckpointError, FormatError
from quantattn.models import LinearScheme, LinearSchemes, read_linear_schemes

CHECKPOINTS = Path(__file__).parent.parent / "data" / "checkpoints"
PROJECTION = "model.layers.1.self_attn.q_proj"
FP8 = {"num_bits": 8, "type": "float"}
QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
STATIC_TENSOR = LinearScheme(False, "static")


def read(declared: dict[str, Any]) -> LinearSchemes:
    return read_linear_schemes({"quantization_config": declared})


def group(weights: dict | None, inputs: dict | None = None, targets: list | None = None) -> dict:
    targets = ["Linear"] if targets is None else targets
    return {"targets": targets, "weights": weights, "input_activations": inputs}


def compressed(**groups: dict) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("base", None),
        ("ct-fp8-kv-tensor", STATIC_TENSOR),
        ("ct-kv-only-tensor", None),
        ("mo-fp8-kvfp8", STATIC_TENSOR),
        ("quark-llama-fp8-kvfp8", STATIC_TENSOR),
        ("quark-llama-fp8-kvattn-eager", STATIC_TENSOR),
        ("autoround-llama-fp8static-attnfp8-autoround", LinearScheme(True, "static")),
        ("llmcompressor-llama-attn-head", None),
        ("modelopt-llama-plainstatedict-fp8-kvfp8-qsoftmax", None),
    ],
)
def test_real_checkpoints_declare(name: str, scheme: LinearScheme | None) -> None:
    schemes = read_linear_schemes(json.loads((CHECKPOINTS / name / "config.json").read_text()))
    assert schemes.of(PROJECTION) == scheme
    assert schemes.of("lm_head") is None


def test_older_modelopt_files_declare_in_hf_quant_config_alone() -> None:
    declared = json.loads((CHECKPOINTS / "mo-fp8-kvfp8" / "hf_quant_config.json").read_text())
    schemes = read_linear_schemes({"model_type": "llama"}, declared)
    assert schemes.of(PROJECTION) == STATIC_TENSOR
    assert schemes.of("lm_head") is None


@pytest.mark.parametrize(
    ("declared", "scheme"),
    [
        (compressed(g=group({**FP8, "strategy": "channel"})), LinearScheme(True, None)),
        (
            compressed(g=group({**FP8, "strategy": "channel"}, {**FP8, "dynamic": True})),
            LinearScheme(True, "dynamic"),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, STATIC_TENSOR),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            LinearScheme(True, "dynamic"),
        ),
        ({"quant_method": "modelopt", "quant_algo": None}, None),
        ({"quant_method": "fp8", "activation_scheme": "static"}, STATIC_TENSOR),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": QUARK}},
            LinearScheme(False, None),
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {**QUARK, "qscheme": "per_channel"},
                    "input_tensors": {**QUARK, "is_dynamic": True},
                },
            },
            LinearScheme(True, "dynamic"),
        ),
        (
            {
                "quant_method": "auto-round",
                "data_type": "fp",
                "bits": 8,
                "group_size": 0,
                "act_bits": 8,
            },
            LinearScheme(False, "dynamic"),
        ),
        (
            {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": -1},
            LinearScheme(True, None),
        ),
        ({}, None),
    ],
)
def test_schemes_of_the_producers(declared: dict, scheme: LinearScheme | None) -> None:
    assert read(declared).of(PROJECTION) == scheme


def test_a_named_target_comes_before_all_linears() -> None:
    named = group({**FP8, "strategy": "channel"}, targets=["re:.*q_proj$"])
    schemes = read(compressed(all=group(FP8), some=named))
    assert schemes.of(PROJECTION).per_channel
    assert not schemes.of("model.layers.1.self_attn.k_proj").per_channel


def test_quark_overrides_by_wildcard() -> None:
    override = {"*q_proj": {"weight": {**QUARK, "qscheme": "per_channel"}}}
    declared = {"global_quant_config": {"weight": QUARK}, "layer_quant_config": override}
    schemes = read({"quant_method": "quark", **declared})
    assert schemes.of(PROJECTION).per_channel
    assert not schemes.of("model.layers.1.self_attn.k_proj").per_channel


@pytest.mark.parametrize(
    ("pattern", "is_ignored"),
    [
        (PROJECTION, True),
        ("model.layers.1", True),
        ("model.layers.1*", True),
        ("*self_attn*", True),
        ("re:.*q_proj", True),
        ("re:q_proj", False),
        ("model.layers.11", False),
        ("q_proj", False),
    ],
)
@pytest.mark.parametrize("field", ["ignored_layers", "modules_to_not_convert"])
def test_ignored_names(pattern: str, is_ignored: bool, field: str) -> None:
    declared = {"quant_method": "fp8", "activation_scheme": "static", field: [pattern]}
    assert (read(declared).of(PROJECTION) is None) == is_ignored


def test_auto_round_quantizes_its_blocks_except_where_it_says_16_bits() -> None:
    declared = {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": -1}
    schemes = read({**declared, "extra_config": {PROJECTION: {"bits": 16}}})
    assert schemes.of(PROJECTION) is None
    assert schemes.of("model.layers.1.self_attn.k_proj") is not None
    assert schemes.of("lm_head") is None


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"quant_method": "awq"}, "quant_method: got 'awq'"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        (compressed(g=group({**FP8, "num_bits": 4})), "config_groups.g.weights.*'num_bits': 4"),
        (compressed(g=group({**FP8, "strategy": "block"})), "'strategy': 'block'"),
        (compressed(g=group(FP8, {"num_bits": 8, "type": "int"})), "input_activations.*'int'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'quant_algo': 'NVFP4'"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}},
            "global_quant_config.weight.*'int4'",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": QUARK, "input_tensors": {"dtype": "int8"}},
            },
            "input_tensors.*'int8'",
        ),
        ({"quant_method": "auto-round", "data_type": "int", "bits": 4}, "'data_type': 'int'"),
        ({"quant_method": "auto-round", "data_type": "fp", "bits": 4}, "'bits': 4"),
        (
            {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "group_size": 128},
            "'group_size': 128",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "'weight_block_size'"),
        ({"quant_method": "fp8", "activation_scheme": "group"}, "'activation_scheme': 'group'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(declared: dict, named: str) -> None:
    with pytest.raises((FormatError, CheckpointError), match=named):
        read(declared)


def test_a_pattern_that_is_no_regular_expression_is_named() -> None:
    with pytest.raises(FormatError, match=r"'re:\[' is no regular expression"):
        LinearSchemes(ignored=("re:[",)).of("lm_head")


@pytest.mark.parametrize(
    "declared",
    [
        "fp8",
        compressed(g=[]),
        compressed(g=group([])),
        {**compressed(), "ignore": "lm_head"},
        {"quant_method": "fp8", "activation_scheme": 1},
        {
            "quant_method": "auto-round",
            "data_type": "fp",
            "bits": 8,
            "group_size": 0,
            "block_name_to_quantize": 5,
        },
    ],
)
def test_fields_of_the_wrong_kind_are_checkpoint_errors(declared: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(declared)
    assert caught.value.file == "config.json"
    assert caught.value.place.startswith("quantization_config")
