"""load_checkpoint, load_weights, load_state_dict: names, values, layers, ranks, all or nothing."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from quantattn import (
    AttentionMetadata,
    CheckpointError,
    MLAAttention,
    PagedKVCache,
    QuantAttention,
    RefusedCheckpointError,
    ScaleError,
    adopt,
    process_weights_after_loading,
)
from quantattn.loaders import (
    LoadReport,
    initialize_dummy_weights,
    load_checkpoint,
    load_kv_scales,
    load_weights,
)
from tests.loaders.toy import CONFIG, KV_SCHEME, Decoder, Subclassed, Wrapped, bits, float32, save

STYLES = pytest.mark.parametrize("style", [Subclassed, Wrapped])
ATTENTION = "model.layers.{}.self_attn"


def by_checkpoint(model: nn.Module, tensors: dict, folder: Path, **options: object) -> LoadReport:
    return load_checkpoint(model, save(folder, tensors), **options)


def by_weights(model: nn.Module, tensors: dict, folder: Path, **options: object) -> LoadReport:
    pairs = [(k, v if isinstance(v, torch.Tensor) else torch.tensor(v)) for k, v in tensors.items()]
    return load_weights(model, iter(pairs), **options)


def by_state_dict(model: nn.Module, tensors: dict, folder: Path) -> None:
    state = {k: v if isinstance(v, torch.Tensor) else torch.tensor(v) for k, v in tensors.items()}
    weights = {k: v for k, v in model.state_dict().items() if not k.endswith("_scale")}
    result = model.load_state_dict({**weights, **state}, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


ENTRIES = pytest.mark.parametrize("load", [by_checkpoint, by_weights, by_state_dict])

LAYOUTS = {
    "kv_scale": ("kv_scale", "kv_scale"),
    "own": ("k_scale", "v_scale"),
    "projection": ("k_proj.k_scale", "v_proj.v_scale"),
    "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "naive rename": ("qkqkv_proj.k_scale", "qkqkv_proj.v_scale"),
    "runtime": ("attn.k_scale", "attn.v_scale"),
    "output": ("k_proj.output_scale", "v_proj.output_scale"),
    "mistral": ("k_fake_quantizer.qscale_act", "v_fake_quantizer.qscale_act"),
}


@STYLES
@ENTRIES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_names_reaches_the_layer(style, load, layout: str, tmp_path: Path) -> None:
    """B01, B04, B09 (vLLM #11787, SGLang #39942): unknown layouts were dropped and 1.0 used."""
    model = Decoder(style)
    tensors = {}
    for layer, (k, v) in enumerate([(0.0123, 0.05), (0.0321, 0.07)]):
        names = LAYOUTS[layout]
        v = k if names[0] == names[1] else v
        tensors |= {f"{ATTENTION.format(layer)}.{names[1]}": v}
        tensors |= {f"{ATTENTION.format(layer)}.{names[0]}": k}
    load(model, tensors, tmp_path)
    assert model.attention(0).host_scale("k") == float32(0.0123)
    assert model.attention(1).host_scale("k") == float32(0.0321)
    expected = 0.0321 if layout == "kv_scale" else 0.07
    assert model.attention(1).host_scale("v") == float32(expected)
    assert model.attention(1).host_scale("q") == 1.0


@ENTRIES
@pytest.mark.parametrize("style", [Subclassed, Wrapped, "adopted"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_every_view_of_a_loaded_scale_says_the_same(style, load, shape, tmp_path: Path) -> None:
    """A13 (vLLM #39418): one loader set the tensors only, and the floats stayed 1.0."""
    model = Decoder(Subclassed if style == "adopted" else style)
    if style == "adopted":
        old = nn.Module()
        old._k_scale, old._k_scale_float = torch.tensor(1.0), 1.0
        adopt(old, {"_k_scale": "k_scale"}, num_heads=4, num_kv_heads=2)
        model.model.layers[0].self_attn = old
    load(model, {f"{ATTENTION.format(0)}.k_scale": torch.full(shape, 0.0123)}, tmp_path)
    layer = model.attention(0)
    views = [layer.k_scale.item(), layer.host_scale("k"), layer.scale_sources["k"].value]
    views.append(layer.effective_scale("k").item())
    if style == "adopted":
        views += [layer._k_scale.item(), layer._k_scale_float]
    assert views == [float32(0.0123)] * len(views)


@STYLES
def test_ambiguous_cache_scales_need_a_word_from_the_caller(style, tmp_path: Path) -> None:
    key = f"{ATTENTION.format(0)}.k_cache.scale"
    model = Decoder(style)
    with pytest.raises(RefusedCheckpointError, match="cache_scale_means"):
        by_checkpoint(model, {key: 0.0123}, tmp_path)
    by_checkpoint(model, {key: 0.0123}, tmp_path, cache_scale_means="scale")
    assert model.attention(0).host_scale("k") == float32(0.0123)
    by_checkpoint(model, {key: 224.0}, tmp_path, cache_scale_means="amax")
    assert model.attention(0).host_scale("k") == 0.5


@STYLES
@ENTRIES
def test_a_crossed_projection_key_is_neither_roles(style, load, tmp_path: Path) -> None:
    model = Decoder(style)
    before = bits(model)
    with pytest.raises(ScaleError, match=r"k_proj\.v_scale"):
        load(model, {f"{ATTENTION.format(0)}.k_proj.v_scale": 0.5}, tmp_path)
    assert bits(model) == before


@pytest.mark.parametrize(
    "prefix", ["", "language_model.", "model.language_model.", "language_model.model."]
)
def test_outer_prefixes_and_the_order_of_keys_do_not_matter(prefix: str, tmp_path: Path) -> None:
    """B02 (vLLM #34293): a fused rename ran before the scales' and made a key nobody owns."""
    weight = torch.randn(32, 32)
    path = prefix + ATTENTION.format(1).removeprefix("model." if prefix.endswith("model.") else "")
    tensors = {f"{path}.q_proj.weight": weight, f"{path}.k_proj.k_scale": torch.tensor(0.02)}
    for order in itertools.permutations(tensors.items()):
        model = Decoder()
        report = load_weights(model, order)
        assert model.attention(1).host_scale("k") == float32(0.02)
        assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, weight)
        assert report.unexpected == ()


def test_a_gptj_key_reaches_both_roles(tmp_path: Path) -> None:
    """B09 (vLLM #10063)."""
    model = nn.Module()
    model.transformer = nn.Module()
    model.transformer.h = nn.ModuleList([nn.Module()])
    model.transformer.h[0].attn = nn.Module()
    model.transformer.h[0].attn.attn = QuantAttention(4, 8)
    load_weights(model, [("transformer.h.0.attn.kv_scale", torch.tensor(0.04))])
    layer = model.transformer.h[0].attn.attn
    assert (layer.host_scale("k"), layer.host_scale("v")) == (float32(0.04), float32(0.04))


@pytest.mark.parametrize("leaf", ["o_proj.output_scale", "q_proj.output_scale"])
def test_output_scales_of_other_projections_never_become_k_or_v(leaf: str, tmp_path: Path) -> None:
    model = Decoder()
    load_checkpoint(model, save(tmp_path, {f"{ATTENTION.format(0)}.{leaf}": 0.02}))
    assert (model.attention(0).host_scale("k"), model.attention(0).host_scale("v")) == (1.0, 1.0)


@STYLES
def test_names_in_runtime_form_are_not_renamed_again(style, tmp_path: Path) -> None:
    """B06 (AutoRound #2370): attn.k_scale became attn.attn.k_scale and was lost."""
    model = Decoder(style)
    model.attention(0).set_scale("k", 0.0123)
    twin = Decoder(style)
    report = load_checkpoint(twin, save(tmp_path, model.state_dict()))
    assert twin.attention(0).host_scale("k") == float32(0.0123)
    assert (report.missing, report.unexpected) == ((), ())


def test_scale_keys_of_which_none_finds_a_layer_are_refused(tmp_path: Path) -> None:
    model = Decoder()
    before = bits(model)
    with pytest.raises(RefusedCheckpointError, match="no_layer"):
        load_weights(model, [("decoder.blocks.9.attention.k_scale", torch.tensor(0.5))])
    assert bits(model) == before


def test_a_pipeline_stage_loads_its_own_layers(tmp_path: Path) -> None:
    keys = {f"{ATTENTION.format(layer)}.k_scale": 0.01 * (layer + 1) for layer in range(4)}
    model = Decoder(layers=2)
    report = load_weights(model, [(k, torch.tensor(v)) for k, v in keys.items()])
    assert model.attention(1).host_scale("k") == float32(0.02)
    assert [p.code for p in report.ignored] == ["layer_not_in_model"] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": "channel"},
        {"strategy": "group"},
        {"dynamic": True},
        {"symmetric": False},
        {"num_bits": 4},
        {"type": "int"},
    ],
    ids=str,
)
def test_an_unsupported_scheme_is_refused_by_name(change: dict, tmp_path: Path) -> None:
    """B10 (SGLang #35455): the scheme was never forwarded and its scales were dropped."""
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": KV_SCHEME | change}
    tensors = {f"{ATTENTION.format(0)}.k_scale": 0.0123}
    folder = save(tmp_path, tensors, CONFIG | {"quantization_config": quantization})
    model = Decoder()
    before = bits(model)
    with pytest.raises(RefusedCheckpointError) as raised:
        load_checkpoint(model, folder)
    assert [p.code for p in raised.value.problems] == ["unsupported_scheme"]
    assert bits(model) == before
    report = load_checkpoint(model, folder, on_invalid="default")
    assert model.attention(0).host_scale("k") == 1.0
    assert [p.code for p in report.problems] == ["unsupported_scheme"]


