"""dynamic_quant_fp8 against the bit definition: scales, codes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantattn.errors import FormatError
from quantattn.ops import dynamic_quant_fp8
from tests import fp8_oracle

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
DTYPES = list(LARGEST)
MODEL_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GRANULARITIES = ["token", "token_head"]


def expected(rows: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows `[..., width]`."""
    x = rows.double().numpy()
    amax = np.where(np.isfinite(x), np.abs(x), 0.0).max(-1)
    # A float64 quotient of two float32 numbers rounds to the float32 one.
    scale = np.where(amax / LARGEST[dtype] >= 2.0**-126, amax / LARGEST[dtype], 1.0)
    scale = scale.astype(np.float32)
    quotient = fp8_oracle.quotient(rows.float().numpy(), scale[..., None])
    return fp8_oracle.encode(quotient, dtype), scale


def assert_as_expected(x: torch.Tensor, granularity: str, dtype: torch.dtype) -> None:
    codes, scales = dynamic_quant_fp8(x, granularity=granularity, dtype=dtype)
    rows = x.flatten(1) if granularity == "token" else x
    want_codes, want_scales = expected(rows, dtype)
    assert (codes.dtype, codes.shape, codes.is_contiguous()) == (dtype, x.shape, True)
    assert scales.is_contiguous()
    np.testing.assert_array_equal(scales.numpy(), want_scales)
    np.testing.assert_array_equal(
        codes.view(torch.uint8).numpy().reshape(want_codes.shape), want_codes
    )


def rows_of_all_sizes(*shape: int) -> torch.Tensor:
    """Rows whose magnitudes are all different, up to fp16's."""
    x = torch.randn(shape)
    return x * torch.logspace(-3, 3, x[..., 0].numel()).view(*shape[:-1], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", MODEL_DTYPES)
@pytest.mark.parametrize("shape", [(1, 13), (4, 1), (5, 96), (0, 7), (1, 128), (5, 3, 7)])
def test_a_token_has_one_scale(dtype, source, shape) -> None:
    assert_as_expected(rows_of_all_sizes(*shape).to(source), "token", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", MODEL_DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 13), (5, 3, 7), (0, 3, 7), (3, 1, 1)])
def test_each_head_of_a_token_has_one_scale(dtype, source, shape) -> None:
    assert_as_expected(rows_of_all_sizes(*shape).to(source), "token_head", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_infinities_saturate_nan_stays_and_neither_makes_the_scale(dtype, granularity) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, -7.0, 3.0]]).view(1, 1, 5)
    codes, scales = dynamic_quant_fp8(x, granularity=granularity, dtype=dtype)
    assert scales.flatten().tolist() == [np.float32(7.0) / np.float32(LARGEST[dtype])]
    top = fp8_oracle.FORMATS[dtype][2]
    assert codes.view(torch.uint8).flatten().tolist()[:4] == [top, 0x80 | top, 0x7F, 0x80 | top]
    assert_as_expected(x, granularity, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_finite_magnitude_have_the_scale_one(dtype) -> None:
    x = torch.tensor([[0.0, -0.0], [torch.inf, -torch.nan], [1e-40, -0.0], [5.0, 0.0]])
    codes, scales = dynamic_quant_fp8(x, dtype=dtype)
    assert scales.tolist()[:3] == [1.0, 1.0, 1.0]
    top = fp8_oracle.FORMATS[dtype][2]
    assert codes.view(torch.uint8).tolist() == [[0, 0x80], [top, 0x7F], [0, 0x80], [top, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_scale_is_the_smallest_normal_number(dtype) -> None:
    least = torch.tensor(LARGEST[dtype] * 2.0**-126)
    x = torch.stack([least, torch.nextafter(least, torch.tensor(0.0))])[:, None]
    codes, scales = dynamic_quant_fp8(x, dtype=dtype)
    assert scales.tolist() == [2.0**-126, 1.0]
    assert codes.view(torch.uint8).flatten().tolist() == [fp8_oracle.FORMATS[dtype][2], 0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
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
def test_strides_do_not_matter_and_the_output_is_contiguous(granularity, strided) -> None:
    assert_as_expected(strided(torch.randn(6, 4, 8)), granularity, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantized_numbers_are_within_half_a_step(dtype) -> None:
    x = torch.randn(64, 128, dtype=torch.float64).float()
    codes, scales = dynamic_quant_fp8(x, dtype=dtype)
    restored = fp8_oracle.decode(codes, dtype) * scales[:, None].double()
    # Half a step is 2^-(mantissa bits + 1) of a normal number, half a subnormal's below; 2^-23 is
    # for the float32 scale and quotient.
    mantissa_bits, bias, _ = fp8_oracle.FORMATS[dtype]
    half_subnormal = 2.0 ** -(bias + mantissa_bits) * scales[:, None].double()
    relative = 2.0 ** -(mantissa_bits + 1) + 2.0**-23
    limit = torch.maximum(x.double().abs() * relative, half_subnormal)
    assert ((restored - x.double()).abs() <= limit).all()


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (torch.zeros(2, 2).double(), {}, "input: got dtype torch.float64"),
        (torch.zeros(2, 2), {"dtype": torch.int8}, "dtype: got torch.int8"),
        (torch.zeros(2, 2), {"granularity": "tensor"}, "granularity: got 'tensor', expected one"),
        (torch.zeros(2, 2), {"granularity": "token_head"}, r"\[2, 2\], expected \[num_tokens, n"),
        (torch.zeros(2), {}, r"input: got shape \[2\], expected \[num_tokens, columns\] or"),
        (torch.zeros(2, 2, 2, 2), {}, r"\[2, 2, 2, 2\], expected \[num_tokens, columns\] or"),
        (torch.zeros(3, 0), {}, r"input: got shape \[3, 0\], expected rows of one number"),
        (torch.zeros(2, 0, 4), {}, r"\[2, 0, 4\], expected rows of one number"),
        ([1.0], {}, "input: got list, expected a tensor"),
    ],
)
def test_what_is_not_served_is_refused(x, arguments, message) -> None:
    with pytest.raises(FormatError, match=message):
        dynamic_quant_fp8(x, **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_passes_opcheck(dtype, granularity, rows, strided) -> None:
    x = torch.randn(rows, 4, 12)[:, ::2] if strided else torch.randn(rows, 2, 12)
    operation = torch.ops.quantattn.dynamic_quant_fp8.default
    assert set(torch.library.opcheck(operation, (x, granularity, dtype)).values()) == {"SUCCESS"}


def test_compiles_without_graph_breaks_for_any_number_of_tokens() -> None:
    def quantize(x):
        codes, scales = dynamic_quant_fp8(x * 2, granularity="token_head")
        return codes.view(torch.uint8), scales

    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 17):
        x = torch.randn(rows, 2, 12)
        assert all(torch.equal(a, b) for a, b in zip(compiled(x), quantize(x), strict=True))
