"""Declarations: what each real producer's config says, every form, every wrong type."""

import json
from pathlib import Path

import pytest

from quantattn.errors import CheckpointError
from quantattn.loaders.declaration import DECLARATION_FILES, read_declaration

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"


def declaration_of(folder):
    files = {}
    for name in DECLARATION_FILES:
        path = CHECKPOINTS / folder / name
        files[name] = json.loads(path.read_text()) if path.exists() else None
    return read_declaration(files)


def declared(section, **config):
    return read_declaration({"config.json": {**config, "quantization_config": section}})


CT, MO, QUARK = "compressed-tensors", "modelopt", "quark"
TENSOR, HEAD = ("fp8_e4m3", "tensor"), ("fp8_e4m3", "head")
GEMMA = ((4, 4, 2, 32), (0, 1, 2, 3), {2: 0, 3: 1})
LLAMA = ((2, 4, 2, 32), (0, 1), {})

# folder -> method, (kv dtype, strategy), q, prob, (layers, heads, kv heads, head dim),
# attention layers, sharing
REAL = {
    "autoround-llama-fp8static-attnfp8-autoround": ("auto-round", TENSOR, True, False, *LLAMA),
    "base": (None, (None, None), False, False, *LLAMA),
    "ct-fp8-kv-attn-head": (CT, HEAD, False, False, *LLAMA),
    "ct-fp8-kv-tensor": (CT, TENSOR, False, False, *LLAMA),
    "ct-kv-only-tensor": (CT, TENSOR, False, False, *LLAMA),
    "llmcompressor-deepseekv3-kvtensor": (CT, TENSOR, False, False, (2, 4, 4, 16), (0, 1), {}),
    "llmcompressor-gemma3n-kvtensor": (CT, TENSOR, False, False, *GEMMA),
    "llmcompressor-gptoss-kvhead": (CT, HEAD, False, False, *LLAMA),
    "llmcompressor-llama-attn-head": (CT, HEAD, True, False, *LLAMA),
    "llmcompressor-llama-kvfp8asym": (CT, TENSOR, False, False, *LLAMA),
    "llmcompressor-llama-kvhead-sharded22": (
        CT,
        HEAD,
        False,
        False,
        (4, 4, 2, 32),
        (0, 1, 2, 3),
        {},
    ),
    "llmcompressor-mistral3vl-kvtensor": (CT, TENSOR, False, False, *LLAMA),
    "llmcompressor-qwen3-kvtensor": (CT, TENSOR, False, False, *LLAMA),
    "mo-fp8-kvfp8": (MO, TENSOR, False, False, *LLAMA),
    "modelopt-gemma3n-fp8-kvfp8": (MO, TENSOR, False, False, *GEMMA),
    "modelopt-llama-fp8-kvaffine": (MO, TENSOR, False, False, *LLAMA),
    "modelopt-llama-plainstatedict-fp8-kvfp8-qsoftmax": (
        None,
        (None, None),
        False,
        False,
        *LLAMA,
    ),
    "modelopt-nemotronh-fp8-kvfp8": (MO, TENSOR, False, False, (5, 4, 2, 32), (1, 4), {}),
    "quark-llama-fp8-kvattn-eager": (QUARK, TENSOR, True, True, *LLAMA),
    "quark-llama-fp8-kvfp8": (QUARK, TENSOR, False, False, *LLAMA),
}


def test_every_real_checkpoint_is_listed():
    assert {path.name for path in CHECKPOINTS.iterdir() if path.is_dir()} == set(REAL)


@pytest.mark.parametrize("folder", REAL)
def test_real_checkpoint_declares(folder):
    found = declaration_of(folder)
    shape = found.geometry
    assert (
        found.method,
        (found.kv_dtype, found.strategy),
        found.attention_quantized,
        found.prob_quantized,
        (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim),
        shape.attention_layers,
        dict(shape.kv_shared),
    ) == REAL[folder]
    assert not found.dynamic
    assert not found.linear_outputs_quantized
    assert shape.is_mla == (folder == "llmcompressor-deepseekv3-kvtensor")
    assert found.symmetric == (folder != "llmcompressor-llama-kvfp8asym")
    assert bool(found.unsupported) == (folder == "llmcompressor-llama-kvfp8asym")
    assert found.kv_measured == ("pre_rope" if folder.startswith("quark") else None)
    json.dumps(found.to_json())


