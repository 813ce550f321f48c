"""What LlamaConfig reads from a config.json, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantattn.errors import CheckpointError, FormatError
from quantattn.models import LlamaConfig, Rope

FIELDS = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read(**fields: Any) -> LlamaConfig:
    return LlamaConfig.from_dict({**FIELDS, **fields})


def test_fields_that_a_config_leaves_out() -> None:
    config = LlamaConfig.from_dict({k: v for k, v in FIELDS.items() if "key_value" not in k})
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (6, 16, 1e-6)
    assert config.rope == Rope(10000.0)
    assert config.sliding_windows == (None,) * 4
    extras = (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm, config.tied_head)
    assert not any(extras)
    assert config.dtype is torch.float32
    assert config.stop_ids == frozenset()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype(key: str) -> None:
    assert read(**{key: "bfloat16"}).dtype is torch.bfloat16


@pytest.mark.parametrize(("stated", "ids"), [(2, {2}), ([2, 7], {2, 7}), (None, set())])
def test_stop_ids(stated: Any, ids: set[int]) -> None:
    assert read(eos_token_id=stated).stop_ids == ids


def test_qwen3_has_heads_of_128_unless_it_says_otherwise() -> None:
    assert read(model_type="qwen3").head_dim == 128


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None,) * 4),
        ({"model_type": "mistral", "sliding_window": 8}, (8,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8}, (None,) * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 8),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_sliding_windows(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(**fields).sliding_windows == windows


def test_llama3_scaling_falls_back_to_the_context_of_the_model() -> None:
    config = read(rope_scaling=LLAMA3, rope_theta=5e5, max_position_embeddings=8192)
    assert config.rope.llama3.original_context == 8192
    assert config.rope.theta == 5e5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gemma3n_text"}, "model_type: got 'gemma3n_text'.*llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: got type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: got type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0},
                "max_position_embeddings": 64,
            },
            "low_freq_factor 1.0 must be below high_freq_factor 1.0",
        ),
        ({"num_key_value_heads": 4}, "6 query heads over 4 KV heads"),
        ({"head_dim": 15}, "width 15"),
        ({"dtype": "float8_e4m3fn"}, "dtype: got 'float8_e4m3fn'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatError, match=named):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"model_type": 3}, "model_type"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"rope_parameters": []}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types",
        ),
    ],
)
def test_a_field_of_the_wrong_kind_is_a_checkpoint_error(fields: dict, place: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(**fields)
    assert caught.value.place == place
    assert place.rpartition(".")[2] in str(caught.value)
