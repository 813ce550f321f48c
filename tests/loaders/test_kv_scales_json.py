"""JSON scale files: every layout, every wrong value, missing layers, other ranks."""

import math

import numpy as np
import pytest

from quantattn.errors import CheckpointError
from quantattn.loaders.geometry import Geometry
from quantattn.loaders.kv_scales_json import is_kv_scales, read_kv_scales

FILE = "scales.json"
MODEL = Geometry("llama", 3, 8, 2, 16, attention_layers=(0, 1, 2))


def read(data, geometry=MODEL, **run):
    return read_kv_scales(data, file=FILE, geometry=geometry, **run)


def by_rank(*ranks, dtype="float8_e4m3fn", **rest):
    factors = {str(rank): layers for rank, layers in enumerate(ranks)}
    return {"kv_cache": {"dtype": dtype, "scaling_factor": factors}, **rest}


def rounded(value):
    return float(np.float32(value))


GOOD = {"0": 0.04, "1": 0.05, "2": 0.06}


def test_one_factor_serves_k_and_v():
    scales = read(by_rank(GOOD, model_type="llama"))
    assert not scales.problems
    assert scales.values == {
        (layer, role): rounded(value)
        for layer, value in enumerate((0.04, 0.05, 0.06))
        for role in ("k", "v")
    }
    assert scales.keys[1, "v"] == "kv_cache.scaling_factor.0.1"


@pytest.mark.parametrize(
    "pair", [[0.25, 0.5], {"k": 0.25, "v": 0.5}, {"k_scale": 0.25, "v_scale": 0.5}]
)
def test_separate_factors_for_k_and_v(pair):
    scales = read(by_rank({**GOOD, "1": pair}))
    assert not scales.problems
    assert (scales.values[1, "k"], scales.values[1, "v"]) == (0.25, 0.5)


def test_own_ranks_factors_are_read():
    other = {layer: value * 2 for layer, value in GOOD.items()}
    assert read(by_rank(GOOD, other), tp_rank=1, tp_size=2).values[0, "k"] == rounded(0.08)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_file_for_another_tp_size_is_refused_and_lists_the_layers(tp_size):
    scales = read(by_rank(GOOD, GOOD), tp_size=tp_size)
    (problem,) = scales.problems
    assert problem.code == "missing_all"
    assert "0, 1, 2" in problem.message
    assert f"tp_size is {tp_size}" in problem.message
    assert not scales.values


def test_missing_layers_are_listed():
    (problem,) = read(by_rank({"1": 0.05})).problems
    assert (problem.code, problem.file) == ("missing_all", FILE)
    assert "0, 2" in problem.message


@pytest.mark.parametrize(
    "data", [by_rank({**GOOD, "3": 0.5}), {"quant_type": "", "scales": [[0.5] * 2] * 4}]
)
def test_layer_beyond_the_model_is_refused(data):
    (problem,) = read(data).problems
    assert (problem.code, problem.file) == ("no_layer", FILE)
    assert "layer 3" in problem.message


def test_missing_side_is_named():
    problems = read(by_rank({**GOOD, "1": {"k": 0.5}, "2": {"v": 0.25}})).problems
    assert [it.code for it in problems] == ["missing_k", "missing_v"]
    assert problems[0].message.count("layers 2") == 1
    assert problems[1].message.count("layers 1") == 1


def test_empty_rank_misses_every_layer():
    (problem,) = read(by_rank({})).problems
    assert "0, 1, 2" in problem.message


def test_hybrid_and_shared_layers_need_no_scales():
    model = Geometry(num_layers=4, attention_layers=(1, 2, 3), kv_shared={3: 2})
    scales = read(by_rank({"0": 0.0, "1": 0.5, "2": 0.25, "3": 0.125}), model)
    assert not scales.problems
    assert {layer for layer, _ in scales.values} == {1, 2}


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"dtype": "int8"}, "unsupported_scheme"), ({"model_type": "qwen2"}, "conflict")],
)
def test_file_of_another_format_or_model_is_refused(changes, code):
    scales = read(by_rank(GOOD, **changes))
    assert [it.code for it in scales.problems] == [code]
    assert not scales.values