def test_real_declarations_name_their_source_and_producer():
    compressed = declaration_of("ct-fp8-kv-tensor")
    assert compressed.source == "config.json: quantization_config.kv_cache_scheme"
    assert compressed.producer == "compressed-tensors 0.19.0"
    assert compressed.linear_activations == "static"
    assert compressed.linear_ignored == ("lm_head",)
    assert declaration_of("mo-fp8-kvfp8").producer == "modelopt 0.47.0"
    quark = declaration_of("quark-llama-fp8-kvfp8")
    assert (quark.producer, quark.linear_activations) == ("quark 0.13", "static")
    auto_round = declaration_of("autoround-llama-fp8static-attnfp8-autoround")
    assert auto_round.producer == "auto-round 0.16.1"
    assert auto_round.source == "config.json: quantization_config.static_attention_dtype"
    assert declaration_of("llmcompressor-mistral3vl-kvtensor").geometry.model_type == "mistral3"


@pytest.mark.parametrize("odd", [{"version": 2}, {"producer": "someone"}, {"version": [1]}])
def test_members_that_only_inform_may_have_any_type(odd):
    assert declared({"quant_method": "awq", **odd}).producer == "awq"


def test_a_word_for_the_whole_quantization_is_no_declaration():
    found = read_declaration({"config.json": {"quantization": "w8a8"}})
    assert (found.method, found.kv_dtype) == (None, None)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
OUTPUT = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}


def quark_section(**spec):
    layers = {"*k_proj": {"output_tensors": {**OUTPUT, **spec}}}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": ["*k_proj"]},
        "layer_quant_config": layers,
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, TENSOR),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, TENSOR),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (None, None)),
        ({"quant_method": CT, "kv_cache_scheme": None}, (None, None)),
        ({"quant_method": CT, "kv_cache_scheme": {"type": "float"}}, TENSOR),
        ({"quant_method": CT, "kv_cache_scheme": SCHEME}, TENSOR),
        (
            {
                "quant_method": CT,
                "config_groups": {
                    "g": {
                        "targets": ["LlamaAttention"],
                        "weights": None,
                        "input_activations": SCHEME,
                    }
                },
            },
            TENSOR,
        ),
        (
            {
                "quant_method": CT,
                "config_groups": {"g": {"targets": ["Linear"], "input_activations": SCHEME}},
            },
            (None, None),
        ),
        (
            {
                "attention_input_activations": {
                    "targets": ["OPTAttention"],
                    "input_activations": {**SCHEME, "strategy": "attn_head"},
                }
            },
            HEAD,
        ),
        ({"quant_method": MO, "quantization": {"kv_cache_quant_algo": "FP8"}}, TENSOR),
        ({"quant_method": MO, "kv_cache_quant_algo": None}, (None, None)),
        (quark_section(), TENSOR),
        ({"quant_method": "quark", "export": {"kv_cache_group": []}}, (None, None)),
        (
            {
                "static_kv_dtype": "torch.float8_e4m3fn",
                "static_kv_granularity": "head",
            },
            HEAD,
        ),
        ({"static_kv_dtype": "float16"}, (None, None)),
        ({"static_kv_dtype": "float16", "static_attention_dtype": "fp8"}, TENSOR),
        ({"kv_cache_quant_algo": "NONE"}, (None, None)),
        ({"quantization": "mix_quant", "kv_cache_quant_type": "float8_e4m3fn"}, TENSOR),
        ({"quantization": "wint4", "kv_cache_quant_type": ""}, (None, None)),
        ({"quant_method": "gptq", "bits": 4}, (None, None)),
    ],
)
def test_supported_forms(section, expected):
    found = declared(section)
    assert (found.kv_dtype, found.strategy) == expected
    assert not found.unsupported


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kv_cache_scheme": {**SCHEME, "strategy": "channel"}}, ["channel scales"]),
        ({"kv_cache_scheme": {**SCHEME, "strategy": "group"}}, ["group scales"]),
        ({"kv_cache_scheme": {**SCHEME, "dynamic": True}}, ["dynamic scales"]),
        ({"kv_cache_scheme": {**SCHEME, "symmetric": False}}, ["asymmetric"]),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 4, "type": "int"}}, ["int4"]),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 4, "dynamic": "local"}}, ["nvfp4", "dynamic"]),
        ({"kv_cache_scheme": {**SCHEME, "type": None}}, ["int8"]),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 6}}, ["float6"]),
        ({"kv_cache_scheme": "dynamic"}, ["dynamic scales"]),
        ({"kv_cache_scheme": "NVFP4"}, ["nvfp4"]),
        ({"kv_cache_scheme": "NVFP4_AFFINE"}, ["nvfp4", "asymmetric"]),
        ({"kv_cache_quant_algo": "INT8"}, ["int8"]),
        ({"static_kv_dtype": "nvfp4"}, ["nvfp4"]),
        ({"kv_cache_quant_type": "int8"}, ["int8"]),
        ({"kv_cache_quant_type": "int8_zp"}, ["int8", "asymmetric"]),
        ({"kv_cache_quant_type": "block_wise_fp8"}, ["dynamic scales"]),
        ({"kv_quant_type": "C8", "fa_quant_type": None}, ["int8", "channel scales"]),
        (quark_section(dtype="fp8_e5m2"), ["fp8_e5m2"]),
        (quark_section(qscheme="per_channel"), ["channel scales"]),
        (quark_section(is_dynamic=True), ["dynamic scales"]),
        (quark_section(symmetric=False), ["asymmetric"]),
        ({**quark_section(), "layer_quant_config": {}}, ["unspecified"]),
    ],
)
def test_unsupported_scheme_is_refused_by_name(section, words):
    problems = declared(section).unsupported
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert (problem.code, problem.file) == ("unsupported_scheme", "config.json")
        assert word in problem.message


