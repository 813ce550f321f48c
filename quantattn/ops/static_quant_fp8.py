"""static_quant_fp8: schema, checks, fake and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.errors import FormatError
from quantattn.ops._library import register
from quantattn.reference import static_quant_fp8 as reference
from quantattn.validation import (
    FP8_DTYPES,
    MODEL_DTYPES,
    check_group_scale,
    check_scale,
    check_tensor,
)

__all__ = ["static_quant_fp8"]


def static_quant_fp8(
    input: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    """Quantize to FP8 with a scale that is known beforehand: code = round(input / scale).

    The quotient is float32; it saturates (infinities too), rounds to nearest even and keeps NaN.
    With `[num_groups]` scales the columns (all dimensions but the first, flattened) are cut into as
    many equal runs: a scale a head, a group of heads or a group of columns.

    Args:
        input: fp32, fp16 or bf16, any strides. Any shape for one scale; `[num_tokens, columns]` or
            `[num_tokens, num_heads, head_dim]` for a scale a group.
        scale: Dequantizing multiplier, float32, `[]`, `[1]` or `[num_groups]`, not checked for its
            value.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        Codes of `dtype`, shape of `input`, contiguous.

    Raises:
        FormatError: A dtype is not served.
        ScaleError: The scale's dtype, shape or device does not fit, or its groups do not cut the
            columns evenly.

    Example:
        >>> static_quant_fp8(torch.tensor([[1.0, 1.0]]), torch.tensor([0.04, 0.5])).float()
        tensor([[24.,  2.]])
    """
    if dtype not in FP8_DTYPES:
        raise FormatError(f"dtype: got {dtype}, expected one of {FP8_DTYPES}")
    shape = (None,) * getattr(input, "ndim", 0)
    check_tensor("input", input, shape=shape, dtypes=MODEL_DTYPES)
    if input.ndim in (2, 3):
        check_group_scale("scale", scale, input.shape[1:].numel(), input.device)
    else:
        check_scale("scale", scale, 1, input.device)
    out: Tensor = torch.ops.quantattn.static_quant_fp8(input, scale, dtype)
    return out


def _cuda(input: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    from quantattn.kernels import static_quant_fp8 as kernel

    return kernel.static_quant_fp8(input, scale, dtype)


def _fake(input: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return input.new_empty(input.shape, dtype=dtype)


register(
    "static_quant_fp8(Tensor input, Tensor scale, ScalarType dtype) -> Tensor",
    cpu=reference.static_quant_fp8,
    cuda=_cuda,
    fake=_fake,
)
