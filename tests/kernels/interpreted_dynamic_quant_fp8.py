"""The kernel in Triton's interpreter, on the CPU; test_interpreted.py runs this in a process."""

from __future__ import annotations

import pytest
import torch

from quantattn.kernels.dynamic_quant_fp8 import dynamic_quant_fp8
from quantattn.reference import dynamic_quant_fp8 as reference
from tests import fp8_oracle

# numpy, which interprets, says where float32 division overflows or meets a signalling NaN; both are
# part of what is tested.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


def assert_bit_equal(x, granularity="token", dtype=torch.float8_e4m3fn) -> None:
    codes, scales = dynamic_quant_fp8(x, granularity, dtype)
    want_codes, want_scales = reference.dynamic_quant_fp8(x, granularity, dtype)
    assert (codes.shape, codes.dtype, codes.is_contiguous()) == (x.shape, dtype, True)
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(dtype, source) -> None:
    x = fp8_oracle.every_bf16().view(source)
    assert_bit_equal(x.view(-1, 128), dtype=dtype)
    assert_bit_equal(x[torch.randperm(len(x), generator=torch.manual_seed(0))].view(-1, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_ties_neighbours_and_extremes(dtype) -> None:
    x = fp8_oracle.hard_float32(dtype)
    assert_bit_equal(x[: len(x) // 13 * 13].view(-1, 13), dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 13), (4, 1), (7, 1000), (3, 5000), (33, 96), (0, 3)])
def test_rows_of_any_width(shape) -> None:
    assert_bit_equal(torch.randn(shape))


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("granularity", ["token", "token_head"])
def test_heads_in_a_slice_of_rows_and_any_strides(rows, granularity) -> None:
    x = torch.randn(rows, 3 * 96)[:, 96:192].unflatten(1, (3, 32))
    assert_bit_equal(x, granularity)
    assert_bit_equal(x.transpose(0, 1), granularity)
    assert_bit_equal(x[:, :, ::2], granularity)


def test_rows_of_zeros_and_rows_without_a_finite_number() -> None:
    x = torch.randn(5, 13)
    x[1], x[2], x[3, 4], x[4, 7] = 0.0, torch.inf, torch.nan, -torch.inf
    assert_bit_equal(x)
