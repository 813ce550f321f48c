"""Checkpoints of many families and producers, written as those write them: each row, each value."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from quantattn import MLAAttention, QuantAttention
from quantattn.loaders import inspect_checkpoint, load_checkpoint
from tests.loaders.toy import CONFIG, KV_SCHEME

LLAMA = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
CT = {"quant_method": "compressed-tensors", "kv_cache_scheme": KV_SCHEME}
PER_HEAD = {**CT, "kv_cache_scheme": {**KV_SCHEME, "strategy": "attn_head"}}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
MISTRAL = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
PARAMS = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "quantization": MISTRAL}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 8, "num_key_value_heads": 4}
GPT = {"n_layer": 2, "n_head": 4, "n_embd": 32}
ENCODER_DECODER = {"encoder_layers": 1, "decoder_layers": 2, "num_hidden_layers": 1, "d_model": 32}

OWN = {"k": "k_scale", "v": "v_scale"}
PROJECTED = {"k": "k_proj.k_scale", "v": "v_proj.v_scale"}
OUTPUTS = {"k": "k_proj.output_scale", "v": "v_proj.output_scale"}
SEPARATE = ("q_proj", "k_proj", "v_proj")
MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


@dataclass(frozen=True)
class Family:
    """How one producer writes one family; two attention modules unless `paths` says otherwise."""

    path: str = "model.layers.{}.self_attn"
    config: dict | None = field(default_factory=lambda: LLAMA)
    section: dict | None = field(default_factory=lambda: CT)
    others: dict[str, dict] = field(default_factory=dict)
    leaves: dict[str, str] = field(default_factory=lambda: OWN)
    projections: tuple[str, ...] = SEPARATE
    weight: str = "weight"
    layers: tuple[object, ...] = (0, 1)
    heads: int | None = None
    more: dict[str, float] = field(default_factory=dict)
    """Tensors that belong to no cache."""
    is_mla: bool = False


FAMILIES = {
    "AutoFP8": Family(section=AUTO_FP8, leaves=OUTPUTS),
    "AutoFP8, one scale": Family(section=AUTO_FP8, leaves=dict.fromkeys("kv", "kv_scale")),
    "GPT-J": Family("transformer.h.{}.attn", GPT, AUTO_FP8, leaves=dict.fromkeys("kv", "kv_scale")),
    "GPT-2": Family("transformer.h.{}.attn", GPT, projections=("c_attn",)),
    "InternLM2": Family("model.layers.{}.attention", projections=("wqkv",)),
    "Falcon": Family(
        "transformer.h.{}.self_attention",
        {"num_attention_heads": 4, "num_kv_heads": 4, "multi_query": True, "hidden_size": 32},
        projections=("query_key_value",),
    ),
    "ChatGLM": Family(
        "transformer.encoder.layers.{}.self_attention", projections=("query_key_value",)
    ),
    "GPTQ weights": Family(weight="qweight"),
    "Phi-3, ModelOpt": Family(
        section=None,
        others={"hf_quant_config.json": MODELOPT},
        leaves=PROJECTED,
        projections=("qkv_proj",),
    ),
    "Llama-4, ModelOpt": Family(
        "language_model.model.layers.{}.self_attn",
        {"text_config": LLAMA, "vision_config": {"num_hidden_layers": 9}},
        section=None,
        others={"hf_quant_config.json": MODELOPT},
        leaves=PROJECTED,
        more={"vision_model.model.layers.0.self_attn.k_proj.k_scale": 0.0},
    ),
    "Idefics": Family(
        "model.text_model.layers.{}.self_attn",
        {"text_config": LLAMA},
        more={"model.connector.perceiver_resampler.layers.0.self_attn.k_scale": 0.0},
    ),
    "Whisper": Family(
        "model.decoder.layers.{}", ENCODER_DECODER, layers=("0.self_attn", "1.encoder_attn")
    ),
    "T5": Family(
        "decoder.block.{}",
        {"num_layers": 2, "num_heads": 4, "d_kv": 8},
        layers=("0.layer.0.SelfAttention", "1.layer.1.EncDecAttention"),
        projections=("q", "k", "v"),
        more={"encoder.block.0.layer.0.SelfAttention.k_scale": 0.0},
    ),
    "LongCat": Family(
        config={**LLAMA, **LATENT}, layers=(0,), path="model.layers.{}.self_attn.1", is_mla=True
    ),
    "Nemotron-H": Family(
        "backbone.layers.{}.mixer",
        {**LLAMA, "num_hidden_layers": 4, "hybrid_override_pattern": "M*-*"},
        section=None,
        others={"hf_quant_config.json": MODELOPT},
        leaves=PROJECTED,
        layers=(1, 3),
        more={"backbone.layers.0.mixer.in_proj.input_scale": 0.5},
    ),
    "Nemotron-NAS": Family(
        config={**LLAMA, "num_key_value_heads": None, "block_configs": [{}, {}]},
        section=PER_HEAD,
        heads=2,
    ),
    "MiMo": Family(
        config={**LLAMA, "num_key_value_heads": 1, "swa_num_key_value_heads": 2},
        section=PER_HEAD,
        heads=2,
    ),
    "EAGLE-3": Family("midlayer.self_attn{}", {**LLAMA, "num_hidden_layers": 1}, layers=("",)),
    "Mistral": Family(
        "layers.{}.attention",
        None,
        section=None,
        others={"params.json": PARAMS},
        leaves={r: f"{r}_fake_quantizer.qscale_act" for r in "qkv"},
        projections=("wq", "wk", "wv"),
    ),
    "Mistral Large 3": Family(
        "layers.{}.attention",
        None,
        section=None,
        others={"params.json": {**PARAMS, "kv_lora_rank": 16}},
        leaves=dict.fromkeys("kv", "kv_fake_quantizer.qscale_act"),
        projections=("wq_a", "wq_b", "wkv_a_with_mqa", "wkv_b"),
        is_mla=True,
    ),
    "TensorRT-LLM": Family(
        "transformer.layers.{}.attention",
        {**LLAMA, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        section=None,
        leaves=dict.fromkeys("kv", "kv_cache_scaling_factor"),
        projections=("qkv",),
    ),
    "ERNIE": Family(
        "ernie.layers.{}.self_attn",
        section={"quantization": "mix_quant", "kv_cache_quant_type": "float8_e4m3fn"},
        leaves=OWN,
    ),
    "auto-round": Family(
        section={"quant_method": "auto-round", "static_kv_dtype": "fp8", "version": 2},
        more={"model.layers.0.self_attn.q_max": 3.0},
    ),
}


def value_of(family: Family, number: int) -> Tensor:
    return torch.tensor([0.011 * number + 0.3 * head + 0.05 for head in range(family.heads or 1)])


def write(family: Family, folder: Path) -> dict[tuple[str, str], Tensor]:
    """Write the checkpoint; give the stored scale of each path and role."""
    tensors = {key: torch.tensor(value) for key, value in family.more.items()}
    stored = {}
    for layer in family.layers:
        path = family.path.format(layer)
        names = MLA if family.is_mla and family.projections is SEPARATE else family.projections
        tensors |= {f"{path}.{name}.{family.weight}": torch.zeros(2, 2) for name in names}
        for role, leaf in family.leaves.items():
            key = f"{path}.{leaf}"
            tensors.setdefault(key, value_of(family, len(tensors)))
            stored[path, role] = tensors[key]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    documents = dict(family.others)
    if family.config is not None:
        section = {} if family.section is None else {"quantization_config": family.section}
        documents["config.json"] = {**family.config, **section}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    return stored


def build(family: Family) -> nn.Module:
    model = nn.Module()
    for layer in family.layers:
        parent = model
        *outer, leaf = family.path.format(layer).split(".")
        for part in outer:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        granularity = "head" if family.heads else "tensor"
        attention = (
            MLAAttention(4, 16, 8, softmax_scale=0.1)
            if family.is_mla
            else QuantAttention(4, 8, num_kv_heads=2, scale_granularity=granularity)
        )
        parent.add_module(leaf, attention)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_and_value_is_shown(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    stored = write(family, tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    assert inspection.problems == ()
    rows = {(row.layer, row.role): row for row in inspection.layers}
    paths = {family.path.format(layer) for layer in family.layers}
    assert set(rows) == {(path, role) for path in paths for role in ("q", "k", "v", "prob")}
    for place, row in rows.items():
        if place not in stored:
            assert (row.value, row.source) == (1.0, "default")
        elif not family.is_mla:
            numbers = stored[place].tolist()
            assert row.value == (numbers if family.heads else numbers[0])
            assert row.source == "checkpoint"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_gets_its_scales(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    stored = write(family, tmp_path)
    model = build(family)
    report = load_checkpoint(model, tmp_path)
    modules = dict(model.named_modules())
    for (path, role), value in stored.items():
        if family.is_mla:
            value = torch.maximum(stored[path, "k"], stored[path, "v"])
        numbers = value.tolist()
        assert modules[path].host_scale(role) == (numbers if family.heads else numbers[0])
    assert not set(report.unexpected) & {row.key for row in report.loaded}


@pytest.mark.parametrize("name", ["EAGLE-3", "Mistral Large 3", "T5", "GPTQ weights", "InternLM2"])
def test_layers_without_scales_have_rows_too(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    write(Family(**{**vars(family), "leaves": {}}), tmp_path)
    rows = inspect_checkpoint(tmp_path).layers
    assert {row.layer for row in rows} == {family.path.format(n) for n in family.layers}
    assert {row.source for row in rows} == {"default"}


def test_scale_on_a_layer_without_attention_is_refused(tmp_path: Path) -> None:
    key = "backbone.layers.0.mixer.k_proj.k_scale"
    write(Family(**{**vars(FAMILIES["Nemotron-H"]), "more": {key: 0.5}}), tmp_path)
    assert [(p.code, p.key) for p in inspect_checkpoint(tmp_path).problems] == [("no_layer", key)]


def test_reciprocal_beside_its_multiplier_is_no_conflict(tmp_path: Path) -> None:
    family = FAMILIES["TensorRT-LLM"]
    stored = write(family, tmp_path)
    file = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(file)
    for number in range(1, 40):
        value = torch.tensor([0.0013 * number])
        for path, _ in stored:
            state[f"{path}.kv_cache_scaling_factor"] = value.clone()
            state[f"{path}.kv_cache_rcp_scaling_factor"] = 1.0 / value
        safetensors.torch.save_file(state, file)
        inspection = inspect_checkpoint(tmp_path)
        assert inspection.problems == ()
        assert {r.value for r in inspection.layers if r.role in "kv"} == {value.item()}
    state["transformer.layers.0.attention.kv_cache_rcp_scaling_factor"] *= 1.001
    safetensors.torch.save_file(state, file)
    assert [p.code for p in inspect_checkpoint(tmp_path).problems] == ["conflict", "conflict"]


def test_scale_files_beside_a_checkpoint_are_pointed_out(tmp_path: Path) -> None:
    write(FAMILIES["auto-round"], tmp_path)
    assert inspect_checkpoint(tmp_path).warnings == ()
    (tmp_path / "kv_cache_scales.json").write_text("{}")
    assert "kv_cache_scales.json" in inspect_checkpoint(tmp_path).warnings[0]
