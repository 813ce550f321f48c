"""Quantization in plain torch: the rounding that every kernel reproduces bit by bit.

FP8: a number is divided by its scale in float32, saturates at the format's largest finite number
(infinities too), and is rounded to the nearest code, ties to even. NaN stays NaN, always as the one
code `0x7F`, so that equal inputs give equal bytes on every device.

Formats with a scale for each row (one token's K or V of one head) compute it from the row, by IEEE
float32 operations as well; codes are rounded to the nearest, ties to even:

- fp8: scale = amax / 448, code = e4m3(x / scale), or with e5m2's 57344. Infinities saturate, NaN
  stays NaN.
- int8: scale = amax / 127, code = round(x / scale), -127 to 127. Infinities saturate, NaN is 0.
- int4: NaN counts as 0 and numbers saturate at +-2^110, then the row is rotated (see
  `quantattn.rotation`). offset = min (zero without a sign), scale = (max - min) / 15, code =
  round((x - offset) * (1 / scale)) of the exact product, 0 to 15, the even element in a byte's low
  nibble; x ~ code * scale + offset, in the rotated basis.

amax is the row's largest finite magnitude. Where the quotient is below the normal float32 numbers
(rows of zeros, for int4 of equal numbers), the scale is 1.0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantattn.formats import CacheFormat
from quantattn.rotation import rotate

__all__ = [
    "decode_fp8",
    "dequantize_fp8",
    "dequantize_rows",
    "encode_fp8",
    "quantize_fp8",
    "quantize_fp8_rows",
    "quantize_rows",
]

INT4_LIMIT = 2.0**110
"""Where int4 saturates, so that neither the rotation nor the range of a row overflows."""
SMALLEST_NORMAL = 2.0**-126


def encode_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest FP8 number, ties to even, saturating.

    Args:
        x: Numbers of any shape, fp32, fp16 or bf16.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        Codes of `dtype`, shape of `x`.

    Example:
        >>> encode_fp8(torch.tensor([1.0625, 500.0]), torch.float8_e4m3fn).float()
        tensor([  1., 448.])
    """
    largest = torch.finfo(dtype).max
    x = x.float()
    # torch's own cast to e5m2 overflows to infinity, and casts keep the sign of a NaN.
    saturated = x.clamp(-largest, largest).masked_fill(x.isnan(), math.nan)
    return saturated.to(dtype)


def decode_fp8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Read FP8 codes as float32, exactly.

    Args:
        codes: Codes of any shape, `dtype` itself or uint8 holding its bits.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Example:
        >>> decode_fp8(torch.tensor([0x38, 0x7E], dtype=torch.uint8), torch.float8_e4m3fn)
        tensor([  1., 448.])
    """
    return codes.view(dtype).float()


def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide by the scale in float32 and round: code = round(x / scale).

    Args:
        x: Numbers of any shape, fp32, fp16 or bf16.
        scale: Dequantizing multiplier, float32, broadcast against `x`.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Example:
        >>> quantize_fp8(torch.tensor([1.0]), torch.tensor(0.04), torch.float8_e4m3fn).float()
        tensor([24.])
    """
    return encode_fp8(x.float() / scale, dtype)


def dequantize_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply codes by the scale they were written with: x ~ code * scale, in float32.

    Args:
        codes: Codes of any shape, `dtype` itself or uint8 holding its bits.
        scale: Dequantizing multiplier, float32, broadcast against `codes`.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Example:
        >>> codes = torch.tensor([24.0]).to(torch.float8_e4m3fn)
        >>> dequantize_fp8(codes, torch.tensor(0.04), torch.float8_e4m3fn)
        tensor([0.9600])
    """
    return decode_fp8(codes, dtype) * scale


def quantize_fp8_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows to FP8, each with a scale of its own.

    Args:
        x: Rows `[..., width]`, fp32, fp16 or bf16, of one number at least.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        Codes of `dtype`, shape of `x`, and scales, float32 `[...]`.

    Example:
        >>> codes, scale = quantize_fp8_rows(torch.tensor([2.0, -224.0]), torch.float8_e4m3fn)
        >>> codes.float(), scale
        (tensor([   4., -448.]), tensor(0.5000))
    """
    x = x.float()
    scale = _row_scale(_largest_finite(x), torch.finfo(dtype).max)
    return quantize_fp8(x, scale[..., None], dtype), scale


