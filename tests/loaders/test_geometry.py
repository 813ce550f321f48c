"""Geometry: every spelling of the counts, nested configs, KV sharing, hostile numbers."""

import pytest

from quantattn.errors import CheckpointError
from quantattn.loaders.geometry import Geometry, decoder_config, read_geometry
from quantattn.loaders.json_object import JsonObject


def geometry(**config):
    return read_geometry(JsonObject(config, "config.json"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "num_hidden_layers": 3,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 96,
            },
            (3, 6, 2, 96),
        ),
        ({"n_layer": 3, "n_head": 6, "n_embd": 48}, (3, 6, 6, 8)),
        ({"n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "dim": 48}, (3, 6, 2, 8)),
        (
            {
                "num_layers": 3,
                "num_attention_heads": 6,
                "multi_query_group_num": 2,
                "kv_channels": 16,
            },
            (3, 6, 2, 16),
        ),
        ({"n_layer": 3, "n_head": 6, "multi_query": True}, (3, 6, 1, None)),
        (
            {"n_head": 6, "multi_query": True, "num_kv_heads": 6, "n_embd": 48},
            (None, 6, 1, 8),
        ),
        (
            {
                "n_head": 6,
                "multi_query": True,
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
            },
            (None, 6, 2, None),
        ),
        (
            {
                "num_hidden_layers": 9,
                "decoder_layers": 3,
                "encoder_attention_heads": 9,
                "decoder_attention_heads": 6,
                "d_model": 48,
            },
            (3, 6, 6, 8),
        ),
        (
            {"num_layers": 9, "num_decoder_layers": 3, "num_heads": 6, "d_kv": 5, "d_model": 48},
            (3, 6, 6, 5),
        ),
        ({"num_attention_heads": 6, "hidden_size": 48, "head_size": 5}, (None, 6, 6, 5)),
        ({"num_attention_heads": 6, "num_key_value_heads": [2, 3]}, (None, 6, None, None)),
        ({"num_attention_heads": 6, "num_kv_heads": [2, 3]}, (None, 6, None, None)),
        (
            {
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "swa_num_key_value_heads": 3,
            },
            (None, 6, None, None),
        ),
        ({"num_attention_heads": 6, "block_configs": [{}]}, (None, 6, None, None)),
        ({"num_attention_heads": 6, "num_global_key_value_heads": 2}, (None, 6, None, None)),
        ({}, (None, None, None, None)),
    ],
)
def test_counts_in_every_spelling(config, expected):
    found = geometry(**config)
    counts = (found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim)
    assert counts == expected


@pytest.mark.parametrize(
    "nesting", [["text_config"], ["llm_config"], ["thinker_config", "text_config"]]
)
def test_nested_decoder_config_is_found(nesting):
    config = {"num_hidden_layers": 5}
    for key in reversed(nesting):
        config = {key: config, "vision_config": {"num_hidden_layers": 9}}
    assert geometry(model_type="outer", **config) == Geometry(
        "outer", num_layers=5, attention_layers=(0, 1, 2, 3, 4)
    )


def test_nested_config_without_layers_leaves_the_outer_one():
    config = JsonObject({"num_hidden_layers": 2, "text_config": {"model_type": "x"}}, "config.json")
    assert decoder_config(config) is config


def test_endless_nesting_is_left():
    config = {"num_hidden_layers": 7}
    for _ in range(500):
        config = {"text_config": config}
    assert geometry(**config).num_layers is None


def test_attention_layers_of_hybrids():
    kinds = ["linear_attention", "full_attention", "mamba", "sliding_attention"]
    assert geometry(num_hidden_layers=4, layer_types=kinds).attention_layers == (1, 3)
    assert geometry(layers_block_type=["mamba", "attention"]).attention_layers == (1,)
    assert geometry(layers_block_type=["mamba", "hybrid"]).attention_layers == (1,)
    assert geometry(hybrid_override_pattern="M*-|*E").attention_layers == (1, 3)


def test_recurrent_layers_that_are_counted_from_one():
    linear = {"kda_layers": [1, 3, [], "4"], "full_attn_layers": [2]}
    assert geometry(num_hidden_layers=3, linear_attn_config=linear).attention_layers == (1,)
    odd = {"kda_layers": 3}
    assert geometry(num_hidden_layers=2, linear_attn_config=odd).attention_layers == (0, 1)


def test_shared_layers_read_the_last_earlier_layer_of_their_kind():
    kinds = ["sliding", "sliding", "full", "sliding", "full", "sliding"]
    kinds = [f"{kind}_attention" for kind in kinds]
    found = geometry(num_hidden_layers=6, layer_types=kinds, num_kv_shared_layers=2)
    assert found.kv_shared == {4: 2, 5: 3}


def test_shared_layers_without_kinds_read_the_last_layer_before_them():
    assert geometry(num_hidden_layers=4, num_kv_shared_layers=2).kv_shared == {2: 1, 3: 1}


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**300}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_attention_heads": {}}, "num_attention_heads"),
        ({"num_attention_heads": 2, "hidden_size": float("inf")}, "hidden_size"),
        ({"kv_lora_rank": "x"}, "kv_lora_rank"),
        ({"layer_types": {}}, "layer_types"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"]}, "layer_types"),
        ({"num_hidden_layers": 2, "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "num_kv_shared_layers": 1},
            "num_kv_shared_layers",
        ),
        ({"num_hidden_layers": 3, "hybrid_override_pattern": "M*"}, "hybrid_override_pattern"),
        ({"text_config": []}, "text_config"),
        ({"model_type": 1}, "model_type"),
    ],
)
def test_wrong_config_names_its_member(config, place):
    with pytest.raises(CheckpointError, match=place) as caught:
        geometry(**config)
    assert (caught.value.file, caught.value.place) == ("config.json", place)
