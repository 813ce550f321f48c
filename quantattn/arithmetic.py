"""FP8 quantization in plain torch: the rounding that every kernel reproduces bit by bit.

A number is divided by its scale in float32, saturates at the format's largest finite number
(infinities too), and is rounded to the nearest code, ties to even. NaN stays NaN, always as the one
code `0x7F`, so that equal inputs give equal bytes on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["decode_fp8", "dequantize_fp8", "encode_fp8", "quantize_fp8"]


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