BAD = [
    (0.0, "nonpositive"),
    (-0.1, "nonpositive"),
    (math.nan, "nonfinite"),
    (math.inf, "nonfinite"),
    (-math.inf, "nonfinite"),
    (1e-45, "nonfinite"),
    (3.4e38, "nonfinite"),
    (10**400, "dtype"),
    (True, "dtype"),
    ("0.1", "dtype"),
    (None, "dtype"),
    ([], "dtype"),
    ([[0.5], [0.5, 0.25]], "dtype"),
]


@pytest.mark.parametrize(("value", "code"), BAD, ids=lambda it: str(it)[:20])
def test_bad_value_is_refused_with_layer_and_role(value, code):
    wrapped = {"k": value, "v": 0.5}
    scales = read(by_rank({**GOOD, "1": wrapped}))
    (problem,) = scales.problems
    assert (problem.code, problem.file) == (code, FILE)
    assert problem.key == "kv_cache.scaling_factor.0.1.k"
    assert "layer 1, k" in problem.message
    assert (1, "k") not in scales.values


@pytest.mark.parametrize(("value", "code"), BAD, ids=lambda it: str(it)[:20])
def test_bad_value_under_a_name_is_refused_the_same(value, code):
    model = Geometry(num_layers=1, num_kv_heads=2)
    scales = read({"model.layers.0.self_attn.k_scale": value}, model)
    assert [it.code for it in scales.problems] == [code]


def test_flat_names_are_multipliers():
    data = {
        f"model.layers.{layer}.self_attn.{role}_scale": 0.5
        / (layer + 1)
        / (2 if role == "k" else 1)
        for layer in range(3)
        for role in ("q", "k", "v")
    }
    scales = read(data)
    assert not scales.problems
    assert scales.values[0, "k"] == 0.25
    assert scales.values[1, "v"] == 0.25
    assert scales.values[2, "q"] == rounded(0.5 / 3)


def test_fastdeploys_names_are_amax_by_head():
    data = {
        f"ernie.layers.{layer}.self_attn.cache{role}_matmul.activation_scale": [
            56.0,
            112.0 * (layer + 1),
        ]
        for layer in range(3)
        for role in ("k", "v")
    }
    scales = read(data)
    assert not scales.problems
    assert scales.values[1, "k"] == [0.125, 0.5]


def test_per_channel_list_is_refused():
    data = {"ernie.layers.0.self_attn.cachek_matmul.activation_scale": [[[[1.0] * 16]] * 2]}
    (problem,) = read(data, Geometry(num_layers=1, num_kv_heads=2, head_dim=16)).problems
    assert problem.code == "per_channel"