def test_rotated_keys_are_refused():
    rotation = {"R3": {"type": "hadamard", "apply": [{"targets": ["x"], "location": "k_cache"}]}}
    section = {"kv_cache_scheme": SCHEME, "transform_config": {"config_groups": rotation}}
    (problem,) = declared(section).unsupported
    assert problem.code == "unsupported_scheme"
    assert "R3" in problem.message


def test_other_rotations_leave_the_cache_alone():
    rotation = {"R1": {"type": "hadamard", "apply": [{"location": "weight_input"}]}}
    section = {"kv_cache_scheme": SCHEME, "transform_config": {"config_groups": rotation}}
    assert not declared(section).unsupported


@pytest.mark.parametrize(
    ("files", "source"),
    [
        (
            {"config.json": {"compression_config": {"kv_cache_scheme": SCHEME}}},
            "config.json: compression_config.kv_cache_scheme",
        ),
        (
            {
                "config.json": {
                    "text_config": {
                        "num_hidden_layers": 2,
                        "quantization_config": {"kv_cache_scheme": SCHEME},
                    }
                }
            },
            "config.json: text_config.quantization_config.kv_cache_scheme",
        ),
        (
            {
                "config.json": {"quantization_config": {"quant_method": MO}},
                "hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": "FP8"}},
            },
            "hf_quant_config.json: quantization.kv_cache_quant_algo",
        ),
        (
            {"quantization_config.json": {"static_kv_dtype": "fp8"}},
            "quantization_config.json: static_kv_dtype",
        ),
        (
            {"config.json": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}},
            "config.json: quantization.kv_cache_quant_algo",
        ),
        (
            {"quant_model_description.json": {"kv_cache_type": "C8", "model.x.weight": "W8A8"}},
            "quant_model_description.json: kv_cache_type",
        ),
        (
            {"quant_model_description.json": {"fa_quant_type": "FAKQuant"}},
            "quant_model_description.json: fa_quant_type",
        ),
        ({"params.json": {"quantization": {"qformat_weight": "fp8_e4m3"}}}, None),
        ({"config.json": {"quantization": {"group_size": 64, "bits": 4}}}, None),
        ({"config.json": None}, None),
        ({}, None),
    ],
)
def test_source_of_the_declaration(files, source):
    assert read_declaration(files).source == source


def test_first_section_rules_and_a_contradiction_is_a_problem():
    found = read_declaration(
        {
            "config.json": {"quantization_config": {"kv_cache_scheme": SCHEME}},
            "hf_quant_config.json": {"quantization": {"kv_cache_quant_algo": "NVFP4"}},
        }
    )
    assert found.kv_dtype == "fp8_e4m3"
    assert [(it.code, it.file) for it in found.unsupported] == [
        ("conflict", "hf_quant_config.json")
    ]


