"""inspect_checkpoint and load_checkpoint on files that the released producers wrote.

The oracle is the safetensors library and the producer's own naming, written out below.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from quantattn import MLAAttention, QuantAttention, RefusedCheckpointError
from quantattn.loaders import inspect_checkpoint, load_checkpoint
from tests.loaders.toy import bits

ROOT = Path(__file__).parents[1] / "data" / "checkpoints"
KV = {"k": "k_scale", "v": "v_scale"}
QKV = {"q": "q_scale", **KV}
MODELOPT = {"k": "k_proj.k_scale", "v": "v_proj.v_scale"}
QUARK = {"k": "k_proj.output_scale", "v": "v_proj.output_scale"}
AMAX = {r: f"{r}_bmm_quantizer._amax" for r in "qkv"}


@dataclass(frozen=True)
class Folder:
    """What is known of one folder: where its scales are, and which of its keys must be refused."""

    scales: dict[str, str]
    layers: tuple[int, ...] = (0, 1)
    path: str = "model.layers.{}.self_attn"
    per_head: bool = False
    mla: bool = False
    amax: bool = False
    shared: dict[int, int] = field(default_factory=dict)
    refused: dict[str, set[str]] = field(default_factory=dict)
    declared: str | None = "fp8_e4m3"


ATTENTION = "model.layers.{}.self_attn."
FOLDERS = {
    "base": Folder({}, declared=None),
    "ct-fp8-kv-tensor": Folder(KV),
    "ct-kv-only-tensor": Folder(KV),
    "ct-fp8-kv-attn-head": Folder(KV, per_head=True),
    "mo-fp8-kvfp8": Folder(MODELOPT),
    "llmcompressor-llama-kvhead-sharded22": Folder(KV, layers=(0, 1, 2, 3), per_head=True),
    "llmcompressor-qwen3-kvtensor": Folder(KV),
    "llmcompressor-gemma3n-kvtensor": Folder(KV, shared={2: 0, 3: 1}),
    "llmcompressor-deepseekv3-kvtensor": Folder(KV, mla=True),
    "llmcompressor-llama-attn-head": Folder(
        KV,
        per_head=True,
        refused={
            "nonpositive": {ATTENTION.format(0) + "q_scale"},
            "implausible": {ATTENTION.format(1) + "q_scale"},
        },
    ),
    "llmcompressor-llama-kvfp8asym": Folder(
        KV,
        refused={
            "asymmetric": {ATTENTION.format(n) + f"{r}_zero_point" for n in range(2) for r in "kv"},
            "unsupported_scheme": {None},
        },
    ),
    "llmcompressor-gptoss-kvhead": Folder(KV, per_head=True),
    "llmcompressor-mistral3vl-kvtensor": Folder(
        KV, path="language_model.model.layers.{}.self_attn"
    ),
    "modelopt-nemotronh-fp8-kvfp8": Folder(
        MODELOPT, layers=(1, 4), path="backbone.layers.{}.mixer"
    ),
    "modelopt-gemma3n-fp8-kvfp8": Folder(MODELOPT, shared={2: 0, 3: 1}),
    "modelopt-llama-plainstatedict-fp8-kvfp8-qsoftmax": Folder(AMAX, amax=True, declared=None),
    "modelopt-llama-fp8-kvaffine": Folder(
        MODELOPT,
        refused={
            "affine_kv": {
                ATTENTION.format(n) + f"{r}_proj.{r}_bias" for n in range(2) for r in "kv"
            }
        },
    ),
    "quark-llama-fp8-kvfp8": Folder(QUARK),
    "quark-llama-fp8-kvattn-eager": Folder(
        QUARK | {"q": "q_proj.output_scale", "prob": "prob_output_scale"}
    ),
    "autoround-llama-fp8static-attnfp8-autoround": Folder(QKV),
}


def stored(name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted((ROOT / name).glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    return tensors


def expected(
    folder: Folder, tensors: dict[str, Tensor]
) -> dict[tuple[str, str], tuple[str, object]]:
    """By path and role: the key and the multiplier that the file holds."""
    values = {}
    for layer in folder.layers:
        for role, leaf in folder.scales.items():
            path = folder.path.format(layer)
            raw = tensors[f"{path}.{leaf}"].double().flatten()
            numbers = (raw / 448.0 if folder.amax else raw).float().tolist()
            value = numbers if len(numbers) > 1 else numbers[0]
            values[path, role] = (f"{path}.{leaf}", value)
    return values


def build(folder: Folder, heads: tuple[int, int]) -> nn.Module:
    """A model with attention layers at the checkpoint's paths and nothing else."""
    model = nn.Module()
    layers: dict[int, nn.Module] = {}
    for layer in (*folder.layers, *folder.shared):
        attention: nn.Module
        if folder.mla:
            attention = MLAAttention(heads[0], 16, 8, softmax_scale=0.1, kv_cache_dtype="fp8")
        else:
            attention = QuantAttention(
                heads[0],
                8,
                num_kv_heads=heads[1],
                kv_cache_dtype="fp8",
                scale_granularity="head" if folder.per_head else "tensor",
                kv_sharing_target=layers.get(folder.shared.get(layer, -1)),
            )
        layers[layer] = attention
        parent = model
        *outer, leaf = folder.path.format(layer).split(".")
        for part in outer:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        parent.add_module(leaf, attention)
    return model


def heads_of(name: str) -> tuple[int, int]:
    config = json.loads((ROOT / name / "config.json").read_text())
    config = config.get("text_config", config)
    return config["num_attention_heads"], config["num_key_value_heads"]