def test_the_supported_scheme_loads(tmp_path: Path) -> None:
    model = Decoder()
    load_checkpoint(model, save(tmp_path, {f"{ATTENTION.format(0)}.k_scale": 0.0123}))
    assert model.attention(0).host_scale("k") == float32(0.0123)


@STYLES
@ENTRIES
@pytest.mark.parametrize(
    ("k", "v", "expected"),
    [
        (0.05, None, (0.05, 1.0)),
        (None, 0.08, (1.0, 0.08)),
        (0.05, 0.08, (0.05, 0.08)),
        (None, None, (1.0, 1.0)),
    ],
)
def test_a_missing_side_is_one_and_never_borrowed(
    style, load, k, v, expected, tmp_path: Path
) -> None:
    """C01, C07 (vLLM #46264, #38975)."""
    model = Decoder(style, kv_cache_dtype="fp8")
    given = {"k_scale": k, "v_scale": v}
    tensors = {f"{ATTENTION.format(0)}.{n}": x for n, x in given.items() if x is not None}
    load(model, tensors or {f"{ATTENTION.format(1)}.k_scale": 0.5}, tmp_path)
    layer = model.attention(0)
    assert (layer.host_scale("k"), layer.host_scale("v")) == tuple(map(float32, expected))
    assert (layer.host_scale("q"), layer.host_scale("prob")) == (1.0, 1.0)


