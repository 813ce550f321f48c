"""Values: exact widening, one rounding, shapes and dtypes; the oracle is numpy's float64."""

import numpy as np
import pytest
import torch

from quantattn.errors import Problem
from quantattn.loaders.names import parse_name
from quantattn.loaders.values import ReadContext, read_values

A = "model.layers.0.self_attn"
CONTEXT = {"kv": "fp8_e4m3", "num_heads": 6, "num_kv_heads": 3, "head_dim": 8}


def read(name, tensor, **changes):
    return read_values(parse_name(f"{A}.{name}"), tensor, ReadContext(**{**CONTEXT, **changes}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_stored_value_is_widened_exactly(dtype):
    stored = torch.tensor([0.0123, 0.0456, 7.89], dtype=dtype)
    expected = stored.double().numpy().astype(np.float32).astype(float).tolist()
    assert read("k_scale", stored) == {"k": expected}


@pytest.mark.parametrize(
    ("kv", "largest"),
    [
        ("fp8_e4m3", 448),
        ("fp8", 448),
        ("fp8_e5m2", 57344),
        ("int8", 127),
        ("int4", 7),
        ("nvfp4", 2688),
    ],
)
def test_amax_is_divided_by_the_formats_maximum_with_one_rounding(kv, largest):
    stored = torch.tensor([0.9, 3.3, 11.7])
    expected = (stored.numpy().astype(np.float64) / largest).astype(np.float32).tolist()
    assert read("v_bmm_quantizer._amax", stored, kv=kv) == {"v": expected}


def test_reciprocal_is_inverted_with_one_rounding():
    stored = torch.tensor([3.0, 7.0, 11.0])
    expected = (1 / stored.numpy().astype(np.float64)).astype(np.float32).tolist()
    result = read("kv_orig_quant_scale", stored)
    assert result == {"k": expected, "v": expected}


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1), (1, 3, 1, 1), (1, 3)])
def test_vector_of_heads_is_read_in_order_from_any_shape(shape):
    stored = torch.tensor([0.5, 0.25, 0.125]).reshape(shape)
    assert read("k_scale", stored) == {"k": [0.5, 0.25, 0.125]}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_one_number_is_a_scalar_in_any_shape(shape):
    assert read("k_scale", torch.full(shape, 0.5)) == {"k": 0.5}


def test_non_contiguous_tensor_is_read_by_its_strides():
    stored = torch.tensor([0.5, 9.0, 0.25, 9.0, 0.125, 9.0])[::2]
    assert read("k_scale", stored) == {"k": [0.5, 0.25, 0.125]}


@pytest.mark.parametrize("heads", [6, 3])
def test_query_scales_come_for_query_heads_or_reduced_to_kv_heads(heads):
    stored = torch.arange(1, heads + 1) / 16
    assert read("q_scale", stored) == {"q": stored.tolist()}


def test_one_kv_head_gives_a_scalar():
    assert read("k_scale", torch.tensor([[0.5]]), num_kv_heads=1) == {"k": 0.5}


def test_vector_is_taken_where_the_head_count_is_unknown_but_not_a_huge_one():
    unknown = {"num_heads": None, "num_kv_heads": None, "head_dim": None}
    assert read("k_scale", torch.full((5,), 0.5), **unknown) == {"k": [0.5] * 5}
    result = read("k_scale", torch.full((5000,), 0.5), **unknown)
    assert isinstance(result, Problem)
    assert result.code == "granularity"


def test_latents_repeated_head_value_is_one_scale():
    assert read("k_scale", torch.full((3, 1, 1), 0.375), is_mla=True) == {"k": 0.375}


def test_mla_query_scales_stay_one_for_each_head():
    stored = torch.full((6,), 0.375)
    assert read("q_scale", stored, is_mla=True) == {"q": [0.375] * 6}


@pytest.mark.parametrize(("means", "expected"), [("scale", 3.5), ("amax", 3.5 / 448)])
def test_cache_scale_is_read_as_the_caller_says(means, expected):
    assert read("k_cache.scale", torch.tensor(3.5), cache_scale_means=means) == {
        "k": np.float32(expected)
    }


def test_smallest_and_largest_valid_multipliers_are_kept():
    smallest, largest = 2.0**-126, float(np.float32(3.4028234663852886e38 / 448))
    stored = torch.tensor([smallest, 1.5, np.nextafter(np.float32(largest), np.float32(0))])
    assert read("k_scale", stored) == {"k": stored.tolist()}


@pytest.mark.parametrize(
    ("stored", "part"),
    [
        (torch.full((3, 8), 0.5), "[3, 8]"),
        (torch.full((5,), 0.5), "a vector of 3"),
        (torch.tensor([1, 2, 3]), "got int64"),
        (torch.tensor([0.5, -2.5, 0.5]), "-2.5"),
        (torch.tensor(1e-40), "smallest normal"),
        (torch.tensor(1e38), "beyond float32"),
    ],
)
def test_problem_says_what_came_and_what_was_expected(stored, part):
    result = read("k_scale", stored)
    assert isinstance(result, Problem)
    assert result.key == f"{A}.k_scale"
    assert part in result.message