def test_every_folder_is_known() -> None:
    assert {path.name for path in ROOT.iterdir()} == set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_inspect_shows_what_the_file_holds(name: str) -> None:
    folder = FOLDERS[name]
    inspection = inspect_checkpoint(ROOT / name)
    assert inspection.declared["kv_dtype"] == folder.declared
    rows = {(row.layer, row.role): row for row in inspection.layers}
    for (path, role), (key, value) in expected(folder, stored(name)).items():
        row = rows[path, role]
        assert (row.value, row.source, row.key) == (value, "checkpoint", key)
        assert key in safetensors.torch.load_file(ROOT / name / row.file)
    defaults = {place for place, row in rows.items() if row.source == "default"}
    wanted = {(folder.path.format(n), r) for n in folder.layers for r in ("q", "k", "v", "prob")}
    wanted -= set(expected(folder, stored(name)))
    wanted |= {(folder.path.format(n), r) for n in folder.shared for r in ("q", "prob")}
    assert defaults == wanted
    for layer, target in folder.shared.items():
        for role in "kv":
            own, other = (
                rows[folder.path.format(layer), role],
                rows[folder.path.format(target), role],
            )
            assert (own.value, own.key) == (other.value, other.key)
    found: dict[str, set[str | None]] = {}
    for problem in inspection.problems:
        found.setdefault(problem.code, set()).add(problem.key)
    assert found == folder.refused
    document = json.loads(inspection.to_json())
    assert set(document) == {"declared", "layers", "problems"}
    assert set(document["layers"][0]) == {"layer", "role", "value", "source", "key", "file"}
    assert [p["code"] for p in document["problems"]] == [p.code for p in inspection.problems]


@pytest.mark.parametrize("name", FOLDERS)
def test_load_puts_every_scale_into_its_layer_or_refuses_by_name(name: str) -> None:
    folder = FOLDERS[name]
    model = build(folder, heads_of(name))
    tensors = stored(name)
    if folder.refused:
        before = bits(model)
        with pytest.raises(RefusedCheckpointError) as raised:
            load_checkpoint(model, ROOT / name)
        assert {p.code for p in raised.value.problems} == set(folder.refused)
        for key in set().union(*folder.refused.values()) - {None}:
            assert key in str(raised.value)
        assert bits(model) == before
        report = load_checkpoint(model, ROOT / name, on_invalid="default")
        assert {p.code for p in report.problems} == set(folder.refused)
        return
    report = load_checkpoint(model, ROOT / name)
    modules = dict(model.named_modules())
    values = expected(folder, tensors)
    for (path, role), (_, value) in values.items():
        if folder.mla:
            value = max(values[path, "k"][1], values[path, "v"][1])
        assert modules[path].host_scale(role) == value
    for layer, target in folder.shared.items():
        own, other = modules[folder.path.format(layer)], modules[folder.path.format(target)]
        assert own.k_scale is other.k_scale
    assert len(report.rows) == 4 * (len(folder.layers) + len(folder.shared))


def test_what_is_refused_is_at_the_default_when_the_caller_wants_that() -> None:
    names = {
        "llmcompressor-llama-attn-head": ({"q": [1.0, 1.0]}, {"k"}),
        "llmcompressor-llama-kvfp8asym": ({"k": 1.0, "v": 1.0}, set()),
        "modelopt-llama-fp8-kvaffine": ({"k": 1.0, "v": 1.0}, set()),
    }
    for name, (at_default, kept) in names.items():
        folder = FOLDERS[name]
        model = build(folder, heads_of(name))
        load_checkpoint(model, ROOT / name, on_invalid="default")
        for layer in folder.layers:
            module = dict(model.named_modules())[folder.path.format(layer)]
            for role, value in at_default.items():
                assert module.host_scale(role) == value
            for role in kept:
                assert module.scale_sources[role].source == "checkpoint"


def test_quark_says_that_k_was_measured_before_rope() -> None:
    for name in ("quark-llama-fp8-kvfp8", "quark-llama-fp8-kvattn-eager"):
        assert any("before RoPE" in warning for warning in inspect_checkpoint(ROOT / name).warnings)
    assert inspect_checkpoint(ROOT / "ct-fp8-kv-tensor").warnings == ()


def test_strict_inspection_names_layers_without_scales(tmp_path: Path) -> None:
    for name, folder in FOLDERS.items():
        codes = {p.code for p in inspect_checkpoint(ROOT / name, strict=True).problems}
        assert codes == set(folder.refused)
    state = stored("ct-fp8-kv-tensor")
    del state["model.layers.0.self_attn.k_scale"]
    for role in "kv":
        state.pop(f"model.layers.1.self_attn.{role}_scale")
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((ROOT / "ct-fp8-kv-tensor" / "config.json").read_text())
    assert inspect_checkpoint(tmp_path).problems == ()
    problems = inspect_checkpoint(tmp_path, strict=True).problems
    assert [p.code for p in problems] == ["missing_k", "missing_partial"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_a_real_per_head_file(rank: int) -> None:
    name = "llmcompressor-llama-kvhead-sharded22"
    model = build(FOLDERS[name], (2, 1))
    load_checkpoint(model, ROOT / name, tp_rank=rank, tp_size=2)
    module = dict(model.named_modules())["model.layers.2.self_attn"]
    whole = stored(name)["model.layers.2.self_attn.k_scale"].float().flatten()
    assert module.host_scale("k") == [whole[rank].item()]
    assert torch.equal(module.k_scale, whole[rank : rank + 1])