def test_one_sided_and_absent_layers_are_reported_and_refused_only_when_strict(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path, {f"{ATTENTION.format(0)}.v_scale": 0.08})
    model = Decoder(kv_cache_dtype="fp8")
    report = load_checkpoint(model, folder)
    assert report.one_sided == ("model.layers.0.self_attn",)
    assert [(row.layer[13], row.role) for row in report.loaded] == [("0", "v")]
    at_default = {(row.layer[13], row.role) for row in report.defaulted}
    assert at_default == {(n, r) for n in "01" for r in ("q", "k", "v", "prob")} - {("0", "v")}
    assert any("model.layers.0.self_attn" in warning for warning in report.warnings)
    before = bits(model)
    with pytest.raises(RefusedCheckpointError) as raised:
        load_checkpoint(model, folder, strict=True)
    found = {(p.code, "layers.0" in p.message) for p in raised.value.problems}
    assert found == {("missing_k", True), ("missing_partial", False)}
    assert bits(model) == before


def test_strict_refuses_what_is_absent_or_unknown_also_where_invalid_values_are_tolerated(
    tmp_path: Path,
) -> None:
    good = {f"{ATTENTION.format(n)}.{r}_scale": 0.1 + n for n in range(2) for r in "kv"}
    unknown = good | {f"{ATTENTION.format(0)}.kv_smoothing_scale": 1.0}
    absent = {key: value for key, value in good.items() if "layers.1" not in key}
    for index, tensors in enumerate((unknown, absent)):
        folder = save(tmp_path / str(index), tensors)
        load_checkpoint(Decoder(), folder, on_invalid="default")
        with pytest.raises(RefusedCheckpointError, match=r"unknown_scale|missing_partial"):
            load_checkpoint(Decoder(), folder, strict=True, on_invalid="default")


