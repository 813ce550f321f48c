"""dynamic_quant_fp8 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from quantattn.arithmetic import quantize_fp8_rows

__all__ = ["dynamic_quant_fp8"]


def dynamic_quant_fp8(input: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `quantattn.ops.dynamic_quant_fp8`."""
    rows = input.flatten(1) if granularity == "token" else input
    codes, scales = quantize_fp8_rows(rows, dtype)
    return codes.contiguous().view(input.shape), scales.contiguous()
