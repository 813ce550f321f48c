"""dynamic_quant_fp8: schema, checks, fake and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.errors import FormatError
from quantattn.ops._library import register
from quantattn.reference import dynamic_quant_fp8 as reference
from quantattn.validation import FP8_DTYPES, MODEL_DTYPES, check_tensor

__all__ = ["dynamic_quant_fp8"]

_DIMENSIONS = {"token": (2, 3), "token_head": (3,)}


def dynamic_quant_fp8(
    input: Tensor, *, granularity: str = "token", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantize to FP8 with scales that the numbers themselves give.

    scale = amax / largest number of `dtype`, code = round(input / scale), in float32. amax is the
    row's largest finite magnitude. Where the quotient is below the normal float32 numbers (a row of
    zeros), the scale is 1.0. Infinities saturate, NaN stays NaN.

    Args:
        input: `[num_tokens, columns]` or `[num_tokens, num_heads, head_dim]`, fp32, fp16 or bf16,
            any strides; a row holds one number at least.
        granularity: What has a scale of its own: `"token"`, or `"token_head"`, each head of a
            token, which needs the heads as a dimension.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        Codes of `dtype`, shape of `input`, and scales (dequantizing multipliers), float32
        `[num_tokens]` or `[num_tokens, num_heads]`; both contiguous.

    Raises:
        FormatError: A dtype, the granularity, or the input's shape is not served.

    Example:
        >>> codes, scales = dynamic_quant_fp8(torch.tensor([[2.0, -224.0], [0.0, 0.0]]))
        >>> codes.float(), scales
        (tensor([[   4., -448.],
                [   0.,    0.]]), tensor([0.5000, 1.0000]))
    """
    if dtype not in FP8_DTYPES:
        raise FormatError(f"dtype: got {dtype}, expected one of {FP8_DTYPES}")
    if granularity not in _DIMENSIONS:
        known = ", ".join(_DIMENSIONS)
        raise FormatError(f"granularity: got {granularity!r}, expected one of: {known}")
    _check_input(input, granularity)
    codes, scales = torch.ops.quantattn.dynamic_quant_fp8(input, granularity, dtype)
    return codes, scales


def _check_input(input: Tensor, granularity: str) -> None:
    shape = (None,) * getattr(input, "ndim", 0)
    check_tensor("input", input, shape=shape, dtypes=MODEL_DTYPES)
    if input.ndim not in _DIMENSIONS[granularity]:
        shapes = "[num_tokens, num_heads, head_dim]"
        if granularity == "token":
            shapes = f"[num_tokens, columns] or {shapes}"
        raise FormatError(
            f"input: got shape {list(input.shape)}, expected {shapes} for granularity"
            f" {granularity!r}"
        )
    if input.shape[1:].numel() == 0:
        raise FormatError(
            f"input: got shape {list(input.shape)}, expected rows of one number at least"
        )


def _cuda(input: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from quantattn.kernels import dynamic_quant_fp8 as kernel

    return kernel.dynamic_quant_fp8(input, granularity, dtype)


def _fake(input: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = input.new_empty(input.shape[: 1 if granularity == "token" else 2], dtype=torch.float32)
    return input.new_empty(input.shape, dtype=dtype), scales


register(
    "dynamic_quant_fp8(Tensor input, str granularity, ScalarType dtype) -> (Tensor, Tensor)",
    cpu=reference.dynamic_quant_fp8,
    cuda=_cuda,
    fake=_fake,
)