def test_unknown_scale_like_keys_are_reported_and_refused_only_when_strict(tmp_path: Path) -> None:
    key = f"{ATTENTION.format(0)}.kv_smoothing_scale"
    good = {f"{ATTENTION.format(n)}.{r}_scale": 0.1 + n for n in range(2) for r in "kv"}
    folder = save(tmp_path, good | {key: 1.0})
    report = load_checkpoint(Decoder(), folder)
    assert [(p.code, p.key) for p in report.ignored] == [("unknown_scale", key)]
    with pytest.raises(RefusedCheckpointError, match="kv_smoothing_scale"):
        load_checkpoint(Decoder(), folder, strict=True)


INVALID = [0.0, -0.0, -1.0, -0.1, float("nan"), float("inf"), float("-inf"), 1e-45, 3.4e38]


@ENTRIES
@pytest.mark.parametrize("value", INVALID)
@pytest.mark.parametrize("role", ["k", "v", "q", "prob"])
def test_an_invalid_scale_is_refused_by_name_and_nothing_changes(
    load, value: float, role: str, tmp_path: Path
) -> None:
    """A10, C02, C03: zeros, NaN and infinities went to the kernel, or hit a bare assertion."""
    key = f"{ATTENTION.format(1)}.{role}_scale"
    tensors = {f"{ATTENTION.format(0)}.k_scale": 0.02, key: value}
    model = Decoder()
    before = bits(model.model.layers[1])
    with pytest.raises(ScaleError, match=re.escape(key)):
        load(model, tensors, tmp_path)
    assert bits(model.model.layers[1]) == before


@pytest.mark.parametrize("value", INVALID)
def test_an_invalid_scale_can_be_replaced_by_the_default_and_is_reported(
    value: float, tmp_path: Path
) -> None:
    tensors = {f"{ATTENTION.format(n)}.{r}_scale": 0.02 + n for n in range(2) for r in "kv"}
    tensors[f"{ATTENTION.format(1)}.k_scale"] = value
    model = Decoder()
    report = by_checkpoint(model, tensors, tmp_path, on_invalid="default")
    assert model.attention(1).host_scale("k") == 1.0
    assert model.attention(1).host_scale("v") == float32(1.02)
    assert [p.key for p in report.problems] == [f"{ATTENTION.format(1)}.k_scale"]
    assert report.problems[0].file == "model.safetensors"


def test_every_bad_key_is_named_with_its_value_and_file(tmp_path: Path) -> None:
    """C02 (llm-compressor #1928): layer 3 of a release was zero and nothing said so."""
    tensors = {f"{ATTENTION.format(n)}.{r}_scale": 0.02 for n in range(4) for r in "kv"}
    tensors |= {f"{ATTENTION.format(3)}.{r}_scale": 0.0 for r in "kv"}
    model = Decoder(layers=4)
    before = bits(model)
    with pytest.raises(RefusedCheckpointError) as raised:
        by_checkpoint(model, tensors, tmp_path)
    for role in "kv":
        assert f"{ATTENTION.format(3)}.{role}_scale: got 0.0" in str(raised.value)
    assert "model.safetensors" in str(raised.value)
    assert bits(model) == before


def test_two_keys_that_disagree_are_a_conflict(tmp_path: Path) -> None:
    tensors = {f"{ATTENTION.format(0)}.kv_scale": 0.5, f"{ATTENTION.format(0)}.v_scale": 0.25}
    with pytest.raises(RefusedCheckpointError) as raised:
        by_checkpoint(Decoder(), tensors, tmp_path)
    assert [p.code for p in raised.value.problems] == ["conflict"]
    with pytest.raises(ScaleError, match="v_scale"):
        by_state_dict(Decoder(), tensors, tmp_path)
    tensors[f"{ATTENTION.format(0)}.v_scale"] = 0.5
    model = Decoder()
    by_checkpoint(model, tensors, tmp_path)
    assert model.attention(0).host_scale("v") == 0.5