@pytest.mark.parametrize(("post_rope", "expected"), [(True, "post_rope"), (False, "pre_rope")])
def test_quark_says_where_k_was_measured(post_rope, expected):
    found = declared({**quark_section(), "kv_cache_post_rope": post_rope})
    assert found.kv_measured == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"config_groups": {"g": {"targets": ["Linear"], "output_activations": SCHEME}}}, True),
        (
            {"config_groups": {"g": {"targets": ["re:.*k_proj"], "output_activations": SCHEME}}},
            False,
        ),
        ({"config_groups": {"g": {"targets": ["Linear"], "output_activations": None}}}, False),
        ({"global_quant_config": {"output_tensors": OUTPUT}}, True),
    ],
)
def test_quantized_linear_outputs(section, expected):
    found = declared(section)
    assert found.linear_outputs_quantized is expected
    assert found.read_context().linear_outputs_quantized is expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"activation_scheme": "dynamic"}, "dynamic"),
        (
            {"config_groups": {"g": {"weights": {}, "input_activations": {"dynamic": True}}}},
            "dynamic",
        ),
        ({"config_groups": {"g": {"weights": {}, "input_activations": None}}}, None),
        ({"global_quant_config": {"input_tensors": {"is_dynamic": True}}}, "dynamic"),
    ],
)
def test_linear_activations(section, expected):
    assert declared(section).linear_activations == expected


def test_context_carries_the_geometry():
    context = declaration_of("llmcompressor-gemma3n-kvtensor").read_context()
    assert (context.kv, context.num_layers, context.shared_layers) == (
        "fp8_e4m3",
        4,
        frozenset({2, 3}),
    )
    assert (context.num_heads, context.num_kv_heads, context.head_dim) == (4, 2, 32)
    assert declaration_of("llmcompressor-deepseekv3-kvtensor").read_context().is_mla


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("config.json", {"quantization_config": []}, "quantization_config"),
        ("config.json", {"text_config": "x"}, "text_config"),
        ("config.json", {"compression_config": 3}, "compression_config"),
        (
            "config.json",
            {"quantization_config": {"kv_cache_scheme": [1]}},
            "quantization_config.kv_cache_scheme",
        ),
        (
            "config.json",
            {"quantization_config": {"kv_cache_scheme": {"num_bits": "8"}}},
            "quantization_config.kv_cache_scheme.num_bits",
        ),
        (
            "config.json",
            {"quantization_config": {"kv_cache_scheme": {"dynamic": "often"}}},
            "quantization_config.kv_cache_scheme.dynamic",
        ),
        (
            "config.json",
            {"quantization_config": {"export": {"kv_cache_group": "*k_proj"}}},
            "quantization_config.export.kv_cache_group",
        ),
        (
            "config.json",
            {"quantization_config": {"config_groups": {"g": []}}},
            "quantization_config.config_groups.g",
        ),
        (
            "config.json",
            {"quantization_config": {"transform_config": {"config_groups": {"g": {"apply": 1}}}}},
            "quantization_config.transform_config.config_groups.g.apply",
        ),
        (
            "config.json",
            {
                "quantization_config": {
                    "transform_config": {"config_groups": {"g": {"apply": [{"location": {}}]}}}
                }
            },
            "quantization_config.transform_config.config_groups.g.apply.0.location",
        ),
        ("hf_quant_config.json", {"quantization": 1}, "quantization"),
        (
            "hf_quant_config.json",
            {"quantization": {"kv_cache_quant_algo": True}},
            "quantization.kv_cache_quant_algo",
        ),
        ("quantization_config.json", {"static_kv_dtype": 8}, "static_kv_dtype"),
        ("quant_model_description.json", {"kv_cache_type": {}}, "kv_cache_type"),
        ("params.json", {"n_heads": "8"}, "n_heads"),
    ],
)
def test_wrong_type_names_file_and_path(name, content, place):
    with pytest.raises(CheckpointError) as caught:
        read_declaration({name: content})
    assert (caught.value.file, caught.value.place) == (name, place)
    assert name in str(caught.value)
    assert place in str(caught.value)
