"""Rounding against the bit definitions, exhaustively where the inputs can be counted."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from quantattn.arithmetic import (
    decode_fp8,
    dequantize_fp8,
    dequantize_rows,
    encode_fp8,
    quantize_fp8,
    quantize_rows,
)
from quantattn.formats import parse_kv_cache_dtype
from quantattn.rotation import rotate_back
from tests import fp8_oracle
from tests.ops import page_oracle, row_cases

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


FP8_ROWS, INT8_ROWS, INT4_ROWS = (parse_kv_cache_dtype(name) for name in page_oracle.FORMATS)
ROW_FORMATS = pytest.mark.parametrize(
    "fmt", [FP8_ROWS, INT8_ROWS, INT4_ROWS], ids=page_oracle.FORMATS
)


def numbers_of(scales: torch.Tensor) -> list[float]:
    return scales.reshape(-1).tolist()


@ROW_FORMATS
@pytest.mark.parametrize("width", [8, 24, 96, 128, 256])
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "outlier channels"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_coded_bit_by_bit_as_defined(fmt, width, kind, source) -> None:
    x = (page_oracle.drawn(kind, 6, width) * 0.037).to(source)
    codes, scales = quantize_rows(x.view(2, 3, width), fmt)
    assert codes.shape == (2, 3, fmt.code_width(width))
    assert scales.shape == (2, 3, 2)[: 3 if fmt is INT4_ROWS else 2]
    for row, stored, own in zip(x, codes.flatten(0, 1), scales.flatten(0, 1), strict=True):
        expected, numbers = page_oracle.encode_row(row.float().numpy(), fmt.name)
        np.testing.assert_array_equal(stored.numpy(), expected)
        assert numbers_of(own) == [float(number) for number in numbers]


@ROW_FORMATS
def test_rows_read_back_as_their_codes_and_scales_mean(fmt) -> None:
    codes = torch.randint(0, 256, (5, 64), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 3
    scales = torch.rand(5, 2) + 0.1 if fmt is INT4_ROWS else torch.rand(5) + 0.1
    rows = dequantize_rows(codes, scales, fmt)
    for row, stored, own in zip(rows, codes, scales, strict=True):
        expected = page_oracle.decode_row(stored.numpy(), numbers_of(own), fmt.name)
        actual = rotate_back(row) if fmt.is_rotated else row
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_int8_rounds_to_nearest_with_ties_to_even() -> None:
    quotients = [0.6, -0.6, 1.9, -1.9, 126.7, 0.5, 1.5, 2.5, -0.5, -2.5, 127.0, -127.0]
    codes, scale = quantize_rows(torch.tensor(quotients) * 0.25, INT8_ROWS)
    assert scale.item() == 0.25
    assert codes.view(torch.int8).tolist() == [1, -1, 2, -2, 127, 0, 2, 2, 0, -2, 127, -127]


def test_int4_rounds_to_nearest_with_ties_to_even_and_packs_the_even_element_low() -> None:
    quotients = [0.0, 15.0, 3.5, 0.5, 1.5, 12.0, 5.0, 2.5]
    rotated = torch.tensor(quotients * 2) * 0.5 - 1.5  # 16 numbers: the rotation is exact
    codes, scales = quantize_rows(rotate_back(rotated), INT4_ROWS)
    assert scales.tolist() == [0.5, -1.5]
    assert [int(byte) & 0xF for byte in codes] == [0, 4, 2, 5] * 2
    assert [int(byte) >> 4 for byte in codes] == [15, 0, 12, 2] * 2


def test_int4_rounds_the_exact_product_with_the_reciprocal() -> None:
    rows = row_cases.tie_rows(64, 50)
    rotated = rows.double().numpy() @ page_oracle.rotation(64)
    codes, scales = quantize_rows(rows, INT4_ROWS)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).tolist()
    for row, (scale, offset), actual in zip(rotated, scales.tolist(), nibbles, strict=True):
        reciprocal = Fraction(float(np.float32(1) / np.float32(scale)))
        expected = [round(Fraction(round(2 * (x - offset)), 2) * reciprocal) for x in row]
        assert actual == expected
    halves = (torch.from_numpy(rotated) - scales[:, 1:]) / scales[:, :1]
    to_even = halves.round().int()
    assert 0 < (to_even != torch.tensor(nibbles)).sum() < to_even.numel()


@pytest.mark.parametrize(("fmt", "most"), [(FP8_ROWS, 448), (INT8_ROWS, 127)], ids=["fp8", "int8"])
@pytest.mark.parametrize("shape", [(1, 13), (1, 128), (5, 13)])
def test_a_scale_is_the_row_s_amax_over_the_largest_code(fmt, most, shape) -> None:
    x = torch.randn(shape)
    _, scale = quantize_rows(x, fmt)
    expected = np.abs(x.numpy()).max(-1) / np.float32(most)
    np.testing.assert_array_equal(scale.numpy(), expected)


@ROW_FORMATS
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-38, -1e-45])
def test_rows_of_zeros_have_code_0_and_scale_1(fmt, value) -> None:
    codes, scales = quantize_rows(torch.full((4, 8), value), fmt)
    assert not (codes & 0x7F).any()
    assert (scales.reshape(4, -1)[:, 0] == 1.0).all()
    assert (dequantize_rows(codes, scales, fmt).abs() < 1e-37).all()


def test_a_zero_offset_has_no_sign() -> None:
    _, scales = quantize_rows(torch.tensor([[-0.0] * 8, [0.0, -0.0] * 4]), INT4_ROWS)
    assert not scales.signbit().any()


def test_equal_numbers_in_the_rotated_row_are_its_offset() -> None:
    codes, scales = quantize_rows(torch.tensor([8.0, 0.0, 0.0, 0.0] * 2)[:4], INT4_ROWS)
    assert scales.tolist() == [1.0, 4.0]
    assert codes.tolist() == [0, 0]


@pytest.mark.parametrize("fmt", [FP8_ROWS, INT8_ROWS], ids=["fp8", "int8"])
def test_infinity_saturates_and_nan_stays_apart(fmt) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 6.35, -0.05])
    codes, scale = quantize_rows(x, fmt)
    assert scale.item() == np.float32(6.35) / np.float32(fmt.max_value)
    got = dequantize_rows(codes, scale, fmt)
    assert got[:2].tolist() == pytest.approx([6.35, -6.35])
    assert got[2].isnan() if fmt is FP8_ROWS else got[2] == 0.0
    assert got[3].item() == pytest.approx(6.35)


def test_int4_saturates_before_it_rotates() -> None:
    limit = 2.0**110
    x = torch.tensor([[math.inf, 1.0] * 4, [math.nan, 1.0] * 4, [-3e38, 0.0] * 4])
    finite = torch.tensor([[limit, 1.0] * 4, [0.0, 1.0] * 4, [-limit, 0.0] * 4])
    actual, expected = quantize_rows(x, INT4_ROWS), quantize_rows(finite, INT4_ROWS)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert expected[1].isfinite().all()


@ROW_FORMATS
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_numbers_leaves_the_others_alone(fmt, value) -> None:
    x = torch.randn(3, 16)
    codes, scales = quantize_rows(x, fmt)
    x[1] = value
    spoilt_codes, spoilt_scales = quantize_rows(x, fmt)
    assert torch.equal(codes[::2], spoilt_codes[::2])
    assert torch.equal(scales[::2], spoilt_scales[::2])
    assert spoilt_scales.isfinite().all()
    assert (spoilt_scales.view(3, -1)[:, 0] > 0).all()


@pytest.mark.parametrize("fmt", [FP8_ROWS, INT8_ROWS], ids=["fp8", "int8"])
def test_row_quotients_are_divisions_not_reciprocals(fmt) -> None:
    largest = torch.linspace(0.1, 3.0, 200)[:, None]
    ties = torch.from_numpy(fp8_oracle.midpoints(E4M3) if fmt is FP8_ROWS else np.arange(127) + 0.5)
    x = torch.cat([largest, ties.float() * (largest / fmt.max_value)], 1)
    codes, scale = quantize_rows(x, fmt)
    by_reciprocal = x * (1 / scale)[:, None]
    if fmt is FP8_ROWS:
        other = encode_fp8(by_reciprocal, E4M3).view(torch.uint8)
    else:
        other = by_reciprocal.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
    assert (codes != other).any()


@pytest.mark.parametrize(
    ("name", "kind", "bound"),
    [
        ("fp8_per_token_head", "normal", 0.03),
        ("fp8_per_token_head", "heavy-tailed", 0.03),
        ("fp8_per_token_head", "outlier channels", 0.03),
        ("int8_per_token_head", "normal", 0.008),
        ("int8_per_token_head", "heavy-tailed", 0.015),
        ("int8_per_token_head", "outlier channels", 0.025),
        ("int4_per_token_head", "normal", 0.11),
        ("int4_per_token_head", "heavy-tailed", 0.12),
        ("int4_per_token_head", "outlier channels", 0.12),
    ],
)
@pytest.mark.parametrize("width", [64, 96, 128])
def test_relative_error_of_rows_is_bounded(name, kind, bound, width) -> None:
    x = page_oracle.drawn(kind, 300, width)
    codes, scales = quantize_rows(x, parse_kv_cache_dtype(name))
    back = [
        page_oracle.decode_row(stored.numpy(), numbers_of(own), name)
        for stored, own in zip(codes, scales, strict=True)
    ]
    error = np.linalg.norm(np.stack(back) - x.double().numpy()) / x.double().norm().item()
    assert bound / 3 < error < bound


def test_the_rotation_halves_what_outlier_channels_cost_int4() -> None:
    x = page_oracle.drawn("outlier channels", 300, 128)
    codes, scales = quantize_rows(x, INT4_ROWS)
    with_rotation = (rotate_back(dequantize_rows(codes, scales, INT4_ROWS)) - x).norm()
    codes, scales = quantize_rows(rotate_back(x), INT4_ROWS)  # the rotation undoes this one
    without = (dequantize_rows(codes, scales, INT4_ROWS) - x).norm()
    assert with_rotation < without / 2
