"""Real checkpoints in the model: what loads and generates, what is refused, what dtypes stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantattn.audit import audit
from quantattn.errors import CheckpointError, FormatError, RefusedCheckpointError
from quantattn.metadata import AttentionMetadata
from quantattn.models import (
    CachedSequence,
    FP8Linear,
    LlamaForCausalLM,
    generate,
    load_llama,
    replay,
)

CHECKPOINTS = Path(__file__).parent.parent / "data" / "checkpoints"
LOADABLE = (
    "autoround-llama-fp8static-attnfp8-autoround",
    "base",
    "ct-fp8-kv-attn-head",
    "ct-fp8-kv-tensor",
    "ct-kv-only-tensor",
    "llmcompressor-llama-kvhead-sharded22",
    "llmcompressor-qwen3-kvtensor",
    "mo-fp8-kvfp8",
    "modelopt-llama-plainstatedict-fp8-kvfp8-qsoftmax",
    "quark-llama-fp8-kvattn-eager",
    "quark-llama-fp8-kvfp8",
)
OTHER_FAMILIES = (
    "llmcompressor-deepseekv3-kvtensor",
    "llmcompressor-gemma3n-kvtensor",
    "llmcompressor-gptoss-kvhead",
    "llmcompressor-mistral3vl-kvtensor",
    "modelopt-gemma3n-fp8-kvfp8",
    "modelopt-nemotronh-fp8-kvfp8",
)
REFUSED = (
    "llmcompressor-llama-attn-head",
    "llmcompressor-llama-kvfp8asym",
    "modelopt-llama-fp8-kvaffine",
)
PROMPT = [5, 1, 254, 77, 9]


def copy_of(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / name, folder / name))


def edit(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_every_fixture_is_accounted_for() -> None:
    found = {folder.name for folder in CHECKPOINTS.iterdir() if folder.is_dir()}
    assert found == {*LOADABLE, *OTHER_FAMILIES, *REFUSED}


@pytest.mark.parametrize("name", LOADABLE)
def test_it_loads_and_generates_with_an_fp8_cache(name: str) -> None:
    model, report = load_llama(CHECKPOINTS / name, kv_cache_dtype="fp8")
    assert report.missing == ()
    assert {row.layer for row in report.rows} == {
        f"model.layers.{layer}.self_attn" for layer in range(model.config.num_layers)
    }
    assert all(
        (row.source == "checkpoint") == (name != "base") for row in report.rows if row.role in "kv"
    )
    generation = generate(model, PROMPT, max_new_tokens=5)
    assert 1 <= len(generation.token_ids) <= 5
    assert generation.logits.isfinite().all()
    assert torch.equal(replay(model, PROMPT, generation.token_ids), generation.logits)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_another_family_is_refused_by_name(name: str) -> None:
    with pytest.raises(FormatError, match="model_type: got"):
        load_llama(CHECKPOINTS / name)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_scales_are_named(name: str) -> None:
    with pytest.raises(RefusedCheckpointError) as caught:
        load_llama(CHECKPOINTS / name)
    assert caught.value.problems


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_dtype_is_for_weights_and_never_for_codes_and_scales(dtype: torch.dtype) -> None:
    name = "ct-fp8-kv-tensor"
    model, _ = load_llama(CHECKPOINTS / name, dtype=dtype)
    stored = load_file(CHECKPOINTS / name / "model.safetensors")
    attention = model.model.layers[1].self_attn
    assert model.lm_head.weight.dtype is dtype
    assert attention.k_proj.weight.dtype is torch.float8_e4m3fn
    for found, key in [
        (attention.k_proj.weight_scale, "k_proj.weight_scale"),
        (attention.o_proj.input_scale, "o_proj.input_scale"),
        (attention.v_scale, "v_scale"),
    ]:
        exact = stored[f"model.layers.1.self_attn.{key}"].double().item()
        assert found.dtype is torch.float32
        assert found.double().item() == exact


def test_the_report_says_what_the_buffers_hold() -> None:
    model, report = load_llama(CHECKPOINTS / "ct-fp8-kv-attn-head", kv_cache_dtype="fp8")
    modules = dict(model.named_modules())
    for row in report.rows:
        held = modules[row.layer].host_scale(row.role)
        assert held == row.value or held == [row.value] * 2
    assert all(len(row.value) == 2 for row in report.rows if row.role in "kv")
    assert audit(model) == []


def test_names_are_those_of_the_checkpoint() -> None:
    model, report = load_llama(CHECKPOINTS / "ct-fp8-kv-tensor")
    stored = load_file(CHECKPOINTS / "ct-fp8-kv-tensor" / "model.safetensors")
    own_defaults = {
        f"model.layers.{i}.self_attn.{role}_scale" for i in (0, 1) for role in ("q", "prob")
    }
    assert set(model.state_dict()) == set(stored) | own_defaults
    assert report.unexpected == ()


@pytest.mark.parametrize("name", ["ct-fp8-kv-tensor", "ct-kv-only-tensor"])
def test_the_attention_writes_codes_for_a_static_output_projection(name: str) -> None:
    model, _ = load_llama(CHECKPOINTS / name)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    generate(model, PROMPT, max_new_tokens=1)
    is_fp8 = isinstance(model.model.layers[0].self_attn.o_proj, FP8Linear)
    assert seen == [torch.float8_e4m3fn if is_fp8 else torch.bfloat16] * 2


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    folder = copy_of("base", tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_llama(folder)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = copy_of("base", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_llama(folder)


def test_a_missing_static_input_scale_is_not_taken_for_dynamic(tmp_path: Path) -> None:
    folder = copy_of("ct-fp8-kv-tensor", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.input_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj\.input_scale"):
        load_llama(folder)


def test_a_head_without_a_scale_is_not_quantized_whatever_the_config_says(tmp_path: Path) -> None:
    expected, _ = load_llama(CHECKPOINTS / "ct-fp8-kv-tensor")
    folder = copy_of("ct-fp8-kv-tensor", tmp_path)
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit(folder, quantization_config={**declared, "ignore": []})
    model, _ = load_llama(folder)
    ids = PROMPT[:2]
    assert torch.equal(replay(model, PROMPT, ids), replay(expected, PROMPT, ids))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.03])
def test_a_linear_input_scale_that_cannot_be_is_named(value: float, tmp_path: Path) -> None:
    folder = copy_of("ct-fp8-kv-tensor", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.input_scale"].fill_(value)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"zero.*: model\.layers\.1\.mlp\.up_proj\.input_scale;"
    ):
        load_llama(folder)


def test_a_channel_of_zeros_may_have_scale_zero_and_no_other_may_be_invalid(
    tmp_path: Path,
) -> None:
    folder = copy_of("ct-fp8-kv-tensor", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight_scale"
    save_file({**tensors, key: torch.zeros_like(tensors[key])}, folder / "model.safetensors")
    load_llama(folder)
    save_file({**tensors, key: -tensors[key]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale"):
        load_llama(folder)


def test_weights_that_are_not_as_declared_are_refused(tmp_path: Path) -> None:
    folder = copy_of("ct-fp8-kv-tensor", tmp_path)
    edit(folder, quantization_config=None)
    with pytest.raises(RefusedCheckpointError, match=r"does not fit its place: .*weight_mismatch"):
        load_llama(folder)


def test_generation_ends_at_a_stop_token(tmp_path: Path) -> None:
    free, _ = load_llama(CHECKPOINTS / "base")
    wanted = generate(free, PROMPT, max_new_tokens=6).token_ids
    folder = copy_of("base", tmp_path)
    edit(folder, eos_token_id=[wanted[2], 255])
    stopped, _ = load_llama(folder)
    found = generate(stopped, PROMPT, max_new_tokens=6).token_ids
    assert found == wanted[: wanted.index(wanted[2]) + 1]


def test_a_sequence_may_grow_in_any_steps() -> None:
    model, _ = load_llama(CHECKPOINTS / "llmcompressor-qwen3-kvtensor", dtype=torch.float32)
    ids = list(range(7, 40))
    at_once = CachedSequence(model, 40).extend(ids)
    sequence = CachedSequence(model, 40)
    parts = torch.cat([sequence.extend(ids[i:j]) for i, j in [(0, 1), (1, 16), (16, 19), (19, 33)]])
    assert sequence.length == 33
    torch.testing.assert_close(parts, at_once, rtol=1e-5, atol=1e-5)


def test_sequences_of_one_batch_do_not_see_each_other() -> None:
    """A mixed batch, one prefill and one decode, with padding, in blocks out of order."""
    model, _ = load_llama(
        CHECKPOINTS / "ct-kv-only-tensor", kv_cache_dtype="fp8", dtype=torch.float32
    )
    cache = model.new_cache(6, block_size=4)
    first, second = [9, 8, 7, 6, 5], [200, 100, 50]
    tables = [[5, 0], [3, 1]]
    early = AttentionMetadata.from_lengths([4], [4], tables[:1], 4)
    with torch.no_grad():
        model(torch.tensor(first[:4]), torch.arange(4), cache, early)
        both = AttentionMetadata.from_lengths([1, 3], [5, 3], tables, 4, num_tokens=6)
        ids, positions = torch.tensor([*first[4:], *second, 0, 0]), torch.tensor([4, 0, 1, 2, 0, 0])
        found = model(ids, positions, cache, both)
    alone = CachedSequence(model, 8)
    alone.extend(first[:4])
    torch.testing.assert_close(found[:1], alone.extend(first[4:]), rtol=1e-5, atol=1e-5)
    expected = CachedSequence(model, 8).extend(second)
    torch.testing.assert_close(found[1:4], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "named"), [([], "got no token"), ([3, 256], "got 256"), ([-1], "got -1")]
)
def test_prompts_out_of_range_are_refused(ids: list[int], named: str) -> None:
    model, _ = load_llama(CHECKPOINTS / "base")
    with pytest.raises(FormatError, match=named):
        generate(model, ids, max_new_tokens=2)
    with pytest.raises(FormatError, match=named):
        replay(model, ids, [1])


def test_a_token_out_of_range_cannot_be_replayed() -> None:
    model, _ = load_llama(CHECKPOINTS / "base")
    with pytest.raises(FormatError, match="got 999"):
        replay(model, [1], [2, 999])
    assert replay(model, [1], []).shape == (0, 256)


def test_a_sequence_refuses_more_than_its_pages_hold() -> None:
    model, _ = load_llama(CHECKPOINTS / "base")
    sequence = CachedSequence(model, 16)
    sequence.extend(list(range(15)))
    with pytest.raises(FormatError, match="got 2 tokens, but the pages have room for 1"):
        sequence.extend([1, 2])
    assert sequence.extend([1]).shape == (1, 256)


def test_at_least_one_token_must_be_asked_for() -> None:
    model, _ = load_llama(CHECKPOINTS / "base")
    with pytest.raises(FormatError, match="max_new_tokens: got 0"):
        generate(model, PROMPT, max_new_tokens=0)


def test_a_decode_step_compiles_without_a_break() -> None:
    model, _ = load_llama(CHECKPOINTS / "ct-fp8-kv-tensor", kv_cache_dtype="fp8")
    batch = AttentionMetadata.from_lengths([3], [3], [[0]], 16)
    inputs = torch.tensor([1, 2, 3]), torch.arange(3)
    with torch.no_grad():
        expected = model(*inputs, model.new_cache(1, block_size=16), batch)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found = compiled(*inputs, model.new_cache(1, block_size=16), batch)
    assert torch.equal(found, expected)


def test_a_model_has_nothing_that_to_empty_ruins() -> None:
    loaded, _ = load_llama(CHECKPOINTS / "ct-fp8-kv-tensor")
    assert dict(loaded.named_buffers()).keys() == {
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(2)
        for name in (
            *(f"{role}_scale" for role in ("q", "k", "v", "prob")),
            *(f"{r}_range" for r in "qkv"),
        )
    }
    assert isinstance(loaded, LlamaForCausalLM)


@pytest.mark.parametrize("count", [99_999_999_999, 10**30])
def test_more_tokens_than_memory_has_pages_for_are_refused(count: int) -> None:
    from quantattn.models.generation import generate

    model, _ = load_llama(CHECKPOINTS / "ct-fp8-kv-tensor")
    with pytest.raises(FormatError, match="capacity"):
        generate(model, [1, 2], count)