PER_HEAD = [0.1, 0.2, 0.3, 0.4]


def test_each_rank_takes_the_heads_it_owns(tmp_path: Path) -> None:
    """C05 (SGLang #26436)."""
    folder = save(
        tmp_path, {f"{ATTENTION.format(0)}.k_scale": torch.tensor(PER_HEAD).view(4, 1, 1)}, None
    )
    model = Decoder(num_heads=4, num_kv_heads=2, scale_granularity="head")
    load_checkpoint(model, folder, tp_rank=1, tp_size=2)
    assert model.attention(0).host_scale("k") == [float32(0.3), float32(0.4)]
    for rank in range(8):
        model = Decoder(num_heads=1, num_kv_heads=1, scale_granularity="head")
        load_checkpoint(model, folder, tp_rank=rank, tp_size=8)
        assert model.attention(0).host_scale("k") == [float32(PER_HEAD[rank // 2])]
    with pytest.raises(RefusedCheckpointError, match="4 heads"):
        load_checkpoint(Decoder(), folder, tp_rank=0, tp_size=3)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ScaleError, match="tp_rank"):
            load_checkpoint(Decoder(), folder, tp_rank=rank, tp_size=size)


def test_a_per_head_file_does_not_fit_a_per_tensor_layer(tmp_path: Path) -> None:
    folder = save(tmp_path, {f"{ATTENTION.format(0)}.k_scale": [0.5, 0.25]})
    with pytest.raises(RefusedCheckpointError, match=r"\[2\].*\[\].*scale_granularity"):
        load_checkpoint(Decoder(), folder)


def test_a_scalar_serves_every_head_and_a_query_is_reduced_by_groups(tmp_path: Path) -> None:
    folder = save(
        tmp_path,
        {f"{ATTENTION.format(0)}.k_scale": 0.5, f"{ATTENTION.format(0)}.q_scale": PER_HEAD},
    )
    model = Decoder(scale_granularity="head")
    report = load_checkpoint(model, folder)
    assert model.attention(0).host_scale("k") == [0.5, 0.5]
    assert model.attention(0).host_scale("q") == [float32(0.2), float32(0.4)]
    (row,) = [r for r in report.rows if r.role == "q" and r.source == "checkpoint"]
    assert "maximum of each group" in row.note


@pytest.mark.parametrize(
    ("k", "v", "expected"), [(0.5, 0.25, 0.5), (0.25, 0.5, 0.5), (0.25, None, 0.25)]
)
def test_mla_takes_the_larger_of_k_and_v(k, v, expected, tmp_path: Path) -> None:
    """D02 (vLLM #37054)."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    model.model.layers[0].self_attn = MLAAttention(
        4, 16, 4, softmax_scale=0.1, kv_cache_dtype="fp8"
    )
    tensors = {f"{ATTENTION.format(0)}.k_scale": k}
    tensors |= {f"{ATTENTION.format(0)}.v_scale": v} if v else {}
    for config in (CONFIG | {"kv_lora_rank": 16}, CONFIG, None):
        report = load_checkpoint(model, save(tmp_path, tensors, config))
        assert model.model.layers[0].self_attn.host_scale("k") == expected
        if v and config is not None:
            (row,) = [r for r in report.rows if r.role == "k"]
            assert "maximum" in row.note


def test_loading_again_forgets_what_the_file_omits_and_a_refit_keeps_it(tmp_path: Path) -> None:
    """A11: load k = 0.05, then k = 0.07 only."""
    model = Decoder()
    both = {f"{ATTENTION.format(0)}.k_scale": 0.05, f"{ATTENTION.format(0)}.v_scale": 0.06}
    by_checkpoint(model, both, tmp_path / "a")
    by_weights(model, {f"{ATTENTION.format(0)}.k_scale": 0.07}, tmp_path)
    assert model.attention(0).host_scale("k") == float32(0.07)
    assert model.attention(0).host_scale("v") == float32(0.06)
    for _ in range(3):
        process_weights_after_loading(model)
    assert model.attention(0).host_scale("k") == float32(0.07)
    by_checkpoint(model, {f"{ATTENTION.format(0)}.k_scale": 0.07}, tmp_path / "b")
    assert model.attention(0).host_scale("v") == 1.0


def test_noise_of_a_foreign_dummy_loader_never_survives_a_load(tmp_path: Path) -> None:
    """A02 (vLLM #31395): random scales stayed where the checkpoint had none."""
    model = Decoder(kv_cache_dtype="fp8")
    for tensor in model.state_dict().values():
        tensor.uniform_(-1e-3, 1e-3)
    weights = {f"{ATTENTION.format(n)}.q_proj.weight": torch.randn(32, 32) for n in range(2)}
    by_checkpoint(model, weights, tmp_path)
    for layer in (model.attention(0), model.attention(1)):
        assert [layer.host_scale(role) for role in ("q", "k", "v", "prob")] == [1.0] * 4
        assert (layer.k_range.item(), layer.v_range.item()) == (200.0, 100.0)


def test_dummy_weights_are_repeatable_and_leave_scales_alone(tmp_path: Path) -> None:
    """A03 (TensorRT-LLM #13879): every calibration scalar became the same tiny negative number."""
    model = Decoder()
    model.attention(0).set_scale("k", 0.0123)
    model.attention(1).v_scale.fill_(-3.0)
    initialize_dummy_weights(model)
    first = model.model.layers[0].self_attn.q_proj.weight.clone()
    other = model.model.layers[1].self_attn.q_proj.weight
    assert first.abs().max() <= 1e-3
    assert first.std() > 1e-4
    assert not torch.equal(first, other)
    assert model.attention(0).host_scale("k") == float32(0.0123)
    assert model.attention(1).host_scale("v") == 1.0
    initialize_dummy_weights(model)
    assert torch.equal(first, model.model.layers[0].self_attn.q_proj.weight)
    initialize_dummy_weights(model, seed=1)
    assert not torch.equal(first, model.model.layers[0].self_attn.q_proj.weight)
    by_weights(model, {f"{ATTENTION.format(0)}.q_proj.weight": torch.ones(32, 32)}, tmp_path)
    assert model.attention(1).host_scale("k") == 1.0


FP8 = {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("options", "layers_given", "value", "says"),
    [
        (FP8, [0, 1], 0.5, None),
        (FP8, [], 0.5, "every layer"),
        (FP8, [0], 0.5, "model.layers.1.self_attn"),
        (FP8, [0, 1], 1.0, None),
        ({"kv_cache_dtype": "fp8_e5m2"}, [], 0.5, None),
        ({"kv_cache_dtype": "int8_per_token_head"}, [], 0.5, None),
        ({"kv_cache_dtype": "auto"}, [], 0.5, None),
    ],
)
def test_the_log_speaks_only_of_layers_that_run_fp8_at_the_default(
    options, layers_given, value, says, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C13 (SGLang #31224): said that no scale was given when all had been."""
    tensors = {f"{ATTENTION.format(n)}.{r}_scale": value for n in layers_given for r in "kv"}
    tensors = tensors or {f"{ATTENTION.format(0)}.q_proj.weight": torch.randn(32, 32)}
    with caplog.at_level(logging.INFO, logger="quantattn"):
        report = by_checkpoint(Decoder(**options), tensors, tmp_path)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (says is not None)
    assert list(report.warnings) == messages
    if says is not None:
        assert says in messages[0]
        assert ("model.layers.0.self_attn" in messages[0]) is (
            0 not in layers_given and len(layers_given) > 0
        )


def test_scales_are_ignored_where_the_config_declares_no_cache_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    model = Decoder()
    folder = save(tmp_path, {f"{ATTENTION.format(0)}.k_scale": 0.5}, config)
    report = load_checkpoint(model, folder)
    assert model.attention(0).host_scale("k") == 1.0
    assert [p.code for p in report.ignored] == ["kv_not_declared"]
    assert any("k_scale" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(32, 31), r"\[32, 31\].*\[32, 32\]"),
        (torch.zeros(32, 32, dtype=torch.float8_e4m3fn), "float8_e4m3fn.*float32"),
        (torch.zeros(32, 32, dtype=torch.int32), "int32"),
    ],
)
def test_a_weight_that_does_not_fit_refuses_the_checkpoint_before_anything_changes(
    tensor, reason: str, tmp_path: Path
) -> None:
    tensors = {
        f"{ATTENTION.format(0)}.q_proj.weight": torch.ones(32, 32),
        f"{ATTENTION.format(0)}.k_scale": 0.5,
        f"{ATTENTION.format(1)}.q_proj.weight": tensor,
    }
    model = Decoder()
    before = bits(model)
    with pytest.raises(RefusedCheckpointError, match=reason):
        by_checkpoint(model, tensors, tmp_path)
    assert bits(model) == before
    with pytest.raises(RefusedCheckpointError, match=reason):
        by_weights(model, tensors, tmp_path)


def test_weights_land_with_the_report_of_what_is_missing_and_unexpected(tmp_path: Path) -> None:
    weight = torch.randn(32, 32, dtype=torch.bfloat16)
    tensors = {f"{ATTENTION.format(0)}.q_proj.weight": weight, "lm_head.weight": torch.ones(2)}
    for load in (by_checkpoint, by_weights):
        model = Decoder()
        report = load(model, tensors, tmp_path)
        assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, weight.float())
        assert report.missing == ("model.layers.1.self_attn.q_proj.weight",)
        assert report.unexpected == ("lm_head.weight",)


def test_tied_weights_stay_tied_when_a_meta_model_is_materialised(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
    weight = torch.randn(5, 3)
    report = load_checkpoint(model, save(tmp_path, {"embed.weight": weight}))
    assert model["head"].weight is model["embed"].weight
    assert torch.equal(model["head"].weight, weight)
    assert report.missing == ()


def test_what_the_file_lacks_is_initialised_when_a_meta_model_is_materialised(
    tmp_path: Path,
) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"norm": nn.LayerNorm(3), "attn": QuantAttention(2, 4)})
    load_checkpoint(model, save(tmp_path, {"attn.k_scale": 0.5}))
    assert torch.equal(model["norm"].weight, torch.ones(3))
    assert (model["attn"].host_scale("k"), model["attn"].host_scale("v")) == (0.5, 1.0)


def test_an_unknown_on_invalid_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="on_invalid"):
        by_checkpoint(
            Decoder(), {f"{ATTENTION.format(0)}.k_scale": 0.5}, tmp_path, on_invalid="skip"
        )