def test_name_that_is_no_scales_is_a_problem():
    data = {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.mlp.k_scale": 0.5}
    (problem,) = read(data, Geometry()).problems
    assert (problem.code, problem.key) == ("unknown_scale", "model.layers.0.mlp.k_scale")


def test_two_names_for_one_place_must_agree():
    data = {
        "model.layers.0.self_attn.k_scale": 0.5,
        "model.layers.0.self_attn.kv_scale": 0.25,
    }
    (problem,) = read(data, Geometry()).problems
    assert (problem.code, problem.key) == ("conflict", "model.layers.0.self_attn.kv_scale")


def test_draft_layers_follow_the_decoders():
    data = {f"mtp.layers.{layer}.self_attn.kv_scale": 0.5 for layer in (0, 1)}
    scales = read(data, Geometry(num_layers=3))
    assert set(scales.values) == {(3, "k"), (3, "v"), (4, "k"), (4, "v")}
    (problem, _) = read(data, Geometry()).problems
    assert problem.code == "no_layer"


def test_name_without_a_layer_is_a_problem():
    (problem,) = read({"self_attn.k_scale": 0.5}, Geometry()).problems
    assert problem.code == "no_layer"


def rows(**changes):
    return {
        "version": "1.0",
        "quant_type": "per_head",
        "qmin": -448.0,
        "qmax": 448.0,
        "scales": [[0.5, 0.25, 0.125, 0.0625], [0.4, 0.3, 0.2, 0.1], [0.9, 0.8, 0.7, 0.6]],
        **changes,
    }


def test_calibration_rows_hold_k_heads_then_v_heads():
    scales = read(rows())
    assert not scales.problems
    assert scales.values[0, "k"] == [0.5, 0.25]
    assert scales.values[0, "v"] == [0.125, 0.0625]
    assert scales.values[1, "v"] == [rounded(0.2), rounded(0.1)]


def test_calibration_rows_per_tensor():
    scales = read(rows(quant_type="per_tensor", scales=[[0.5, 0.25]] * 3))
    assert (scales.values[2, "k"], scales.values[2, "v"]) == (0.5, 0.25)


def test_calibration_rows_too_few_for_the_model():
    (problem,) = read(rows(scales=[[0.5, 0.25]] * 2)).problems
    assert (problem.code, "layers 2;" in problem.message) == ("missing_all", True)


def test_calibration_rows_of_other_head_counts_are_refused():
    problems = read(rows(scales=[[0.5] * 6] * 3)).problems
    assert {it.code for it in problems} == {"granularity"}


def lists(**changes):
    scales = {"k_scales": [0.5, 0.25, 0.125], "v_scales": [0.4, [0.3, 0.2], 0.1]}
    return {"scales": scales, **changes}


def test_lists_by_role():
    scales = read(lists(qmax=448.0))
    assert not scales.problems
    assert scales.values[1, "k"] == 0.25
    assert scales.values[1, "v"] == [rounded(0.3), rounded(0.2)]


def test_lists_by_role_of_chosen_layers_and_drafts():
    model = Geometry(num_layers=8, num_kv_heads=2, attention_layers=(3, 5, 7))
    draft = {"scales": {"k_scales": [0.75], "v_scales": [0.625]}}
    scales = read(lists(layer_ids=[3, 5, 7], mtp=draft), model)
    assert not scales.problems
    assert scales.values[7, "k"] == 0.125
    assert scales.values[8, "k"] == 0.75
    (problem,) = read({"mtp": draft}, Geometry()).problems
    assert problem.code == "no_layer"


@pytest.mark.parametrize("data", [rows(qmax=127), lists(qmax=128.0)])
def test_int8_scales_are_never_taken_for_fp8(data):
    scales = read(data)
    assert [it.code for it in scales.problems] == ["unsupported_scheme"]
    assert not scales.values


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ({"kv_cache": []}, "kv_cache"),
        ({"kv_cache": {"dtype": 8}}, "kv_cache.dtype"),
        (by_rank([]), "kv_cache.scaling_factor.0"),
        (by_rank({"first": 0.5}), "kv_cache.scaling_factor.0.first"),
        (by_rank({"²": 0.5}), "kv_cache.scaling_factor.0.²"),
        (rows(scales=[[0.5]]), "scales"),
        (rows(scales=[0.5]), "scales"),
        (lists(layer_ids=[0]), "layer_ids"),
        (lists(layer_ids=[0, 1, True]), "layer_ids"),
        ({"scales": {"k_scales": 1}}, "scales.k_scales"),
    ],
)
def test_wrong_structure_names_file_and_path(data, place):
    with pytest.raises(CheckpointError) as caught:
        read(data)
    assert (caught.value.file, caught.value.place) == (FILE, place)


def test_other_json_is_no_scale_file():
    assert not is_kv_scales({"model_type": "llama", "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match=FILE):
        read({"model_type": "llama"})


@pytest.mark.parametrize("data", [by_rank(GOOD), rows(), lists(), {"mtp": {}}])
def test_every_layout_is_recognised(data):
    assert is_kv_scales(data)
