"""static_quant_fp8 against the bit definition, for every shape of scale and kind of strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantattn.errors import FormatError, ScaleError
from quantattn.ops import static_quant_fp8
from tests import fp8_oracle

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
MODEL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def expected_codes(x: torch.Tensor, scale: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Codes of x divided by a scale that has x's shape."""
    return fp8_oracle.encode(fp8_oracle.quotient(x.float().numpy(), scale), dtype)


def codes(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", MODEL_DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (0, 5), (3, 96), (5, 3, 7), (2, 3, 2, 5)])
@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_one_scale_serves_any_shape(dtype, source, shape, scale_shape) -> None:
    x = (torch.randn(shape) * 30).to(source)
    out = static_quant_fp8(x, torch.full(scale_shape, 0.037), dtype=dtype)
    assert out.shape == x.shape
    assert out.dtype == dtype
    np.testing.assert_array_equal(codes(out), expected_codes(x, np.float32(0.037), dtype))


@pytest.mark.parametrize(
    ("shape", "num_groups"),
    [((5, 3, 8), 3), ((5, 6, 8), 2), ((5, 3, 8), 12), ((5, 24), 3), ((5, 24), 24), ((0, 24), 3)],
    ids=[
        "a scale a head",
        "a scale a group of heads",
        "a scale a part of a head",
        "a scale a group of columns",
        "a scale a column",
        "no rows",
    ],
)
def test_each_group_of_columns_has_its_scale(shape, num_groups) -> None:
    x = torch.randn(shape) * 20
    scale = torch.linspace(0.03, 0.9, num_groups)
    columns = x.shape[1:].numel()
    by_column = scale.numpy().repeat(columns // num_groups).reshape(shape[1:])
    out = static_quant_fp8(x, scale)
    np.testing.assert_array_equal(
        codes(out), expected_codes(x, np.broadcast_to(by_column, shape), torch.float8_e4m3fn)
    )


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor([0.3, 0.7])])
@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :, ::2],
        lambda x: x[::2],
        lambda x: x.flatten(1)[:, 4:12].unflatten(1, (2, 4)),
        lambda x: x[:1].expand(3, -1, -1),
    ],
    ids=["transposed", "every other column", "every other row", "slice of rows", "expanded"],
)
def test_strides_do_not_matter_and_the_output_is_contiguous(scale, strided) -> None:
    x = strided(torch.randn(6, 4, 8))
    out = static_quant_fp8(x, scale)
    assert out.is_contiguous()
    assert torch.equal(
        out.view(torch.uint8), static_quant_fp8(x.contiguous(), scale).view(torch.uint8)
    )


def test_infinities_saturate_and_nan_stays() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan])
    assert codes(static_quant_fp8(x, torch.tensor(0.5))).tolist() == [0x7E, 0xFE, 0x7F, 0x7F]


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.5, "scale: got float, expected a tensor"),
        (None, "scale: got None"),
        (torch.tensor(0.5, dtype=torch.bfloat16), r"dtype torch.bfloat16, expected.*float32"),
        (torch.full((1, 1), 0.5), r"shape \[1, 1\]"),
        (torch.full((5,), 0.5), "5 groups do not cut 24 columns"),
        (torch.ones(0), "0 groups"),
        (torch.tensor(0.5, device="meta"), "scale is on meta, but .* on cpu"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scale, message) -> None:
    with pytest.raises(ScaleError, match=message):
        static_quant_fp8(torch.randn(2, 24), scale)


def test_groups_need_rows_and_columns() -> None:
    with pytest.raises(ScaleError, match=r"scale: got shape \[2\]"):
        static_quant_fp8(torch.randn(2, 2, 2, 2), torch.tensor([0.5, 0.25]))


def test_inputs_of_other_dtypes_are_refused() -> None:
    with pytest.raises(FormatError, match=r"input: got dtype torch.float64"):
        static_quant_fp8(torch.randn(2, 2).double(), torch.tensor(0.5))


def test_numbers_that_are_no_tensor_are_refused() -> None:
    with pytest.raises(FormatError, match="input: got list, expected a tensor"):
        static_quant_fp8([1.0], torch.tensor(0.5))


def test_other_targets_are_refused() -> None:
    with pytest.raises(FormatError, match=r"dtype: got torch.int8"):
        static_quant_fp8(torch.randn(2, 2), torch.tensor(0.5), dtype=torch.int8)