def test_a_report_prints_as_a_table_and_as_json(tmp_path: Path) -> None:
    import json

    report = by_checkpoint(Decoder(), {f"{ATTENTION.format(0)}.k_scale": 0.0123}, tmp_path)
    assert re.search(
        r"self_attn +k +0\.0123 +checkpoint +model\.layers\.0\.self_attn\.k_scale", str(report)
    )
    rows = json.loads(report.to_json())["rows"]
    assert rows[1]["value"] == float32(0.0123)
    assert {row["role"] for row in rows} == {"q", "k", "v", "prob"}
    assert [row["file"] for row in rows if row["source"] == "checkpoint"] == ["model.safetensors"]


def kv_scales_file(folder: Path, factors: dict, dtype: str = "float8_e4m3fn") -> Path:
    import json

    path = folder / "kv_cache_scales.json"
    path.write_text(json.dumps({"kv_cache": {"dtype": dtype, "scaling_factor": factors}}))
    return path


def test_a_json_scale_file_reaches_the_buffers(tmp_path: Path) -> None:
    """C08 (SGLang #18818): the parameter was replaced by a float, or the number was ignored."""
    model = Decoder(kv_cache_dtype="fp8")
    model.attention(0).set_scale("q", 0.31)
    factors = {"0": {"0": 0.04, "1": {"k": 0.05, "v": 0.06}}}
    report = load_kv_scales(model, kv_scales_file(tmp_path, factors))
    assert model.attention(0).host_scale("k") == model.attention(0).host_scale("v") == float32(0.04)
    assert model.attention(1).host_scale("v") == float32(0.06)
    assert "k_scale" in dict(model.attention(0).named_buffers())
    assert model.attention(0).host_scale("q") == float32(0.31)
    row = next(r for r in report.rows if (r.layer, r.role) == ("model.layers.1.self_attn", "k"))
    assert (row.source, row.file) == ("checkpoint", "kv_cache_scales.json")
    assert "scaling_factor" in row.key


