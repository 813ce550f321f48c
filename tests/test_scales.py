"""Valid values, shapes and sources of a scale, through every way to give one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantattn import MLAAttention, QuantAttention, QuantAttnError, ScaleError
from quantattn.scales import (
    ScaleGranularity,
    ScaleShape,
    ScaleSource,
    fit_scale,
    invalid_reason,
    raw_values,
)

INVALID = [0.0, -0.0, -0.1, -1.0, float("nan"), float("inf"), float("-inf"), 1e-45, 3.4e38, True]
NOT_NUMBERS = ["0.1", None, [], {}, b"0.1", [0.1, "0.2"], [[0.1, 0.2], [0.3, 0.4]], object]
ROLES = ("q", "k", "v", "prob")


def layer(**options: object) -> QuantAttention:
    return QuantAttention(4, 8, num_kv_heads=2, layer_name="layers.3.attn", **options)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("value", [*INVALID, *NOT_NUMBERS], ids=repr)
def test_the_setter_and_the_attribute_refuse_what_is_no_scale(role: str, value: object) -> None:
    """C03 (onnxruntime/mobius #447): a second entry point accepted what the first refused."""
    module = layer()
    module.set_scale(role, 0.25)
    with pytest.raises(ScaleError, match=rf"{role}_scale of layer 'layers.3.attn'") as raised:
        module.set_scale(role, value)
    assert (raised.value.layer, raised.value.role) == ("layers.3.attn", role)
    with pytest.raises(ScaleError, match=f"{role}_scale"):
        setattr(module, f"{role}_scale", value)
    assert module.host_scale(role) == 0.25


@pytest.mark.parametrize("value", [v for v in INVALID if v is not True], ids=repr)
def test_an_in_place_write_is_caught_by_the_audit(value: float) -> None:
    module = layer()
    module.k_scale.copy_(torch.tensor(value))
    assert "invalid" in {finding.code for finding in module.audit()}
    with pytest.raises(ScaleError, match="k_scale"):
        module.accept_buffers()


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.uint8, torch.bool]
)
def test_tensors_of_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ScaleError, match=str(dtype).replace(".", r"\.")):
        layer().set_scale("k", torch.ones((), dtype=torch.float32).to(dtype))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, 0.5),
        (2, 2.0),
        (np.float32(0.25), 0.25),
        (np.float64(0.25), 0.25),
        (torch.tensor(0.0123), torch.tensor(0.0123).item()),
        (torch.tensor([0.5], dtype=torch.float16), 0.5),
        (torch.tensor([[0.0123]], dtype=torch.bfloat16), 0.0123291015625),
        (torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1 / 3).item()),
        ([0.125], 0.125),
    ],
    ids=repr,
)
def test_a_number_in_any_dress_is_widened_exactly(value: object, expected: float) -> None:
    module = layer()
    module.set_scale("v", value)
    assert module.host_scale("v") == expected
    assert module.v_scale.shape == ()


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1), (1, 2, 1, 1)])
def test_one_number_a_head_in_any_shape(shape: tuple[int, ...]) -> None:
    module = layer(scale_granularity="head")
    module.set_scale("k", torch.tensor([0.5, 0.25]).reshape(shape))
    assert module.host_scale("k") == [0.5, 0.25]
    assert module.k_scale.shape == (2,)


@pytest.mark.parametrize(
    ("role", "value"),
    [("k", [1.0, 2.0, 3.0]), ("v", [1.0] * 4), ("q", [1.0] * 3), ("prob", [1.0, 2.0])],
)
def test_other_counts_are_refused_with_both_shapes(role: str, value: list[float]) -> None:
    with pytest.raises(ScaleError, match=rf"\[{len(value)}\].*\[\]"):
        layer(scale_granularity="head").set_scale(role, value)


def test_a_query_scale_a_query_head_is_reduced_by_the_maximum_of_groups() -> None:
    record = fit_scale("q", [1, 2, 3, 4, 5, 6, 7, 8], ScaleShape(8, 2, ScaleGranularity.HEAD))
    assert record.values == (4.0, 8.0)
    assert record.note == "maximum of each group of 4 query heads"


def test_a_per_tensor_layer_with_one_kv_head_keeps_its_shape() -> None:
    assert QuantAttention(4, 8, num_kv_heads=1, scale_granularity="head").k_scale.shape == (1,)
    assert QuantAttention(4, 8, num_kv_heads=1).k_scale.shape == ()