def quantize_rows(x: Tensor, fmt: CacheFormat) -> tuple[Tensor, Tensor]:
    """Quantize rows, each with a scale of its own.

    Args:
        x: Rows `[..., width]`, fp32, fp16 or bf16.
        fmt: A format whose pages hold the scales.

    Returns:
        Codes, uint8 `[..., code_width]`, and scales, float32 `[...]`; of int4 `[..., 2]`: scale and
        offset.

    Example:
        >>> from quantattn.formats import parse_kv_cache_dtype
        >>> int8 = parse_kv_cache_dtype("int8_per_token_head")
        >>> quantize_rows(torch.tensor([0.635, -0.005]), int8)
        (tensor([127, 255], dtype=torch.uint8), tensor(0.0050))
    """
    return _QUANTIZE[fmt.name](x.float())


def dequantize_rows(codes: Tensor, scales: Tensor, fmt: CacheFormat) -> Tensor:
    """Read rows as float32; those of int4 are in the rotated basis.

    Args:
        codes: uint8 `[..., code_width]`.
        scales: float32 `[...]`; of int4 `[..., 2]`: scale and offset.
        fmt: The format that they were quantized to.

    Returns:
        Rows `[..., width]`.

    Example:
        >>> from quantattn.formats import parse_kv_cache_dtype
        >>> int8 = parse_kv_cache_dtype("int8_per_token_head")
        >>> dequantize_rows(torch.tensor([127, 255]).byte(), torch.tensor(0.5), int8)
        tensor([63.5000, -0.5000])
    """
    return _DEQUANTIZE[fmt.name](codes, scales)


def _row_scale(extent: Tensor, steps: float) -> Tensor:
    return torch.where(extent >= steps * SMALLEST_NORMAL, extent / steps, 1.0)


def _largest_finite(x: Tensor) -> Tensor:
    magnitude = x.abs()
    return torch.where(magnitude < math.inf, magnitude, 0.0).amax(-1)


def _quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_fp8_rows(x, torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def _dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    return dequantize_fp8(codes, scale[..., None], torch.float8_e4m3fn)


def _quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _row_scale(_largest_finite(x), 127.0)
    codes = (x / scale[..., None]).round().clamp(-127.0, 127.0)
    return codes.masked_fill(x.isnan(), 0.0).to(torch.int8).view(torch.uint8), scale


def _dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(torch.int8).float() * scale[..., None]


def _quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    x = rotate(x.masked_fill(x.isnan(), 0.0).clamp(-INT4_LIMIT, INT4_LIMIT))
    offset = x.amin(-1)
    # Which zero is the least of 0.0 and -0.0 is each device's own choice.
    offset = offset.masked_fill(offset == 0.0, 0.0)
    scale = _row_scale(x.amax(-1) - offset, 15.0)
    steps = (x - offset[..., None]).double() * (1.0 / scale[..., None]).double()
    codes = steps.round().clamp(0.0, 15.0).to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4), torch.stack((scale, offset), -1)


def _dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    scale, offset = scales[..., None].unbind(-2)
    numbers = torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2).float()
    return numbers * scale + offset


_QUANTIZE = {
    "fp8_per_token_head": _quantize_fp8,
    "int8_per_token_head": _quantize_int8,
    "int4_per_token_head": _quantize_int4,
}
_DEQUANTIZE = {
    "fp8_per_token_head": _dequantize_fp8,
    "int8_per_token_head": _dequantize_int8,
    "int4_per_token_head": _dequantize_int4,
}