@pytest.mark.parametrize(
    ("factors", "dtype", "reason"),
    [
        ({"0": {"0": 0.04}}, "float8_e4m3fn", "1"),
        ({"0": {"0": 0.04, "1": 0.05}, "1": {"0": 0.04, "1": 0.05}}, "float8_e4m3fn", "tp|rank"),
        ({"0": {"0": 0.04, "1": 0.05}}, "float8_e5m2", "float8_e5m2"),
        ({"0": {"0": 0.04, "1": 0.0}}, "float8_e4m3fn", "0.0"),
        ({"0": {"0": 0.04, "1": True}}, "float8_e4m3fn", "1"),
        ({"0": {"0": 0.04, "1": "0.1"}}, "float8_e4m3fn", "0.1"),
    ],
)
def test_a_json_scale_file_that_does_not_fit_changes_nothing(
    factors, dtype, reason, tmp_path
) -> None:
    model = Decoder()
    before = bits(model)
    with pytest.raises((ScaleError, CheckpointError), match=reason):
        load_kv_scales(model, kv_scales_file(tmp_path, factors, dtype))
    assert bits(model) == before


def test_a_json_scale_file_without_a_layer_can_leave_it_at_the_default(tmp_path: Path) -> None:
    model = Decoder()
    path = kv_scales_file(tmp_path, {"0": {"0": 0.04}})
    report = load_kv_scales(model, path, on_invalid="default")
    assert model.attention(0).host_scale("k") == float32(0.04)
    assert model.attention(1).host_scale("k") == 1.0
    assert [problem.code for problem in report.problems] == ["missing_all"]