def test_every_scale_carries_its_source() -> None:
    module = layer()
    module.set_scale("k", 0.5, source="checkpoint", key="a.k_scale", file="x.safetensors")
    module.set_scale("v", 0.25)
    sources = module.scale_sources
    assert (sources["k"].source, sources["k"].key, sources["k"].file) == (
        ScaleSource.CHECKPOINT,
        "a.k_scale",
        "x.safetensors",
    )
    assert (sources["v"].source, sources["q"].source) == (ScaleSource.CALLER, ScaleSource.DEFAULT)
    assert (sources["v"].value, sources["prob"].value) == (0.25, 1.0)
    with pytest.raises(ScaleError, match="nowhere"):
        module.set_scale("v", 0.25, source="nowhere")


def test_setting_one_role_leaves_the_others() -> None:
    """C07 (vLLM #38975): the q fallback was overwritten; prob was never synchronised."""
    module = layer()
    values = {"q": 0.31, "k": 0.0123, "v": 0.05, "prob": 0.5}
    for role, value in values.items():
        module.set_scale(role, value)
    for role, value in values.items():
        assert module.host_scale(role) == torch.tensor(value).item()
        assert module.scale_sources[role].values == (torch.tensor(value).item(),)


@pytest.mark.parametrize("role", ["z", "out", "", "K"])
def test_unknown_roles_are_refused(role: str) -> None:
    with pytest.raises(ScaleError, match="role"):
        layer().set_scale(role, 0.5)


@pytest.mark.parametrize("value", [*INVALID, "200", None, [1.0, 2.0]], ids=repr)
def test_ranges_are_checked_like_scales(value: object) -> None:
    with pytest.raises(ScaleError, match="k_range"):
        layer(k_range=value)
    module = layer()
    with pytest.raises(ScaleError, match="k_range"):
        module.k_range = value
    assert module.k_range.item() == 200.0


def test_prob_has_no_range_and_mla_no_v_range_of_its_own() -> None:
    with pytest.raises(ScaleError, match="role"):
        layer().set_range("prob", 1.0)
    with pytest.raises(ScaleError, match="role"):
        MLAAttention(4, 16, 4, softmax_scale=0.1).set_range("v", 1.0)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"scale_granularity": "channel"}, "scale_granularity"),
        ({"kv_sharing_target": "layers.0"}, "kv_sharing_target"),
        ({"kv_cache_dtype": "fp7"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype"),
    ],
)
def test_a_constructor_argument_that_does_not_fit_is_named(options: dict, argument: str) -> None:
    with pytest.raises(QuantAttnError, match=argument):
        QuantAttention(4, 8, **options)


def test_numbers_beyond_float_and_empty_tensors_are_refused() -> None:
    for value in (10**400, torch.empty(0)):
        with pytest.raises(ScaleError, match="k_scale"):
            layer().set_scale("k", value)
    with pytest.raises(ScaleError, match="k_range"):
        layer().set_range("k", torch.empty(0))
    with pytest.raises(ScaleError, match="role"):
        layer().host_scale("z")


@pytest.mark.parametrize("scale", [0.99, 1.0, 1.001, 1.01])
def test_the_largest_scale_is_the_one_whose_product_with_448_is_finite(scale: float) -> None:
    value = float(np.finfo(np.float32).max) / 448.0 * scale
    assert (invalid_reason(value) is None) is (scale <= 1.0)


def test_reading_a_meta_tensor_is_refused() -> None:
    with pytest.raises(ScaleError, match="meta"):
        raw_values(torch.empty((), device="meta"))


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_valid_means_that_reciprocal_and_largest_product_are_normal_float32(value: float) -> None:
    smallest = np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        rounded = np.float32(value)
        valid = (
            math.isfinite(value)
            and rounded >= smallest
            and np.isfinite(np.float32(448.0 * value))
            and np.float32(1.0) / rounded >= smallest
        )
    assert (invalid_reason(value) is None) == bool(valid)


@given(st.lists(st.floats(2.0**-100, 2.0**100), min_size=2, max_size=2))
def test_a_value_that_is_set_is_read_back_as_its_float32(values: list[float]) -> None:
    module = layer(scale_granularity="head")
    module.set_scale("k", values)
    assert module.host_scale("k") == torch.tensor(values, dtype=torch.float32).tolist()
