"""The kernel in Triton's interpreter, on the CPU; test_interpreted.py runs this in a process."""

from __future__ import annotations

import pytest
import torch

from quantattn.kernels.static_quant_fp8 import static_quant_fp8
from quantattn.reference import static_quant_fp8 as reference
from tests import fp8_oracle

# numpy, which interprets, says where float32 division overflows or meets a signalling NaN; both are
# part of what is tested.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def assert_bit_equal(x, scale, dtype=torch.float8_e4m3fn) -> None:
    actual = static_quant_fp8(x, scale, dtype)
    assert actual.shape == x.shape
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    actual = actual.view(torch.uint8)
    expected = reference.static_quant_fp8(x, scale, dtype).view(torch.uint8)
    assert torch.equal(actual, expected), x[actual != expected][:8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0123, 37.7])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(dtype, scale, source) -> None:
    assert_bit_equal(fp8_oracle.every_bf16().view(source), torch.tensor(scale), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0123])
def test_float32_ties_neighbours_and_extremes(dtype, scale) -> None:
    assert_bit_equal(fp8_oracle.hard_float32(dtype), torch.tensor([scale]), dtype)


@pytest.mark.parametrize("num_groups", [1, 3, 2, 12])
@pytest.mark.parametrize("rows", [1, 17])
def test_groups_of_columns_in_a_slice_of_rows(num_groups, rows) -> None:
    packed = torch.randn(rows, 3 * 96)
    x = packed[:, 96:192].unflatten(1, (3, 32))
    assert_bit_equal(x, torch.linspace(0.01, 0.4, num_groups))


def test_more_columns_than_a_tile() -> None:
    assert_bit_equal(torch.randn(3, 5000)[:, :4998], torch.tensor([0.1, 0.3]))


@pytest.mark.parametrize(
    "shape", [(), (0, 4), (1,), (3, 5), (2, 3, 4, 5), (15,), (16,), (17,), (4097,), (129, 32)]
)
def test_any_shape(shape) -> None:
    x = torch.randn(shape)
    assert_bit_equal(x, torch.tensor(0.3))
    if x.ndim > 1:
        assert_bit_equal(x.mT, torch.tensor(0.3))