def test_a_json_scale_file_changes_what_attention_stores(tmp_path: Path) -> None:
    """C10 (vLLM #11688): scores with and without the file were identical."""
    stored = []
    for factors in ({"0": {"0": 0.04}}, None):
        model = Decoder(layers=1, kv_cache_dtype="fp8")
        if factors:
            load_kv_scales(model, kv_scales_file(tmp_path, factors))
        cache = PagedKVCache(1, 1, 4, 2, 8, dtype=torch.float32, kv_cache_dtype="fp8")
        metadata = AttentionMetadata.from_lengths([1], [1], torch.zeros(1, 1, dtype=torch.int32), 4)
        ones = torch.ones(1, 2, 8)
        model.attention(0)(torch.ones(1, 4, 8), ones, ones, cache.layer(0), metadata)
        stored.append(cache.layer(0)[0, 0].float().item())
    assert stored == [24.0, 1.0]


def test_the_source_files_are_untouched_when_a_load_is_killed(tmp_path: Path) -> None:
    import hashlib
    import subprocess
    import sys

    tensors = {f"{ATTENTION.format(n)}.q_proj.weight": torch.randn(32, 32) for n in range(2)}
    folder = save(tmp_path, tensors)
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    script = """
import os, signal, sys
from quantattn.loaders import load_checkpoint, progress
from tests.loaders.toy import Decoder
import quantattn.loaders.load as load
def killed(keys, sizes, title):
    yield keys[0]
    os.kill(os.getpid(), signal.SIGKILL)
load.with_progress = killed
load_checkpoint(Decoder(), sys.argv[1])
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(folder)]
    assert subprocess.run(command, cwd=root, timeout=120).returncode == -9
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == before
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_an_engines_own_buffers_need_a_word_from_the_caller(tmp_path: Path) -> None:
    tensors = {f"{ATTENTION.format(0)}.attn._k_scale": 0.5}
    with pytest.raises(RefusedCheckpointError, match="runtime_buffer"):
        by_checkpoint(Decoder(), tensors, tmp_path)
    model = Decoder()
    by_checkpoint(model, tensors, tmp_path, accept_runtime_buffers=True)
    assert model.attention(0).host_scale("k") == 0.5
