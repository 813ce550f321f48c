"""Rounding to FP8 against the bit definition, exhaustively where the inputs can be counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantattn.arithmetic import decode_fp8, dequantize_fp8, encode_fp8, quantize_fp8
from tests import fp8_oracle

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
E4M3, E5M2 = DTYPES


def as_float64(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_decodes_to_its_definition(dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    expected = [fp8_oracle.code_value(code, dtype) for code in range(256)]
    np.testing.assert_array_equal(as_float64(decode_fp8(codes, dtype)), expected)
    np.testing.assert_array_equal(as_float64(decode_fp8(codes.view(dtype), dtype)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_code_survives_a_round_trip(dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    finite = codes[decode_fp8(codes, dtype).isfinite()]
    assert torch.equal(encode_fp8(decode_fp8(finite, dtype), dtype).view(torch.uint8), finite)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_encodes_to_the_nearest_code(dtype, source) -> None:
    x = fp8_oracle.every_bf16().view(source)
    expected = fp8_oracle.encode(as_float64(x), dtype)
    np.testing.assert_array_equal(encode_fp8(x, dtype).view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_ties_and_their_neighbours_encode_to_the_nearest_code(dtype) -> None:
    x = fp8_oracle.hard_float32(dtype)
    expected = fp8_oracle.encode(as_float64(x), dtype)
    np.testing.assert_array_equal(encode_fp8(x, dtype).view(torch.uint8).numpy(), expected)


@pytest.mark.parametrize(
    ("x", "dtype", "expected"),
    [
        (464.0, E4M3, 448.0),
        (465.0, E4M3, 448.0),
        (-1000.0, E4M3, -448.0),
        (math.inf, E4M3, 448.0),
        (-math.inf, E4M3, -448.0),
        (61440.0, E5M2, 57344.0),
        (65536.0, E5M2, 57344.0),
        (math.inf, E5M2, 57344.0),
        (1000.0, E5M2, 1024.0),
        # just above a tie: rounding through fp16 first gives 384, 256 and 128
        (400.199585, E4M3, 416.0),
        (272.156555, E4M3, 288.0),
        (136.002075, E4M3, 144.0),
    ],
)
def test_known_hard_values(x, dtype, expected) -> None:
    assert encode_fp8(torch.tensor(x), dtype).float().item() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_nan_is_one_code(dtype) -> None:
    bits = torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]).to(torch.int32)
    assert encode_fp8(bits.view(torch.float32), dtype).view(torch.uint8).tolist() == [0x7F] * 4


def test_zero_keeps_its_sign() -> None:
    assert encode_fp8(torch.tensor([0.0, -0.0]), E4M3).view(torch.uint8).tolist() == [0, 0x80]


def test_quantizing_divides_by_the_scale() -> None:
    codes = quantize_fp8(torch.tensor(1.0), torch.tensor(0.04), E4M3)
    assert codes.float().item() == 24.0
    assert dequantize_fp8(codes, torch.tensor(0.04), E4M3).item() == pytest.approx(0.96)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_quotient_is_float32_division_not_a_reciprocal(dtype) -> None:
    x = fp8_oracle.hard_float32(dtype) * 0.0123
    expected = fp8_oracle.encode(fp8_oracle.quotient(x.numpy(), 0.0123), dtype)
    actual = quantize_fp8(x, torch.tensor(0.0123), dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(actual, expected)
    by_reciprocal = encode_fp8(x * (1 / torch.tensor(0.0123)), dtype).view(torch.uint8).numpy()
    assert (by_reciprocal != expected).any()


def test_doubling_the_scale_doubles_what_codes_mean() -> None:
    codes = torch.tensor([3.0, -0.5]).to(E4M3)
    once = dequantize_fp8(codes, torch.tensor([0.3, 0.7]), E4M3)
    assert torch.equal(dequantize_fp8(codes, torch.tensor([0.6, 1.4]), E4M3), 2 * once)
